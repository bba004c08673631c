"""Assertions about locks, with the found state in their errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Task

from ..locking.held import HeldLease
from ..messages.headers import short_id
from ..messages.skipped import Skipped
from ..protocol.lease import Lease
from ..protocol.names import Limit
from ..protocol.outcome import seen
from ..protocol.values import Owner, Vote, token_digest
from ..runtime.blocking import blocking
from .target import Target, target_of

__all__ = ["assert_free", "assert_locked", "assert_reserved", "assert_skipped"]

WITHIN_S = 5.0
"""Seconds to wait for the asserted state: a body begins, and a lock is freed, a moment later."""
EVERY_S = 0.01
"""Seconds between two checks; a read from nodes of this machine takes about a millisecond."""


@dataclass(frozen=True)
class _Held:
    """One token, with the nodes that hold it."""

    token: str
    nodes: tuple[str, ...]
    total: int
    expires_in: float

    @property
    def whole(self) -> bool:
        return len(self.nodes) > self.total // 2

    def __str__(self) -> str:
        who = Owner.of(self.token) or "another program's key"
        part = f"{len(self.nodes)} of {self.total} nodes: {', '.join(self.nodes)}"
        left = f"{self.expires_in:.1f} s left" if self.expires_in < float("inf") else "no expiry"
        return f"{who} ({part}; {left}; token {token_digest(self.token)})"


def assert_locked(
    what: Any, *args: Any, by: Any = None, within: float = WITHIN_S, **kwargs: Any
) -> None:
    """Assert that a lock is held: a quorum of the nodes has one holder's token.

    Args:
        what: A resource's name, a task (followed by its arguments), or a signature.
        by: The expected holder: an `AsyncResult` or a task's id (a task run by a worker puts its
            id into the token), a task, a lease. None for any.
        within: Seconds to wait for it. If the task itself has an argument named `by` or `within`,
            use a signature.

    Raises:
        AssertionError: It is free, or held by another; the text names the holder and the nodes.
        QuorumUnavailable: Too few nodes answered.
    """
    __tracebackhide__ = True
    target = target_of(what, args, kwargs)
    _eventually(lambda: _not_held(target, target.names, target.limit, by, "locked"), within)


def assert_reserved(
    what: Any, *args: Any, by: Any = None, within: float = WITHIN_S, **kwargs: Any
) -> None:
    """Assert that a message has reserved the key of a task whose scope begins with "until".

    Arguments and errors are those of `assert_locked`.
    """
    __tracebackhide__ = True
    target = target_of(what, args, kwargs)
    _eventually(lambda: _not_held(target, target.reserved_names, 1, by, "reserved"), within)


def assert_free(what: Any, *args: Any, within: float = WITHIN_S, **kwargs: Any) -> None:
    """Assert that a lock is neither held nor reserved, so that the next caller gets it.

    Arguments and errors are those of `assert_locked`.
    """
    __tracebackhide__ = True
    target = target_of(what, args, kwargs)

    def check() -> str:
        held, taken = _look(target, target.names, target.limit)
        if taken:
            return f"{target} is not free: locked by {_all(held)}"
        if target.reserves:
            held, taken = _look(target, target.reserved_names)
            if taken:
                return f"{target} is not free: reserved by {_all(held)}"
        return ""

    _eventually(check, within)


def assert_skipped(result: Any, within: float = WITHIN_S) -> Skipped:
    """Assert that the body was not run, because the lock was held or the task was a duplicate.

    Args:
        result: The result of `delay` or `apply` (its end is waited for), or a task's result value.
        within: Seconds to wait for the result.

    Returns:
        The marker, with `["resource"]` and `["holder"]`.

    Raises:
        AssertionError: The body was run, or failed; the text has its result.
    """
    __tracebackhide__ = True
    what, value = "the task", result
    if hasattr(result, "get") and hasattr(result, "state"):
        what = f"the task {getattr(result, 'name', None) or ''} {result.id}".replace("  ", " ")
        _eventually(
            lambda: "" if result.ready() else f"{what} has no result yet: {result.state}", within
        )
        value = result.result
        if result.failed():
            raise AssertionError(f"{what} was not skipped: it failed with {value!r}")
    marker = Skipped.of(value)
    if marker is None:
        raise AssertionError(f"{what} was not skipped: its body ran and returned {value!r}")
    return marker


def _not_held(target: Target, names: tuple[str, ...], limit: Limit, by: Any, word: str) -> str:
    """Return the error text; empty if the lock is held, and by the right holder."""
    found, _taken = _look(target, names, limit)
    whole = [held for held in found if held.whole]
    wanted = f"{target} is not {word}"
    if by is not None:
        name, is_its = _holder(by)
        wanted += f" by {name}"
    if any(by is None or is_its(held.token) for held in whole):
        return ""
    nodes = len(target.redlock.nodes)
    if whole:
        return f"{wanted}, but by {_all(whole)}"
    if found:
        return f"{wanted}: no quorum of the {nodes} nodes has one token, but {_all(found)}"
    return f"{wanted}: it is free on all nodes that answered, of {nodes}"


def _look(target: Target, names: tuple[str, ...], limit: Limit = 1) -> tuple[list[_Held], bool]:
    """Return all tokens under the names, with their nodes; and True if one keeps others out."""
    redlock = target.redlock
    ballot = blocking(redlock.client.peek(names, limit))
    votes = zip(redlock.nodes, ballot.votes, strict=True)
    voted = [name for name, vote in votes if vote is Vote.YES]
    found, taken = [], False
    for slot in range(len(ballot.claims)):
        pairs = list(zip(voted, seen(ballot, slot), strict=True))
        there = [(node, *held) for node, held in pairs if held is not None]
        taken = taken or len(pairs) - len(there) < ballot.quorum
        for token in dict.fromkeys(token for _node, token, _left in there):
            of_it = [(node, left) for node, other, left in there if other == token]
            nodes = tuple(node for node, _left in of_it)
            longest = max(left for _node, left in of_it)
            found.append(_Held(token, nodes, len(redlock.nodes), longest))
    return found, taken


def _holder(by: Any) -> tuple[str, Callable[[str], bool]]:
    """Return the name of `by`, and a function that checks if a token belongs to it."""
    if isinstance(by, HeldLease | Lease):
        return f"the lease with token {token_digest(by.token)}", lambda token: token == by.token
    if isinstance(by, Owner):
        return str(by), lambda token: Owner.of(token) == by
    if isinstance(by, Task):
        return f"the task {by.name}", lambda token: getattr(Owner.of(token), "task", "") == by.name
    task_id = getattr(by, "id", by)
    short = short_id(task_id) or None  # a plain call's token has no task's id
    return f"task {task_id}", lambda token: getattr(Owner.of(token), "task_id", "") == short


def _all(found: list[_Held]) -> str:
    return "; ".join(map(str, found))


def _eventually(check: Callable[[], str], within: float) -> None:
    """Wait until `check` returns an empty text, or raise its text as an error."""
    __tracebackhide__ = True
    until = time.monotonic() + within
    while wrong := check():
        if time.monotonic() >= until:
            raise AssertionError(wrong)
        time.sleep(EVERY_S)
