"""Predict what one call of a locked task would do now.

The rules are those of `publication.py` and `policy.py`, in words. Nothing is acquired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.options import TASK, TaskOptions
from ..config.settings import LOCK_OPTIONS, NOT_WITH_RATE, RETRY_OPTIONS, enabled, given_names
from ..keys.resolver import Templates
from ..messages.headers import MAX_ID_CHARS
from ..messages.policy import Action, decide, parkable
from ..messages.reservation import belongs_to_other_task
from ..protocol.errors import NotAcquired, QuorumUnavailable, ResourceHeld
from ..protocol.texts import printable

if TYPE_CHECKING:
    from ..config.task_lock import TaskLock
    from ..doctor.workers import Pool
    from ..survey.models import Entry

__all__ = ["Verdict", "options_of", "parks", "read_by", "rule_of", "verdicts", "without_slot"]

ENDINGS = {"skip": "is skipped", "reject": "is rejected", "raise": "fails"}
"""The effect of a policy on a body that it ends, in words."""
INERT = (
    *("key", "scope_name", "fencing", "limit", "shared", "rate", "burst"),
    *("hold_for", "reserve_ttl", "retry_deadline", "progress_timeout"),
)
"""Options without effect until they are set."""


class Verdict(NamedTuple):
    """The predicted outcome of a call: a word for programs, a sentence for people."""

    outcome: str
    text: str


def verdicts(
    task: Any,
    how: TaskOptions,
    limits: Mapping[str, int],
    entries: Iterable[Entry],
    refusal: QuorumUnavailable | None,
    kept_out: bool = False,
) -> tuple[Verdict, Verdict]:
    """Return the verdict for `.delay()`, and the one for the body.

    Args:
        task: The task.
        how: Its options, resolved.
        limits: The resources that the call locks, each with the number of holders it may have.
        entries: All entries of these resources.
        refusal: The reason, if the nodes could not be asked, or too few of them grant locks.
        kept_out: True if the nodes would refuse a reader now.
    """
    if not enabled(task.app.conf):
        run = Verdict("unlocked", "runs without a lock: redlock_enabled is False")
        return Verdict("sent", "sends the message: redlock_enabled is False"), run
    found = [entry for entry in entries if entry.resource in limits]
    published = _published(task, how, found, refusal)
    if published.outcome in ("existing", "raise", "skip"):
        never = "does not run: its message is not sent (members of groups, chords and chains"
        return published, Verdict("none", f"{never} are, and end with the marker Skipped)")
    if how.scope == "until_executing":
        run = Verdict("run", "runs as soon as it is delivered: its scope locks no body")
        return published, run
    parked = parks(task.app.conf, how)
    if refusal is not None:
        return published, _refused(how, refusal, parked)
    return published, _run(how, limits, found, parked, kept_out)


# -- Published -------------------------------------------------------------------------------------


def _published(
    task: Any, how: TaskOptions, entries: Sequence[Entry], refusal: QuorumUnavailable | None
) -> Verdict:
    if task.app.conf.task_always_eager:
        return Verdict("eager", "runs the body here and now: task_always_eager is set")
    if how.scope == "while_executing":
        return Verdict("sent", "sends the message, whoever holds the lock")
    if refusal is not None:
        if how.on_unavailable == "raise":
            return Verdict("raise", "raises QuorumUnavailable: too few nodes grant locks")
        return Verdict("sent", "sends the message without a reservation: too few nodes grant it")
    reserved = [entry for entry in entries if entry.kind == "reservation" and entry.held]
    owner = next((e.owner for e in reserved if e.owner and e.owner.task_id), None)
    if owner is not None and belongs_to_other_task(owner, task):
        why = f"{owner.task} has reserved the key, which is another task"
        return Verdict("sent", f"sends the message without a reservation: {why}")
    other = owner.task_id if owner is not None else None
    if other is None:
        succeeds = how.scope == "until_succeeded"
        kept = "for an hour" if succeeds else "until the message expires, else for an hour"
        kept = f"for {how.reserve_ttl:g} s" if how.reserve_ttl else kept
        kept += ", and again after a success" if succeeds else ""
        return Verdict("sent", f"reserves the key {kept}, and sends the message")
    policy = how.on_duplicate
    running = any(e.kind == "lock" and e.owner and e.owner.task_id == other for e in entries)
    if policy == "raise":
        return Verdict("raise", f"raises DuplicateTask: {other} has reserved the key")
    if policy == "skip" or len(other) > MAX_ID_CHARS:
        return Verdict("skip", f"returns a result with the marker Skipped: {other} has the key")
    if policy == "replace" and not running:
        return Verdict("replace", f"revokes {other}, which is queued, and takes its place")
    why = ", which runs already" if policy == "replace" else ""
    return Verdict("existing", f"sends nothing, and returns the result of {other}{why}")


# -- Run -------------------------------------------------------------------------------------------


def _run(
    how: TaskOptions,
    limits: Mapping[str, int],
    entries: Sequence[Entry],
    parked: bool,
    kept_out: bool,
) -> Verdict:
    if (pace := how.pace) is not None:
        counted = [e for e in entries if e.kind == "start" and e.slot <= pace.starts]
        started = [entry for entry in counted if _occupied(entry) > entry.total - entry.quorum]
        if left := pace.starts - len(started):
            free = f"{left} of {pace.starts} starts left in these {pace.window:g} s"
            return Verdict("run", f"starts as soon as it is delivered: {free}")
        outcome, text = _refused(how, ResourceHeld("held"), parked)
        full = f"{pace.starts} of {pace.starts} starts in the last {pace.window:g} s"
        return Verdict(outcome, f"{text}: {full}")
    taken = [entry for entry in entries if entry.kind in ("lock", "foreign")]
    taken = [entry for entry in taken if _occupied(entry) > entry.total - entry.quorum]
    readers = [entry for entry in taken if entry.owner and entry.owner.shared]
    if how.shared and readers:
        taken = [entry for entry in taken if entry not in readers]
    busy: list[Entry] = []
    slots: list[str] = []
    whys: list[str] = []
    for name, limit in limits.items():
        of_it = [e for e in taken if e.resource == name]
        busy += of_it if len(of_it) >= limit else []
        of = f" of {name}" if len(limits) > 1 else ""
        slots += [f"{limit - len(of_it)} of {limit} slots{of} free"] if limit > 1 else []
        if len(of_it) >= limit > 1:
            whys.append(f"{len(of_it)} of {limit} slots{of} are held")
    if not busy and not kept_out:
        if readers:
            beside = f"beside the {len(readers)} that read"
            return Verdict("run", f"runs as soon as it is delivered, {beside}")
        free = f" ({', '.join(slots)})" if slots else ""
        return Verdict("run", f"runs as soon as it is delivered: the key is free{free}")
    outcome, text = _refused(how, ResourceHeld("held"), parked)
    if outcome == "replace" and readers:
        return Verdict("raise", "fails: readers hold the key, and it does not revoke all of them")
    elif busy and outcome in ("parked", "again", "wait"):
        text += f": {', '.join(whys) or _held_by(busy)}"
    if not busy:
        text += "; a writer waits, and goes before new readers"
    forever = [entry.key for entry in busy if entry.kind == "foreign" and entry.leaked]
    if forever:
        text = f"another program's {forever[0]} has no ttl, and is in its way forever; it {text}"
    return Verdict(outcome, text)


def without_slot(
    task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], pools: Sequence[Pool]
) -> str:
    """Return why no worker that answered can begin with a call now; empty if one can.

    Also empty if that is not known: no worker was asked, a worker of an older release does not
    report its pool, or the call is routed to an exchange.
    """
    if not (pools and all(pool.queues for pool in pools)):
        return ""
    try:
        route = task.app.amqp.router.route(
            task._get_exec_options(), task.name, args, kwargs, task_type=task
        )
    except Exception:  # a router of the app's own, or a queue that does not exist
        return ""
    queue = getattr(route.get("queue"), "name", None)
    if queue is None:
        return ""
    serving = [pool for pool in pools if queue in pool.queues]
    if not serving:
        return printable(f"no worker that answered takes from its queue, {queue}")
    if any(pool.busy < pool.slots for pool in serving):
        return ""
    slots = sum(pool.slots for pool in serving)
    return printable(
        f"no slot is free: all {slots} are busy in the workers that take from its queue, {queue}"
    )


def _held_by(busy: Sequence[Entry]) -> str:
    """Return who holds a key, in words."""
    if readers := [entry for entry in busy if entry.shared]:
        return "a reader holds the key" if len(readers) == 1 else f"{len(readers)} readers hold it"
    owner = busy[0].owner
    if owner is None or not owner.task_id:
        return "the key is held"
    return printable(f"{owner.task} {owner.task_id} holds the key")


def _refused(how: TaskOptions, refusal: NotAcquired, parked: bool) -> Verdict:
    """Return the verdict for a call that gets no lock: `decide`, as for a worker, in words."""
    action, few = decide(how, refusal), isinstance(refusal, QuorumUnavailable)
    waits = f"waits in its pool slot for up to {action.wait:g} s, then " if action.wait else ""
    if action.do == "ask":
        return Verdict(
            "ask", f"does what {_name_of(how.on_conflict)} says, which is given the holder"
        )
    if action.do == "run":
        return Verdict("unlocked", "runs WITHOUT its lock: too few nodes grant locks")
    if action.do == "retry":
        until = _deadline(action)
        if few:
            return Verdict("again", f"is sent again until enough nodes grant locks, {until}")
        if parked:
            return Verdict("parked", f"waits without a pool slot (parked), {until}")
        return Verdict("again", f"{waits}is sent again after a random time, {until}")
    if few:
        return Verdict("raise", "fails with QuorumUnavailable: too few nodes grant locks")
    if action.do in ENDINGS:
        why = "the key is held" if how.rate is None else "none may start now"
        return Verdict(action.do, f"{waits}{ENDINGS[action.do]}: {why}")
    if action.do == "wait":
        return Verdict("wait", waits + ENDINGS[action.then])
    dead = "has the holder revoked, and runs when that is dead"
    return Verdict("replace", f"{dead}; not within {action.wait:g} s: {ENDINGS[action.then]}")


def parks(conf: Any, how: TaskOptions) -> bool:
    """Return True if the app's workers park a call whose lock is held."""
    off = not conf.get("redlock_parking", True) or conf.get("worker_disable_prefetch", False)
    return not off and parkable(how)


