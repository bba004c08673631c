"""The end of each task that was sent: done, refused by policy, or lost.

Early acknowledgement, Celery's default, promises that a message is not run again, and loses it with
its process: such a loss is counted, and accepted only if a worker that had received the message was
killed. Late acknowledgement promises that nothing is lost, and may run a task twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.campaign.worker.broker import VISIBILITY
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.oracle import Verdict
from tests.campaign.worker.stage import MORE_POOLS
from tests.campaign.worker.worker_acts import BY_ITSELF

AWAY = "failed: the broker was away when it had to be sent again"
ENDS = {
    "LeaseLost": "failed: the lease was lost",
    "WorkerLostError": "failed: its process died",
    "TimeLimitExceeded": "failed: hard time limit",
    "SoftTimeLimitExceeded": "failed: soft time limit",
    "Terminated": "failed: terminated",
    "TaskRevokedError": "revoked",
    "ValueError": "failed as asked",
    "OperationalError": AWAY,
    "Reject": AWAY,
    "ConnectionError": AWAY,
    "AttributeError": AWAY,  # kombu's, on a channel that was just closed
}
"""By the error's name: ends that a policy or a fault explains."""
ORPHAN = 8.0
"""Seconds for which the reservation of a producer that was killed may keep others from publishing,
and for the message of one that was not to be worked off."""
LATE = ("late", "reading")
"""The tasks that are acknowledged late."""
LOCKED = (*LATE, "early", "skipping", "writing")
"""The tasks that want a key."""
MOVES = ("sent", "received", "returned", "got", "enter")
"""Lines that show where a message is; the last one counts."""
BROKER = "broker restart"
DROPPED = "broker connections dropped"
KILLS = (BY_ITSELF, "worker kill -9", "worker restart, cold", "worker restart, warm")


def judge_messages(
    verdict: Verdict,
    ledger: Mapping[str, Sent],
    lines: Mapping[Process, Sequence[Line]],
    faults: Sequence[Fault],
    waiting: Sequence[str],
) -> dict[str, int]:
    """Judge the end of each task; add violations to the verdict.

    Args:
        verdict: That on the locks.
        ledger: All that was sent.
        lines: The accounts.
        faults: What was done.
        waiting: Ids of messages that are still somewhere, long after the end.

    Returns:
        How many tasks came to which end.
    """
    traces: dict[str, list[tuple[Process, Line]]] = {}
    gone: dict[tuple[str, int], list[float]] = {}
    for process, of_one in lines.items():
        for line in of_one:
            if line.task in ledger and line.kind not in ("alive",):
                traces.setdefault(line.task, []).append((process, line))
            elif line.kind == "disconnected":
                gone.setdefault((process.worker, process.main), []).append(line.at)
    ends: dict[str, int] = {}
    popped = 0
    for sent in ledger.values():
        trace = sorted(traces.get(sent.id, []), key=lambda one: one[1].at)
        end, problem = _end(sent, trace, faults, sent.id in waiting, gone)
        ends[end] = ends.get(end, 0) + 1
        popped += end == POPPED
        if problem:
            verdict.problem("message", sent.at, f"{end}: {_text(sent, trace)}")
        _twice(verdict, sent, trace, faults)
    ended = sum(_connections(fault) for fault in faults)
    if popped > ended:
        text = f"{popped} {POPPED}, but only {ended} of its connections ended"
        verdict.problem("message", 0.0, text)
    return dict(sorted(ends.items()))


POPPED = "lost in the broker's client: popped from the queue over a connection that ended"
"""Redis takes a message from its list when it answers BRPOP; kombu notes it (`unacked`) when it has
read the answer. With prefetching used up it does not read for a while (`_pause_brpop`), so there
may be one message in the socket of each worker, which goes with the worker, or with the broker."""


def _connections(fault: Fault) -> int:
    """Return how many connections, each perhaps with a popped message, it ended."""
    return len(MORE_POOLS) if fault.kind == BROKER else fault.kind in (*KILLS, DROPPED)


