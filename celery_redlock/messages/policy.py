"""Decide what becomes of a message that meets another's lock, or another's reservation.

`delivery.py`, `conflict.py`, `consume.py` and `publication.py` carry out the decisions. A decision
depends only on its arguments, and no node is asked. So `celery redlock explain` can show the
decision that a worker would get.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import states

from ..config.options import TaskOptions
from ..protocol.errors import ConfigurationError, NotAcquired, QuorumUnavailable, ResourceHeld

__all__ = [
    "Action",
    "backoff",
    "check_rejecting",
    "decide",
    "decide_reserved",
    "is_split",
    "parkable",
    "parks",
    "set_parking",
]

MIN_PAUSE_S = 0.1
"""Minimum seconds before a task is delivered again, so that refusals do not make a busy loop."""
MAX_PARKED_PAUSE_S = 0.3
"""Maximum seconds before a task is delivered again if workers park it: it only has to return to a
main process."""
MAX_COPY_PAUSE_S = 30.0
"""Maximum seconds before a copy is delivered again. If its first delivery dies, the copy must run
soon; but the first may run for hours, and each try of the copy costs two rounds and a message."""
PUT_OFF_SPREAD_S = 1.0
"""Seconds over which tasks are spread that wait for the same moment; each worker reads the uptime
of a server with a precision of one second."""

_parking = [False]
"""True if this process is a worker that parks deliveries, or a pool child of one."""


@dataclass(frozen=True)
class Action:
    """The action of a delivery that was refused its lock.

    Attributes:
        do: "retry" sends it again, "run" runs it without its lock, "skip", "raise" and "reject" end
            it, "wait" and "replace" go on trying, and "ask" asks the user's function for a policy.
        wait: How long it tries in its process; seconds.
        then: How it ends when it gives up: "skip", "raise" or "reject".
        deadline: How long one holder may be in its way before it gives up, in seconds; None if it
            never does.
        gives_up: True if it ends because that time is over.
    """

    do: str
    wait: float = 0.0
    then: str = "raise"
    deadline: float | None = None
    gives_up: bool = False


def decide(
    options: TaskOptions, refusal: NotAcquired, attempts: Mapping[str, Any] | None = None
) -> Action:
    """Return the action of a delivery that was refused its lock.

    Args:
        options: The options of its task. If its `on_conflict` is a function that was already
            called, its answer is in its place.
        refusal: The refusal: the lock is held, or too few nodes answer.
        attempts: The message's count of refusals, with this one; None if it is the first.
    """
    attempts = attempts or {}
    copy = attempts.get("copy", False)
    held = not isinstance(refusal, QuorumUnavailable)
    policy = options.on_conflict if held else options.on_unavailable
    if held and copy:
        # A copy is neither skipped nor failed: that would become the state of the first delivery,
        # too, which has the same id. And if the first dies, the copy is all that is left.
        policy = "retry"
    if not isinstance(policy, str):
        return Action("ask")
    wait = options.waits[policy] if held else 0.0
    if policy != "retry":
        return Action(policy, wait, options.on_deadline)
    deadline = None if copy else options.retry_deadline
    if deadline is not None and attempts.get("stuck", 0.0) >= deadline:
        return Action(options.on_deadline, gives_up=True)
    return Action(policy, wait, options.on_deadline, deadline)


def backoff(
    options: TaskOptions,
    refusal: NotAcquired,
    attempts: Mapping[str, Any],
    parked: bool,
    most: float,
) -> float:
    """Return the seconds until a message must be delivered again, with full jitter.

    Args:
        options: The options of its task.
        refusal: Why it is sent again.
        attempts: The message's count of refusals, with this one.
        parked: True if a worker will park it.
        most: The longest pause for which its broker lets a worker keep it; seconds.
    """
    known = refusal.retry_after if isinstance(refusal, QuorumUnavailable) else None
    if known is not None:  # before that moment every try fails, on any worker
        return known + random.uniform(MIN_PAUSE_S, PUT_OFF_SPREAD_S)
    held = isinstance(refusal, ResourceHeld)
    count = attempts["held" if held else "unavailable"]
    # 60 doublings are longer than any maximum, and more would overflow.
    ceiling = min(options.retry_backoff_max, options.retry_backoff * 2.0 ** min(count - 1, 60))
    if attempts.get("copy"):
        ceiling = min(ceiling, MAX_COPY_PAUSE_S)
    if parked and held:
        ceiling = MAX_PARKED_PAUSE_S
    elif options.rate is not None and isinstance(refusal, ResourceHeld) and refusal.holder:
        # Under a rate the time of the next start is known.
        next_in = refusal.holder.expires_in or 0.0
        return min(next_in + random.uniform(MIN_PAUSE_S, PUT_OFF_SPREAD_S), max(MIN_PAUSE_S, most))
    return max(MIN_PAUSE_S, random.uniform(0, min(ceiling, most)))


def decide_reserved(end: str | None, *, late: bool, freed: bool, successor: bool = False) -> str:
    """Return the next step of a message whose key another task has reserved.

    A task's result is stored before its key is released, so a message that was sent because of that
    result is not a duplicate.

    Args:
        end: The state in which the other task has ended; None if no end is known.
        late: True if the other task has had enough time to release its key.
        freed: True if the release of its key was tried often enough.
        successor: True if the other task has published this message, so that it is about to end.

    Returns:
        "wait" for the release of the key, "free" to release it, or "duplicate".
    """
    if end is None and not successor:
        return "duplicate"
    if end != states.REVOKED and not late:
        return "wait"
    return "free" if end is not None and not freed else "duplicate"


def is_split(refusal: ResourceHeld) -> bool:
    """Return True if several attempts at once share the nodes, so that none has a quorum."""
    holder = refusal.holder
    return holder is not None and not refusal.permanent and holder.nodes < holder.quorum


def check_rejecting(task: Any, options: TaskOptions) -> None:
    """Check that a task does not reject a message that has been acknowledged already.

    Raises:
        ConfigurationError: A policy of it is `reject`, and `acks_late` is not set.
    """
    given = {"on_conflict": options.on_conflict, "on_deadline": options.on_deadline}
    for name, policy in given.items():
        if policy == "reject" and not task.acks_late:
            raise ConfigurationError(
                f"{task.name}: {name} is 'reject', but its messages are acknowledged before its"
                " body begins, and can no longer be rejected then: set acks_late=True, or choose"
                " 'raise' or 'skip'"
            )


# -- Parking --------------------------------------------------------------------------------------


def set_parking(parking: bool) -> None:
    """Set whether this worker parks deliveries; call it before its main process forks the pool."""
    _parking[0] = parking


def parks(options: TaskOptions) -> bool:
    """Return True if this worker parks a delivery that meets a held lock.

    Such a delivery never waits in a pool slot: its body's process sends it again at once.
    """
    return _parking[0] and parkable(options)


def parkable(options: TaskOptions) -> bool:
    """Return True if deliveries with these options can be parked, because they wait for a lock."""
    return options.on_conflict == "retry" and options.scope != "until_executing"