def _deadline(action: Action) -> str:
    if action.deadline is None:
        return "for as long as that takes"
    return f"for up to {action.deadline:g} s, then {ENDINGS[action.then]}"


def _occupied(entry: Entry) -> int:
    """Return how many nodes would vote NO because of this entry or its rivals."""
    sets = (entry.ttls, *(rival.ttls for rival in entry.rivals))
    return sum(any(left is not None for left in of_node) for of_node in zip(*sets, strict=True))


# -- How it is declared ----------------------------------------------------------------------------


def rule_of(task: str, how: TaskOptions) -> str:
    """Return the rule, in words, that makes a call's key from its arguments."""
    key, scope = how.key, how.scope_name
    before = f"scope_name {scope!r}" if scope is not None else f"the task's name {task!r}"
    behind = f", behind {before}" if scope is not None else ""
    if key is None:
        return f"{before} and all its arguments"
    if callable(key):
        return f"the function {_name_of(key)}{behind}"
    if isinstance(key, (str, Templates)) or not all(n.isidentifier() for n in key):
        several = (key,) if isinstance(key, str) else key
        return f"the template{'s' * (len(several) > 1)} {', '.join(map(repr, several))}{behind}"
    return f"{before} and its arguments {', '.join(key)}"


def options_of(lock: TaskLock, app: Any) -> list[tuple[str, Any, str]]:
    """Return each option of a task: name, value, and its source (task, app or default)."""
    how, given = lock.options(app), given_names(app.conf)

    def source(name: str) -> str:
        return "task" if name in lock.own else "app" if name in given else "default"

    return [(name, _plain(getattr(how, name)), source(name)) for name in TASK]


