"""Decide what becomes of a message that meets another's lock, or another's reservation.

It is done by `delivery.py`, `conflict.py`, `consume.py` and `publication.py`. A decision depends on
its arguments alone, and asks or writes nothing. So `celery redlock explain` can ask for the answers
that a worker would get.
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
    "is_split",
    "meets_reservation",
    "parkable",
    "parks",
    "set_parking",
]

MIN_PAUSE_S = 0.1
"""Seconds before a task is delivered again, at least: who is refused at once is no busy loop."""
MAX_PARKED_PAUSE_S = 0.3
"""Before a task is delivered again where workers park what meets a held lock: it only has to come
back to a main process."""
MAX_COPY_PAUSE_S = 30.0
"""Before a copy is delivered again: when its first delivery dies, it is to run soon; but the first
may be at work for hours, and each of its looks costs two rounds and a message."""
PUT_OFF_SPREAD_S = 1.0
"""Over which tasks are spread that were put off until one moment; each worker reads the uptime of a
server to a second."""

_parking = [False]
"""Whether this process is a worker that parks deliveries, or a pool child of one."""


@dataclass(frozen=True)
class Action:
    """What a delivery does that is refused its lock.

    Attributes:
        do: "retry" sends it again, "run" runs it without its lock, "skip", "raise" and "reject" end
            it, "wait" and "replace" go on trying, and "ask" asks the user's function for a policy.
        wait: For how long it tries in its process; seconds.
        then: What ends it when it gives up: "skip", "raise" or "reject".
        deadline: For how long one holder may be in its way before it gives up, in seconds; None if
            it never does.
        gives_up: Whether it ends because that time is over.
    """

    do: str
    wait: float = 0.0
    then: str = "raise"
    deadline: float | None = None
    gives_up: bool = False


def decide(
    options: TaskOptions, refusal: NotAcquired, attempts: Mapping[str, Any] | None = None
) -> Action:
    """Return what a delivery does that is refused its lock.

    Args:
        options: How its task is locked. If its `on_conflict` was a function that has been asked,
            its answer is there in its place.
        refusal: Whether the lock is held, or too few nodes answer.
        attempts: What the message says of its refusals, with this one; None if it is the first.
    """
    attempts = attempts or {}
    copy = attempts.get("copy", False)
    held = not isinstance(refusal, QuorumUnavailable)
    policy = options.on_conflict if held else options.on_unavailable
    if held and copy:
        # Were it skipped or failed, that would be the state of the first delivery, too, which has
        # the same id; and if the first dies, this is the message that is left.
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
    """Return in how many seconds a message is to be delivered again: full jitter.

    Args:
        options: How its task is locked.
        refusal: Why it is sent again.
        attempts: What the message says of its refusals, with this one.
        parked: Whether a worker will park it.
        most: The longest pause that its broker lets a worker keep it for; seconds.
    """
    known = refusal.retry_after if isinstance(refusal, QuorumUnavailable) else None
    if known is not None:  # before that moment every try fails, on whichever worker
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
        # When the next may start is known.
        next_in = refusal.holder.expires_in or 0.0
        return min(next_in + random.uniform(MIN_PAUSE_S, PUT_OFF_SPREAD_S), max(MIN_PAUSE_S, most))
    return max(MIN_PAUSE_S, random.uniform(0, min(ceiling, most)))


def meets_reservation(end: str | None, *, late: bool, freed: bool, successor: bool = False) -> str:
    """Return what a message does whose key another task has reserved.

    A task's result is stored before its key is freed: a message that was sent because of that
    result is no duplicate.

    Args:
        end: The state in which the other has ended; None if it is not known to.
        late: Whether it has had time enough to free its key.
        freed: Whether freeing it was tried often enough.
        successor: Whether the other has published this message, so that it is about to end.

    Returns:
        "wait" for it to be freed, "free" it, or be a "duplicate".
    """
    if end is None and not successor:
        return "duplicate"
    if end != states.REVOKED and not late:
        return "wait"
    return "free" if end is not None and not freed else "duplicate"


def is_split(refusal: ResourceHeld) -> bool:
    """Whether several that tried at once share the nodes, so that none of them has a quorum."""
    holder = refusal.holder
    return holder is not None and not refusal.permanent and holder.nodes < holder.quorum


def check_rejecting(task: Any, options: TaskOptions) -> None:
    """Refuse a task that is to reject its message when it has been acknowledged already.

    Raises:
        ConfigurationError: `reject` is its policy, and `acks_late` is not set.
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
    """Note, in a worker's main process before it forks its pool, whether it parks deliveries."""
    _parking[0] = parking


def parks(options: TaskOptions) -> bool:
    """Whether this worker parks a delivery that meets a held lock.

    Such a delivery never waits in a pool slot: its body's process sends it again at once.
    """
    return _parking[0] and parkable(options)


def parkable(options: TaskOptions) -> bool:
    """Whether deliveries of such a task can be parked: it waits its turn for a lock."""
    return options.on_conflict == "retry" and options.scope != "until_executing"
