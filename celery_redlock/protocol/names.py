"""The names of resources: those that a user may give, and those that are made from them.

Everything on the nodes besides locks has a name that ends in a reserved suffix. No resource may
have such a name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from .errors import ConfigurationError
from .texts import counted, names_of, shown
from .values import Owner

__all__ = [
    *(
        "FENCE_SUFFIX",
        "LINE_SUFFIX",
        "MARK_SUFFIX",
        "MAX_SLOTS",
        "PAUSE_NAMES",
        "PAUSE_SUFFIX",
        "RESERVED_SUFFIX",
        "SLOT_SUFFIX",
        "START_SUFFIX",
        "TRUSTED_KEY",
    ),
    *(
        "Limit",
        "Limits",
        "Resources",
        "base_of",
        "checked_glob",
        "checked_names",
        "escaped",
        "grouped",
        "least",
        "mark_of",
        "matching",
        "of_each",
        "paired",
        "plain",
        "slots",
        "slots_of",
        "takeable",
    ),
]

FENCE_SUFFIX = "#fence"
"""Suffix of the key with a resource's last fencing token; no resource's own name may end so."""
SLOT_SUFFIX = "#slot"
"""Suffix, before a number, of the key of one of several holders of a resource; likewise."""
START_SUFFIX = "#start"
"""Suffix of the key of a start that a rate counts (`rate.py`), before the suffix of its slot."""
RESERVED_SUFFIX = "#reserved"
"""Suffix of the key of a resource's reservation (`reservation.py`); likewise."""
MARK_SUFFIX = "#done"
"""Suffix of the key that marks a delivery as done; likewise."""
LINE_SUFFIX = "#line"
"""Suffix of the key of a resource's wait queue (`wait_queue.py`); likewise."""
PAUSE_SUFFIX = "#pause"
"""Suffix, after a number, of the key of a pause (`pauses.py`); likewise."""
PAUSE_NAMES = tuple(f"{number}{PAUSE_SUFFIX}" for number in range(1, 17))
"""The names of all possible pauses. They are fixed, so that one request can ask for all of them,
and nobody has to list keys."""
TRUSTED_KEY = "#trusted"
"""Key of the mark of a node that has earned its vote (`restart_guard.py`, rules 2 and 6). Its value
is the number of seconds for which the node had been known by then, and its `NodeInfo.memory`. It
has no ttl. No resource's name may end so."""
QUEUE_LIFE_S = 60.0
"""The ttl of a wait queue, in seconds; every waiter that tries renews it."""
MAX_DEAD_WAITERS = 200
"""Maximum number of waiters that one wake-up passes over because they do not listen (schema.sql
repeats the number). The limit is there because the node serves nobody else meanwhile, and a queue
may have any length. The next waiter tries by itself soon."""
FENCE_LIFE_S = 7 * 86_400.0
"""Seconds for which a node remembers a fencing token: the longest that a write may be late, while
clocks have moved on."""
MAX_NAME_CHARS = 512
"""Maximum number of characters of a name: a node's connection takes a limited amount at once, and
every request contains the name."""
MAX_NAMES = 100
"""Maximum number of names in one claim: while a node sets them, it serves nobody else."""
MAX_NAMES_BYTES = 30_000
"""Maximum number of bytes of all names of one claim. The holder writes them into a table of limited
size (`shared_table.py`), where a supervisor in another process reads them; it could not guard a
claim whose names it cannot read."""

MAX_SLOTS = 100
"""Maximum number of holders of one key at a time. Each has its own name on the nodes, and a process
that finds one slot taken looks at all of them."""

ANY = frozenset(range(256))

T = TypeVar("T")
Resources = str | Sequence[str]
"""A name, or several names of which a claim gets all or none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limit of each name of a claim, where one number for all of them is not enough.

    Attributes:
        of: The maximum number of holders per name, in the order of the names.
        wide: Per name, the number of slots in which others count as holders. It is larger than `of`
            if others may hold slots under a larger limit. If empty, `of` holds for it, too.
    """

    of: tuple[int, ...]
    wide: tuple[int, ...] = ()


Limit = int | Limits
"""Maximum number of holders of each name of a claim at a time: one number for all names, or
`Limits`."""