def read_by(
    how: TaskOptions, options: Iterable[tuple[str, Any, str]], parked: bool
) -> list[tuple[str, Any, str]]:
    """Return the options that have an effect for this task (see `config/settings.py`)."""
    waits = callable(how.on_conflict) or how.on_conflict in ("wait", "replace")
    retries = callable(how.on_conflict) or "retry" in (how.on_conflict, how.on_unavailable)
    unread: set[str] = set()
    if how.scope == "while_executing":
        unread |= {"reserve_ttl", "on_duplicate"}
    if how.scope == "until_executing":
        unread |= {*LOCK_OPTIONS, *RETRY_OPTIONS}
    if how.rate is not None:
        unread |= {*NOT_WITH_RATE, "ttl"}
    if not retries:
        unread |= {*RETRY_OPTIONS} - ({"on_deadline"} if waits else set())
    if how.retry_deadline is None and not waits:
        unread.add("on_deadline")

    def is_read(name: str, source: str) -> bool:
        if name == "wait" and parked:
            return source == "task"
        return name not in unread and (source != "default" or name not in INERT)

    return [option for option in options if is_read(option[0], option[2])]


def _name_of(function: Any) -> str:
    return printable(getattr(function, "__qualname__", None) or repr(function))


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if callable(value):
        return _name_of(value)
    if isinstance(value, tuple):
        return list(value)
    return None if value == math.inf else value
