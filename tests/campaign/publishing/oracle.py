"""Judge from the accounts of producers and workers, and the faults, if every call was honoured.

It shares no code with the library.

- A call that was accepted (`apply_async` came back) runs, or one that was accepted after it runs
  instead, or, for a duplicate, the one whose id it was given.
- A call that was replaced does not run any more.
- A task that waits for its turn runs soon after its key is free.
- An error callback of a failed task runs.
- At rest no reservation is on any node.

What is forgiven is counted as a limit, and each has its reason where it is forgiven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tests.campaign.publishing.account import ONCE, REPLACING, Account, Call, Move, Run
from tests.campaign.publishing.acts import COLD, KILL, PAUSED, PURGE, WARM
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.oracle import Verdict
from tests.campaign.worker.stores import NODES

LOST, REPLACED, LATE, ERRBACK, LEFT = (
    "an accepted call came to nothing",
    "a replaced call ran",
    "a key is free and wanted, and nobody takes it",
    "an error callback did not run",
    "a reservation is left at rest",
)
LATE_ACKS = ("settled", "surely")
"""Tasks that are acknowledged when they have run."""
EACH = ("plain", "failing")
"""Tasks of which every call runs."""
LOCK = {"compensate": "plain"}
"""Tasks that lock another's key."""
HAPPENS = 1.0
"""Seconds from the moment at which a call cannot be replaced any more until its body writes."""
SOON = 3.0
"""Seconds within which a key that is free and wanted is taken; a node has no vote for longer."""
SLOW = "delay and jitter"
ENDS = (WARM, COLD, KILL)


def judge(
    account: Account,
    faults: Sequence[Fault],
    stalled: Callable[[float, float], float] = lambda _since, _until: 0.0,
    nodes: int = NODES,
) -> Verdict:
    """Return what is wrong with all that was written, by the rules above.

    Args:
        account: What was written, when all is quiet again.
        faults: What was done.
        stalled: Seconds for which the machine kept a message waiting between two times.
        nodes: How many nodes there are.
    """
    verdict = Verdict(nodes=nodes)
    _judge_calls(verdict, account, faults)
    _judge_order(verdict, account, faults)
    _judge_waits(verdict, account, faults, stalled)
    return verdict


# -- Every accepted call runs ---------------------------------------------------------------------


def _judge_calls(verdict: Verdict, account: Account, faults: Sequence[Fault]) -> None:
    popped = 0
    for call in account.calls.values():
        if call.given and not any(_serves(run, call, account) for run in account.runs):
            why = _excuse(call, account, faults)
            popped += why == POPPED
            if why:
                verdict.limit(why)
            else:
                verdict.problem(LOST, call.begin, _story(call, account))
    ended = sum(fault.kind in ENDS for fault in faults)
    if popped > ended:
        verdict.problem(LOST, 0.0, f"{popped} {POPPED}, but only {ended} workers ended")
    done = {run.number for run in account.runs}
    for run in account.runs:
        if not run.what.startswith("failing:") or run.exit == math.inf or f"{run.number}!" in done:
            continue
        if any(
            fault.kind in ENDS
            and fault.worker == run.worker
            and fault.touches(run.enter, run.exit + HAPPENS)
            for fault in faults
        ):
            # Celery calls or publishes it behind the body, and its worker was ended just then.
            verdict.limit("an error callback was lost with its worker")
        else:
            text = f"{run.what} {run.number}, failed at {run.exit:.3f}"
            verdict.problem(ERRBACK, run.exit, text)


def _serves(run: Run, call: Call, account: Account) -> bool:
    """Return whether a body is what a call has asked for."""
    if run.what != call.what:
        return False
    if call.task in EACH:
        return run.number == call.number
    if call.task in ONCE:  # whichever is queued or at work when the call is made
        return call.begin - ONCE[call.task] <= run.exit < math.inf
    other = account.calls.get(run.number)
    newer = run.id == call.given or (other is not None and other.end >= call.begin)
    return newer and run.enter >= call.begin


PURGED = "purged"
POPPED = "lost in the broker's client: popped from the queue over a connection that ended"
"""See `tests.campaign.worker.messages`: one message at most of each worker that ends."""


def _excuse(call: Call, account: Account, faults: Sequence[Fault]) -> str:
    """Return why an accepted call that came to nothing may have done so; empty if nothing may."""
    moves = account.moves.get(call.given, [])
    if any(_was_purged(call, account, fault) for fault in faults if fault.kind == PURGE):
        return PURGED
    ends = [fault for fault in faults if fault.kind in ENDS]
    last = moves[-1] if moves else None
    got = next((move for move in reversed(moves) if move.kind == "got"), None)
    if got is not None and last is not None and call.task not in LATE_ACKS:
        # Celery calls a body that it breaks off done.
        until = math.inf if last is got else last.at
        if any(fault.pid == got.process.main and fault.touches(got.at, until) for fault in ends):
            # Acknowledged, and then its process was ended: Celery's documented loss.
            return "lost with its worker (early acknowledgement)"
    # A worker that received it may have returned it to the queue as it ended.
    returned = (
        last is not None
        and last.kind == "received"
        and any(fault.pid == last.process.main for fault in ends)
    )
    ended = any((fault.end or math.inf) > call.begin for fault in ends)
    return POPPED if ended and (last is None or returned) else ""


def _was_purged(call: Call, account: Account, purge: Fault) -> bool:
    """Return whether the message of a call was in the queue when that was purged: it is not owed.

    Its key was free from then on, so a later call is no duplicate of it.
    """
    return call.begin < (purge.end or math.inf) and not any(
        move.kind == "received" and move.at < purge.begin and _keeps(move, account, purge)
        for move in account.moves.get(call.given, ())
    )