_RESERVED = {
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
    """Return the resource that a slot belongs to; return any other name unchanged."""
    base, is_slot, number = name.rpartition(SLOT_SUFFIX)
    return base if is_slot and number.isascii() and number.isdecimal() else name


def plain(name: str) -> str:
    """Return the resource that a slot or a start belongs to; return any other name unchanged."""
    return base_of(name).removesuffix(START_SUFFIX)


def checked_names(resource: Resources, *, fencing: bool = False) -> tuple[str, ...]:
    """Check the names of a claim and return them without repetitions, in a fixed order.

    Raises:
        ConfigurationError: One of them cannot be a name, or is reserved; there are too many; or a
            fencing token is requested for several.
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
    if fencing and len(names) > 1:
        raise ConfigurationError(
            f"{shown(names)}: a fencing token is of one resource, and its numbers grow with the"
            " grants of that one alone; for several resources give fencing=False, or lock them one"
            " after the other"
        )
    return names


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"a resource is a name, not {name!r}: give a string that is not empty"
        )
    if "#" in name:
        for suffix, what in _RESERVED.items():
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
            f" extender reads them; these {len(names)} have {size}: put digests of them into the"
            " names"
        )


def checked_glob(pattern: str) -> str:
    """Check and return a user's glob, which will be applied to all names that match it.

    Raises:
        ConfigurationError: It is empty, too long, or does not mean what it seems to mean.
    """
    if not pattern:
        wrong = f"has 1 to {MAX_NAME_CHARS} characters; it has 0"
    elif re.search(r"(?<!\\)(\\\\)*\\\Z", pattern):
        wrong = f"does not end in a backslash; {pattern!r} does: write two for one"
    elif not all(closed for _allowed, closed in _steps(pattern)):
        wrong = f"closes each '['; it is {pattern!r}: write '\\[' for one that means itself"
    else:
        return pattern
    raise ConfigurationError(f"a pattern of keys {wrong}")


def escaped(name: str) -> str:
    """Return the glob that matches this very name and no other."""
    return re.sub(r"([\\*?\[])", r"\\\1", name)


def matching(pattern: str) -> Callable[[str], object]:
    """Return a function that matches a whole name against a glob, byte by byte as in Redis.

    The syntax is `*`, `?`, `[a-z]`, `[^a-z]`, and a backslash before a character that means itself.

    Raises:
        ConfigurationError: The glob is too long.
    """
    runs = [b""]
    for allowed, _closed in _steps(pattern):
        if allowed is None:
            runs.append(b"")
        else:
            runs[-1] += _one_of(allowed)
    first, *others = runs
    last = b".*" + others.pop() if others else b""
    # Each run between two stars is put where it first matches, and stays there: its length is
    # fixed, so the rest then has the most room. Trying other places would take exponential time.
    between = b"".join(b"(?=(?P<g%d>.*?%b))(?P=g%d)" % (n, run, n) for n, run in enumerate(others))
    fits = re.compile(first + between + last, re.S).fullmatch
    return lambda name: fits(name.encode("utf-8", "surrogatepass"))


def _one_of(allowed: Set[int]) -> bytes:
    """Return a regular expression that matches one byte of a set."""
    if len(allowed) > 128:
        return b"[^%b]" % _listed(ANY - allowed) if allowed != ANY else b"."
    return b"[%b]" % _listed(allowed) if allowed else b"(?!)"


def _listed(some: Set[int]) -> bytes:
    return b"".join(b"\\x%02x" % byte for byte in sorted(some))


def _steps(pattern: str) -> Iterator[tuple[Set[int] | None, bool]]:
    """Yield, for each step of a glob, the bytes that it matches and True if its bracket is closed.

    For a star, which matches any number of any bytes, None stands in place of the set. The glob is
    read in the same way as by `stringmatchlen` in the servers' util.c.
    """
    if len(pattern) > MAX_NAME_CHARS:
        raise ConfigurationError(
            f"a pattern of keys has 1 to {MAX_NAME_CHARS} characters; it has {len(pattern)}"
        )
    text, at = pattern.encode("utf-8", "surrogatepass"), 0
    while at < len(text):
        char, at = text[at : at + 1], at + 1
        if char == b"[":
            inverse = text[at : at + 1] == b"^"
            at += inverse
            allowed: set[int] = set()
            while at < len(text) and text[at : at + 1] != b"]":
                if text[at : at + 1] == b"\\" and at + 1 < len(text):
                    first = last = text[at + 1]
                    at += 2
                elif text[at + 1 : at + 2] == b"-" and at + 2 < len(text):
                    first, last = sorted((text[at], text[at + 2]))
                    at += 3
                else:
                    first = last = text[at]
                    at += 1
                allowed.update(range(first, last + 1))
            at += 1
            yield (ANY - allowed if inverse else allowed), at <= len(text)
        elif char in b"*?":
            yield (None if char == b"*" else ANY), True
        else:
            if char == b"\\" and at < len(text):
                char, at = text[at : at + 1], at + 1
            yield frozenset(char), True


def mark_of(owner: Owner, resources: Sequence[str]) -> str:
    """Return the name of the mark that a delivery is done.

    Anybody who may publish can give a task the id of another one. So the name also contains a
    digest of the task's name and its resources: the mark does not apply to a delivery of another
    task, or to another lock.
    """
    work = ascii((owner.task, tuple(resources)))  # the same text in every version of Python
    digest = hashlib.sha256(work.encode()).hexdigest()[:16]
    return f"{owner.task_id}:{owner.retries}:{digest}{MARK_SUFFIX}"


def slots(name: str, limit: int) -> list[str]:
    """Return the names of the slots of a resource; the first is the resource's own name.

    So a lock without a limit, or with another one, takes one of the same slots, and there are never
    more holders than the largest limit allows.
    """
    return [name, *(f"{name}{SLOT_SUFFIX}{number}" for number in range(2, limit + 1))]


def of_each(names: Sequence[str], limit: Limit) -> tuple[int, ...]:
    """Return the limit of each of some names."""
    return limit.of if isinstance(limit, Limits) else (limit,) * len(names)


def least(limit: Limit) -> int:
    """Return the maximum number of claims of the same names at a time."""
    return min(limit.of) if isinstance(limit, Limits) else limit


def slots_of(names: Sequence[str], limit: Limit) -> list[list[str]]:
    """Return, for each name, the slots in which others count as holders (`Limits.wide`)."""
    wide = limit.wide if isinstance(limit, Limits) else ()
    return [*map(slots, names, wide or of_each(names, limit))]


def grouped(items: Iterable[T], like: Iterable[Sequence[object]]) -> Iterator[list[T]]:
    """Split a row of items into groups as long as those of `like`."""
    row = iter(items)
    return (list(islice(row, len(group))) for group in like)


def takeable(names: Sequence[str], limit: Limit, free: Iterable[bool]) -> list[list[str]]:
    """Return, for each name, the slots that a claim may take: as many as there is room for.

    Args:
        names: The names of the claim.
        limit: The maximum number of holders of each of them.
        free: For each slot of `slots_of`, in one row, True if nobody holds it.
    """
    every, found = slots_of(names, limit), []
    each = zip(every, grouped(free, every), of_each(names, limit), strict=True)
    for slots, are_free, many in each:
        own = [slot for slot, is_free in zip(slots[:many], are_free, strict=False) if is_free]
        found.append(own[: max(0, many - are_free.count(False))])
    return found


def paired(names: Sequence[str], limits: Sequence[int]) -> tuple[tuple[str, ...], Limit]:
    """Return the names of a claim, each once and in a fixed order, and their limits.

    A name that is given twice gets the smaller of its limits.

    Raises:
        ConfigurationError: The number of limits differs from that of the names, or the names have
            no order.
    """
    if not isinstance(names, (list, tuple)):
        raise ConfigurationError(
            f"the keys {shown(sorted(names))} are given in a {type(names).__name__}, which has no"
            " order, and each limit is of one of them: give a list of keys, or one limit for all"
        )
    if len(limits) != len(names):
        keys = (
            f"key {names[0]} has" if len(names) == 1 else f"{len(names)} keys {shown(names)} have"
        )
        raise ConfigurationError(
            f"the {keys} {counted(len(limits), 'limit')}, {list(limits)}: give one for each key, in"
            " their order, or one number, which is the limit of each"
        )
    of: dict[str, int] = {}
    for name, limit in zip(names, limits, strict=True):
        of[name] = min(limit, of.get(name, limit))
    every = names_of(list(of))
    each = tuple(of[name] for name in every)
    return every, Limits(each) if len(set(each)) > 1 else each[0]
