"""The names of resources: which a user may give, and which are made of them.

What is kept on the nodes besides locks has a name that ends in a reserved suffix; no resource may
end so.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Sequence

from .errors import ConfigurationError
from .texts import names_of, shown
from .values import Owner

__all__ = [
    *(
        "FENCE_SUFFIX",
        "LINE_SUFFIX",
        "MARK_SUFFIX",
        "PAUSE_NAMES",
        "PAUSE_SUFFIX",
        "RESERVED_SUFFIX",
        "SLOT_SUFFIX",
        "START_SUFFIX",
        "TRUSTED_KEY",
    ),
    *(
        "Resources",
        "base_of",
        "checked_glob",
        "checked_names",
        "escaped",
        "mark_of",
        "matching",
        "plain",
        "slots",
    ),
]

FENCE_SUFFIX = "#fence"
"""Ends the key of a resource's last fencing token; no resource's own name may end so."""
SLOT_SUFFIX = "#slot"
"""With a number, ends the key of one of several holders of a resource; no name may end so."""
START_SUFFIX = "#start"
"""Ends the key of a start that a rate counts (`rate.py`), before the number of its slot."""
RESERVED_SUFFIX = "#reserved"
"""Ends the key of a resource's reservation (`reservation.py`), likewise."""
MARK_SUFFIX = "#done"
"""Ends the key that marks a delivery as done, likewise."""
LINE_SUFFIX = "#line"
"""Ends the key of a resource's wait queue (`wait_queue.py`), likewise."""
PAUSE_SUFFIX = "#pause"
"""With a number before it, names a pause (`pauses.py`); no resource's own name may end so."""
PAUSE_NAMES = tuple(f"{number}{PAUSE_SUFFIX}" for number in range(1, 17))
"""All that there can be, so that one request asks for them, and nobody has to list keys."""
TRUSTED_KEY = "#trusted"
"""Names the mark of a node that has earned its vote (`restart_guard.py`, rules 2 and 6): for how
many seconds it had been known by then, and as what. No ttl. No resource's name may end so."""
QUEUE_LIFE_S = 60.0
"""After which a wait queue is forgotten, in seconds; every waiter that tries renews it."""
FENCE_LIFE_S = 7 * 86_400.0
"""For how many seconds a node remembers a fencing token: as long as a write may be late, while
clocks have moved on."""
MAX_NAME_CHARS = 512
"""What a node's connection takes at once is finite, and every request bears the name."""
MAX_NAMES = 100
"""Names in one claim: while a node sets them it serves nobody else."""
MAX_NAMES_BYTES = 30_000
"""Of all names of one claim: a supervisor in another process reads them where a holder notes them
(`shared_table.py`), and it would not guard what it could not read."""

Resources = str | Sequence[str]
"""A name, or several of which a claim gets all or none."""

_OURS = {
    re.escape(FENCE_SUFFIX): "fencing tokens",
    re.escape(RESERVED_SUFFIX): "reservations",
    re.escape(START_SUFFIX): "the starts that a rate counts",
    re.escape(LINE_SUFFIX): "queues of waiters",
    re.escape(MARK_SUFFIX): "marks of tasks that are done",
    re.escape(PAUSE_SUFFIX): "pauses",
    re.escape(TRUSTED_KEY): "the marks of nodes that are trusted",
    re.escape(SLOT_SUFFIX) + "[0-9]+": "the slots of locks with a limit",
}


def base_of(name: str) -> str:
    """Return the resource whose slot this is; of any other name, the name."""
    base, _, number = name.rpartition(SLOT_SUFFIX)
    return base if number.isascii() and number.isdecimal() else name


def plain(name: str) -> str:
    """Return the resource whose slot, or whose start, this is; of any other name, the name."""
    return base_of(name).removesuffix(START_SUFFIX)