def _keeps(move: Move, account: Account, fault: Fault) -> bool:
    """Return whether a worker that received a message before a purge still had it then."""
    return account.stopping.get((move.process.worker, move.process.main), math.inf) > fault.begin


def _story(call: Call, account: Account) -> str:
    moves = account.moves.get(call.given, [])
    told = ", ".join(
        f"{move.kind} {move.at - call.begin:+.2f} ({move.process.worker}/{move.process.pid})"
        for move in moves[-8:]
    )
    others = [run for run in account.runs if run.what == call.what and run.exit > call.begin - 2.0]
    ran = ", ".join(f"{run.number} {run.enter - call.begin:+.2f}" for run in others[:6])
    return f"{call}; {told or 'no trace of its message'}; bodies there: {ran or 'none'}"


# -- A replaced call does not run -----------------------------------------------------------------


def _judge_order(verdict: Verdict, account: Account, faults: Sequence[Fault]) -> None:
    first: dict[str, Run] = {}
    for run in account.runs:
        # A second body of one call is one that its broker delivered again: it had begun before.
        first.setdefault(run.number, run)
    calls: dict[str, list[Call]] = {}
    for call in account.calls.values():
        if call.task in REPLACING and call.reserved is not None and call.given:
            calls.setdefault(call.what, []).append(call)
    for of_one in calls.values():
        for one in of_one:
            run = first.get(one.number)
            later = [two for two in of_one if one.end < two.begin]
            if run is None or not later:
                continue
            two = min(later, key=lambda call: call.end)
            if run.enter <= two.end + HAPPENS:
                continue
            why = _unordered(one, two, run, faults, verdict)
            if why:
                verdict.limit(why)
                continue
            newer = first.get(two.number)
            order = "after" if newer is not None and newer.enter < run.enter else "and not"
            text = f"{one}, {run.enter - two.end:.2f} s after it was replaced, {order} {two}"
            verdict.problem(REPLACED, run.enter, text)


def _unordered(one: Call, two: Call, run: Run, faults: Sequence[Fault], verdict: Verdict) -> str:
    """Return why a call may run although another was made after it; empty if it may not."""
    if not one.reserved or not two.reserved:
        # In doubt there is a duplicate in the queue: its producer had no quorum.
        return "published without a reservation"
    gone = {n for f in faults if f.touches(two.begin, run.enter) for n in f.nodes}
    if len(gone) >= max(1, verdict.nodes // 2):
        # With a slow one that is a majority that may not know of a reservation, or not in time.
        return "a majority of nodes did not keep a reservation"
    return ""


# -- What is free and wanted runs soon ------------------------------------------------------------


def _judge_waits(
    verdict: Verdict,
    account: Account,
    faults: Sequence[Fault],
    stalled: Callable[[float, float], float],
) -> None:
    exits: dict[str, list[Run]] = {}
    for run in account.runs:
        task, _, key = run.what.partition(":")
        exits.setdefault(f"{LOCK.get(task, task)}:{key}", []).append(run)
    for run in account.runs:
        call = account.calls.get(run.number)
        if call is None or call.task != "plain":
            continue
        before = [other for other in exits[run.what] if other.enter < run.enter]
        if any(other.exit == math.inf for other in before):
            continue  # broken off with its worker: the lock ends with its ttl
        # Before that it waited for a slot, or for a worker.
        moves = account.moves.get(call.given, [])
        received = [move.at for move in moves if move.kind == "received"][:1]
        wanted = since = max([call.due, *(other.exit for other in before), *received])
        for fault in faults:
            if fault.kind == PAUSED and fault.touches(wanted, run.enter):
                wanted = max(wanted, fault.end or math.inf)  # there was no quorum
        wait = run.enter - wanted
        if wait <= SOON or wait <= SOON + stalled(wanted, run.enter):
            verdict.longest = max(verdict.longest, wait)
        elif _was_away(moves, since, run.enter, account, faults):
            # Its message was with a worker that ended, or could not reach its nodes.
            verdict.limit("waited while a worker was away")
        else:
            verdict.problem(LATE, run.enter, f"for {wait:.2f} s: {_story(call, account)}")


def _was_away(
    moves: Sequence[Move], since: float, until: float, account: Account, faults: Sequence[Fault]
) -> bool:
    """Return whether a worker was started between two times, or one suffered that had a message."""
    mains = {move.process.main for move in moves}
    return any(since < at < until for at in account.connected) or any(
        # One that was ended had it: the broker delivers it again after a while.
        fault.pid in mains or (fault.worker and fault.touches(since - HAPPENS, until))
        for fault in faults
    )


# -- At rest --------------------------------------------------------------------------------------


def judge_rest(
    verdict: Verdict, left: Iterable[tuple[int, str]], at: float, faults: Sequence[Fault]
) -> None:
    """At rest no reservation is on any node.

    Args:
        verdict: Violations are added to it.
        left: The reservations that are left: a node's number, and the key.
        at: When; seconds.
        faults: What was done.
    """
    for node, key in left:
        away = any(node in fault.nodes and fault.kind != SLOW for fault in faults)
        if away and any(fault.kind in ENDS for fault in faults):
            # Its node was away when it was freed, and the worker has ended that would have
            # freed it later.
            verdict.limit("a reservation is left on a node that was away")
        else:
            verdict.problem(LEFT, at, f"node {node}: {key}")
