"""The names of resources: which a user may give, and which are made of them.

What is kept on the nodes besides locks has a name that ends in a suffix of its own; no resource may
be named so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from .commands import FENCE_SUFFIX, LINE_SUFFIX, MARK_SUFFIX, RESERVED_SUFFIX, SLOT_SUFFIX
from .errors import ConfigurationError
from .values import Owner, names_of, shown

__all__ = ["Resources", "check_alone", "checked_names", "mark_of", "slots"]

LONGEST = 512
"""Characters of a resource's name. What a node's connection takes at once is finite."""
MOST = 100
"""Names in one claim: while a node sets them it serves nobody else."""
ROOM = 30_000
"""Bytes of all names of one claim: a keeper in another process reads them where a holder notes them
(`shared_table.py`), and what it could not read it would not guard."""

Resources = str | Sequence[str]
"""A name, or several of which a claim gets all or none."""

_OURS = {
    re.escape(FENCE_SUFFIX): "the key of a fencing token",
    re.escape(RESERVED_SUFFIX): "the key of a reservation",
    re.escape(LINE_SUFFIX): "the line of those who wait",
    re.escape(MARK_SUFFIX): "the mark of a task that is done",
    re.escape(SLOT_SUFFIX) + "[0-9]+": "one of the slots of a lock with a limit",
}


def checked_names(resource: Resources) -> tuple[str, ...]:
    """The names of a claim, each once.

    Raises:
        ConfigurationError: One of them cannot be one.
    """
    if isinstance(resource, str):
        return (_checked(resource),)
    if not isinstance(resource, (list, tuple, set, frozenset)) or not resource:
        raise ConfigurationError(
            f"a resource is a name, not {resource!r}: give a string that is not empty, or a list of"
            " such"
        )
    names = names_of([_checked(name) for name in resource])
    if len(names) > MOST:
        raise ConfigurationError(
            f"one lock holds at most {MOST} resources, not {len(names)}: give what they have in"
            " common a name, and lock that"
        )
    size = sum(len(name.encode("utf-8", "surrogatepass")) + 2 for name in names)
    if size > ROOM:
        raise ConfigurationError(
            f"the names of one lock have at most {ROOM} bytes together, for its keeper reads them;"
            f" these {len(names)} have {size}: put digests of them into the names"
        )
    return names


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"a resource is a name, not {name!r}: give a string that is not empty"
        )
    if "#" in name:
        for suffix, what in _OURS.items():
            if re.search(suffix + r"\Z", name):
                raise ConfigurationError(
                    f"a resource may not be named {name!r}: what ends so is {what}; give it"
                    " another end"
                )
    if len(name) > LONGEST:
        raise ConfigurationError(
            f"a resource's name has at most {LONGEST} characters, for every node keeps it and"
            f" every request bears it; {name[:20]!r}... has {len(name)}: put a digest"
            " of it into the name"
        )
    return name


def check_alone(names: Sequence[str], *, fencing: bool, limit: int) -> None:
    """Refuse what can only be had of one resource, or by one holder at a time.

    Raises:
        ConfigurationError: A limit or a fencing token for several, or both.
    """
    if limit > 1 and len(names) > 1:
        raise ConfigurationError(
            f"{shown(names)}: a limit is of one resource; lock them one after the other, each with"
            " its limit"
        )
    if limit > 1 and fencing:
        raise ConfigurationError(
            f"{shown(names)}: with limit={limit} there are as many holders at a time, and a fencing"
            " token would refuse the writes of all but the last; give fencing=False"
        )
    if fencing and len(names) > 1:
        raise ConfigurationError(
            f"{shown(names)}: a fencing token is of one resource, and its numbers grow with the"
            " grants of that one alone; for several resources give fencing=False, or lock them one"
            " after the other"
        )


def mark_of(owner: Owner, resources: Sequence[str]) -> str:
    """The name of the mark that says that a delivery is done.

    Anybody who may publish can give any task the id of another. So it names the task and what that
    locks, too, in a digest: of a delivery of another task, or under another lock, it says nothing.
    """
    work = ascii((owner.task, tuple(resources)))  # the same text in every version of Python
    digest = hashlib.sha256(work.encode()).hexdigest()[:16]
    return f"{owner.task_id}:{owner.retries}:{digest}{MARK_SUFFIX}"


def slots(name: str, limit: int) -> list[str]:
    """The names of a resource that `limit` may hold at a time; one of them is its own.

    Whoever locks it without a limit, or with another, thus takes one of the same slots: there are
    never more holders than the largest limit says.
    """
    return [name, *(f"{name}{SLOT_SUFFIX}{number}" for number in range(2, limit + 1))]