def _end(
    sent: Sent,
    trace: list[tuple[Process, Line]],
    faults: Sequence[Fault],
    waits: bool,
    gone: Mapping[tuple[str, int], Sequence[float]],
) -> tuple[str, bool]:
    """Return how it ended, and if that is wrong; `gone`: when each worker returned its messages."""
    if sent.task not in LOCKED and sent.state == "SUCCESS":
        return "a no-op" if sent.task == "probe" else "a filler", False
    if sent.state == "SUCCESS":
        if isinstance(sent.result, dict) and sent.result.get("celery_redlock") == "skipped":
            return "skipped", sent.task != "skipping"
        return "done", not any(line.kind == "enter" for _process, line in trace)
    if sent.state == "REVOKED":
        asked = sent.expected == "revoked"
        return "revoked", not asked and not _any(faults, "revoke, SIGTERM", "revoke, SIGKILL")
    if sent.state == "FAILURE":
        why = ENDS.get(sent.error, f"failed: {sent.error}")
        unasked = sent.error == "ValueError" and sent.manner != "raise"
        why = f"failed: {sent.error}" if unasked else why
        # Celery makes a Reject of whatever strikes a `retry()` that publishes: LeaseLost, too.
        struck = "the lease is over" in str(sent.result)
        away = _any(faults, BROKER, DROPPED, "broker cut")
        no_cause = why == AWAY and not away and not struck
        return why, sent.error not in ENDS or unasked or no_cause
    if sent.state == "RETRY" and any(line.kind == "exit" for line in _since_sent(trace)):
        # Celery's: its own `retry()` stores RETRY behind the message, a cold shutdown at any time.
        its = sent.manner == "retry" or _any(faults, "worker restart, cold")
        return "done, and then said to be retried", not its
    if waits:
        return "stuck", True
    if not trace and not sent.certain:
        return "never sent: the broker was away", False
    if sent.task not in LATE:
        # Acknowledged, and then its process was killed: Celery's documented loss.
        for process, line in trace:
            if line.kind in ("received", "got", "enter") and _ended(process, line.at, faults):
                return "lost with its killed worker (early acknowledgement)", False
    moves = [one for one in trace if one[1].kind in MOVES]
    nobody_had_it = not moves or moves[-1][1].kind in ("sent", "returned")
    last = moves[-1][1].at if moves else sent.at
    if moves and moves[-1][1].kind == "received":
        process = moves[-1][0]
        nobody_had_it = any(at > last for at in gone.get((process.worker, process.main), ()))
    if nobody_had_it and sent.expected == "purged":
        return "purged", False
    if nobody_had_it and any(_connections(f) and (f.end is None or f.end > last) for f in faults):
        return POPPED, False
    return "LOST", True


def _since_sent(trace: list[tuple[Process, Line]]) -> list[Line]:
    """Return the lines of a message since it was last sent.

    `Task.retry` stores its state when the message is out. A process that is slow in between may
    overwrite a failure of the copy; Celery's backends keep a success.
    """
    lines = [line for _process, line in trace]
    last = max((at for at, line in enumerate(lines) if line.kind == "sent"), default=len(lines))
    return lines[last:]


def _ended(process: Process, at: float, faults: Sequence[Fault]) -> bool:
    """Return True if a worker, or this child of it, was killed after that."""
    return any(
        fault.worker == process.worker
        and fault.pid in (process.main, process.pid)
        and (fault.end is None or fault.end >= at)
        for fault in faults
    )


def _twice(
    verdict: Verdict, sent: Sent, trace: list[tuple[Process, Line]], faults: Sequence[Fault]
) -> None:
    """Return the bodies of one try of one task."""
    tries: dict[int, list[Line]] = {}
    for _process, line in trace:
        if line.kind == "enter":
            tries.setdefault(line.more or 0, []).append(line)
    for runs in tries.values():
        for again in runs[1:]:
            if sent.task in LATE:
                verdict.limit("run again (late acknowledgement)")
            elif again.at > sent.at + VISIBILITY or _broken(sent.at, again.at, faults):
                verdict.limit("run again (delivered again by the broker)")
            else:
                text = f"run {len(runs)} times though acknowledged early: {_text(sent, trace)}"
                verdict.problem("message", again.at, text)


def _any(faults: Sequence[Fault], *kinds: str) -> bool:
    return any(fault.kind in kinds for fault in faults)


def _broken(begin: float, end: float, faults: Sequence[Fault]) -> bool:
    """Return True if a worker or the broker ended between the two, before an acknowledgement."""
    return any(f.kind in (*KILLS, BROKER, DROPPED) and f.touches(begin, end) for f in faults)


def _text(sent: Sent, trace: list[tuple[Process, Line]]) -> str:
    story = ", ".join(
        f"{line.kind} {line.at - sent.at:+.2f} ({process.worker}/{process.pid})"
        for process, line in trace[-12:]
    )
    return (
        f"{sent.task}[{sent.id}] {sent.resource} {sent.manner} {sent.seconds:.2f} s sent at"
        f" {sent.at:.3f}: {sent.state} {sent.error}; {story or 'no trace'}"
    )


def judge_calls(
    verdict: Verdict, lines: Mapping[Process, Sequence[Line]], died: Mapping[Process, float]
) -> int:
    """Check that each `delay()` that returned was worked off: a body of its key ends after it.

    Of producers that were killed the calls count as well, save for those that others' reservations
    may have met: an orphan's blocks for seconds, and what is called in these is not work lost.

    Returns:
        How many calls there were.
    """
    ends: dict[str, list[float]] = {}
    for body in verdict.bodies:
        ends.setdefault(body.resource, []).append(body.end)
    calls = [(p, one) for p, of_one in lines.items() for one in of_one if one.kind == "gave"]
    for process, call in calls:
        if not any(end > call.at for end in ends.get(call.resource, ())):
            recent = [at for at in died.values() if 0.0 < call.at - at < ORPHAN]
            if process in died or recent:
                verdict.limit("a call met an orphan's reservation")
            else:
                text = f"{call.resource} by {process.pid}, as {call.task}: no body ended after it"
                verdict.problem("delay() came back, and nothing ran", call.at, text)
    return len(calls)