def checked_names(resource: Resources, *, fencing: bool = False, limit: int = 1) -> tuple[str, ...]:
    """Check the names of a claim, once; return each of them once.

    Raises:
        ConfigurationError: One of them cannot be a name, or is reserved; they are too many; or a
            limit or a fencing token is asked for several, or both.
    """
    if isinstance(resource, str):
        names: tuple[str, ...] = (_checked(resource),)
    elif not isinstance(resource, (list, tuple, set, frozenset)) or not resource:
        raise ConfigurationError(
            f"a resource is a name, not {resource!r}: give a string that is not empty, or a list of"
            " such"
        )
    else:
        names = names_of([_checked(name) for name in resource])
    if len(names) > 1:
        _check_together(names)
    if fencing or limit > 1:
        _check_alone(names, fencing, limit)
    return names


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"a resource is a name, not {name!r}: give a string that is not empty"
        )
    if "#" in name:
        for suffix, what in _OURS.items():
            if found := re.search(suffix + r"\Z", name):
                raise ConfigurationError(
                    f"a resource may not be named {name!r}: names ending in {found[0]!r} are"
                    f" reserved for {what}; choose another name"
                )
    if len(name) > MAX_NAME_CHARS:
        raise ConfigurationError(
            f"a resource's name has at most {MAX_NAME_CHARS} characters, because every node keeps"
            f" it and every request bears it; {name[:20]!r}... has {len(name)}: put a digest of it"
            " into the name"
        )
    return name


def _check_together(names: Sequence[str]) -> None:
    if len(names) > MAX_NAMES:
        raise ConfigurationError(
            f"one lock holds at most {MAX_NAMES} resources, not {len(names)}: give what they have"
            " in common a name, and lock that"
        )
    size = sum(len(name.encode("utf-8", "surrogatepass")) + 2 for name in names)
    if size > MAX_NAMES_BYTES:
        raise ConfigurationError(
            f"the names of one lock have at most {MAX_NAMES_BYTES} bytes together, because its"
            f" keeper reads them; these {len(names)} have {size}: put digests of them into the"
            " names"
        )


def _check_alone(names: Sequence[str], fencing: bool, limit: int) -> None:
    """Refuse what only one resource can have, or one holder at a time."""
    if limit > 1 and len(names) > 1:
        why = "a limit is of one resource; lock them one after the other, each with its limit"
    elif limit > 1 and fencing:
        why = (
            f"with limit={limit} there are as many holders at a time, and a fencing token would"
            " refuse the writes of all but the last; give fencing=False"
        )
    elif len(names) > 1:
        why = (
            "a fencing token is of one resource, and its numbers grow with the grants of that one"
            " alone; for several resources give fencing=False, or lock them one after the other"
        )
    else:
        return
    raise ConfigurationError(f"{shown(names)}: {why}")


def checked_glob(pattern: str) -> str:
    """Check a glob that a person wrote, and that is to do something to all names that fit it.

    Raises:
        ConfigurationError: It is empty, too long, or does not mean what it looks like.
    """
    if not pattern or len(pattern) > MAX_NAME_CHARS:
        wrong = f"has 1 to {MAX_NAME_CHARS} characters; it has {len(pattern)}"
    elif re.search(r"(?<!\\)(\\\\)*\\\Z", pattern):
        wrong = f"does not end in a backslash; {pattern!r} does: write two for one"
    elif "[" in re.sub(r"\\.|\[[^\]]+\]", "", pattern, flags=re.S):
        wrong = f"closes each '['; it is {pattern!r}: write '\\[' for one that means itself"
    else:
        return pattern
    raise ConfigurationError(f"a pattern of keys {wrong}")


def escaped(name: str) -> str:
    """Return the glob that this very name fits, and no other."""
    return re.sub(r"([\\*?\[])", r"\\\1", name)


def matching(pattern: str) -> Callable[[str], object]:
    """Return what tells whether a whole name fits a glob.

    It is one of Redis: `*`, `?`, `[a-z]`, `[^a-z]`, and a backslash before a character that means
    itself. Python's knows no backslash, and has ! for ^.
    """
    pattern = re.sub(r"\\(.)", lambda found: f"[{found[1]}]", pattern, flags=re.S)
    return re.compile(fnmatch.translate(pattern.replace("[^", "[!"))).match


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
