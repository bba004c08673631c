"""What became of every task that was sent: done, refused by policy, or lost.

Early acknowledgement, Celery's default, promises that a message is not run again, and loses it with
its process: that is counted, and believed only where a worker it had come to was killed. Late
acknowledgement promises that nothing is lost, and may run a task twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.faults.chronicle import Fault
from tests.faults.feeder import Sent
from tests.faults.journal import Line, Process
from tests.faults.oracle import Verdict
from tests.faults.stage import POOLS, VISIBILITY
from tests.faults.worker_acts import BY_ITSELF

ENDS = {
    "LeaseLost": "failed: the lease was lost",
    "WorkerLostError": "failed: its process died",
    "TimeLimitExceeded": "failed: hard time limit",
    "SoftTimeLimitExceeded": "failed: soft time limit",
    "Terminated": "failed: terminated",
    "TaskRevokedError": "revoked",
    "ValueError": "failed as asked",
    "OperationalError": "failed: the broker was away when it had to be sent again",
    "Reject": "failed: the broker was away when it had to be sent again",
    "ConnectionError": "failed: the broker was away when it had to be sent again",
}
"""By the error's name: ends that a policy or a fault explains."""
BROKER = "broker restart"
KILLS = (BY_ITSELF, "worker kill -9", "worker restart, cold", "worker restart, warm")


def judge_messages(
    verdict: Verdict,
    ledger: Mapping[str, Sent],
    lines: Mapping[Process, Sequence[Line]],
    faults: Sequence[Fault],
    waiting: Sequence[str],
) -> dict[str, int]:
    """Add what is wrong to the verdict.

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
    for process, of_one in lines.items():
        for line in of_one:
            if line.task in ledger and line.kind not in ("alive",):
                traces.setdefault(line.task, []).append((process, line))
    ends: dict[str, int] = {}
    popped = 0
    for sent in ledger.values():
        trace = sorted(traces.get(sent.id, []), key=lambda one: one[1].at)
        end, problem = _end(sent, trace, faults, sent.id in waiting)
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
    """How many connections that may carry a popped message it ended."""
    return len(POOLS) if fault.kind == BROKER else fault.kind in KILLS


def _end(
    sent: Sent, trace: list[tuple[Process, Line]], faults: Sequence[Fault], waits: bool
) -> tuple[str, bool]:
    """How it ended, and whether that is wrong."""
    if sent.state == "SUCCESS":
        if isinstance(sent.result, dict) and sent.result.get("celery_redlock") == "skipped":
            return "skipped", sent.task != "skipping"
        return "done", not any(line.kind == "enter" for _process, line in trace)
    if sent.state == "REVOKED":
        return "revoked", not _any(faults, "revoke, SIGTERM", "revoke, SIGKILL")
    if sent.state == "FAILURE":
        return ENDS.get(sent.error, f"failed: {sent.error}"), sent.error not in ENDS
    if waits:
        return "stuck", True
    if not trace and not sent.certain:
        return "never sent: the broker was away", False
    if sent.task != "late":
        # Acknowledged, and then its process was killed: Celery's documented loss.
        for process, line in trace:
            if line.kind in ("received", "got", "enter") and _ended(process, line.at, faults):
                return "lost with its killed worker (early acknowledgement)", False
    moves = [line for _process, line in trace if line.kind in ("sent", "received", "got", "enter")]
    nobody_had_it = not moves or moves[-1].kind == "sent"
    last = moves[-1].at if moves else sent.at
    if nobody_had_it and any(_connections(f) and (f.end is None or f.end > last) for f in faults):
        return POPPED, False
    return "LOST", True


def _ended(process: Process, at: float, faults: Sequence[Fault]) -> bool:
    """Was a worker, or this child of it, killed after that?"""
    return any(
        fault.worker == process.worker
        and fault.pid in (process.main, process.pid)
        and (fault.end is None or fault.end >= at)
        for fault in faults
    )


def _twice(
    verdict: Verdict, sent: Sent, trace: list[tuple[Process, Line]], faults: Sequence[Fault]
) -> None:
    """Bodies of one try of one task."""
    tries: dict[int, list[Line]] = {}
    for _process, line in trace:
        if line.kind == "enter":
            tries.setdefault(line.more or 0, []).append(line)
    for runs in tries.values():
        for again in runs[1:]:
            if sent.task == "late":
                verdict.limit("run again (late acknowledgement)")
            elif again.at > sent.at + VISIBILITY or _broken(sent.at, again.at, faults):
                verdict.limit("run again (delivered again by the broker)")
            else:
                text = f"run {len(runs)} times though acknowledged early: {_text(sent, trace)}"
                verdict.problem("message", again.at, text)


def _any(faults: Sequence[Fault], *kinds: str) -> bool:
    return any(fault.kind in kinds for fault in faults)


def _broken(begin: float, end: float, faults: Sequence[Fault]) -> bool:
    """Was a worker ended, or the broker, between the two: then what was not yet acknowledged?"""
    return any(f.kind in (*KILLS, BROKER) and f.touches(begin, end) for f in faults)


def _text(sent: Sent, trace: list[tuple[Process, Line]]) -> str:
    story = ", ".join(
        f"{line.kind} {line.at - sent.at:+.2f} ({process.worker}/{process.pid})"
        for process, line in trace[-12:]
    )
    return (
        f"{sent.task}[{sent.id}] {sent.resource} {sent.manner} {sent.seconds:.2f} s sent at"
        f" {sent.at:.3f}: {sent.state} {sent.error}; {story or 'no trace'}"
    )
