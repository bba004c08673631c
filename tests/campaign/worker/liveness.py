"""Check that nothing is stuck: free keys are taken, no-ops end, and nothing stays behind.

Pure: judged from the accounts of workers and bodies, the keys that were seen, and the faults.

A message is at every moment in somebody's *custody*: the broker's, a worker's (from `received` to
`got`), or that of the slot which works on it. A worker has a *free slot* while it is connected to
its broker and fewer bodies and other tasks run in it than it has slots. An attempt that meets a
held lock does no work, so it takes no slot: of a thousand such attempts in a row none may hold up
anybody (but one that is to be skipped, which waits for up to 2 s for a holder that has ended to
free its lock). A key is *wanted* while a message for it lies where there is a free slot: with a
worker that has one, in the queue while any worker has one, or in a slot that asks for it. A message
that waits longer than `WAIT` in one piece, with nothing of `FORGIVEN` in it, is stuck.

The rules of forgiveness, each with its name, are all there is; there is no general slack.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.campaign.worker.broker import VISIBILITY
from tests.campaign.worker.chronicle import BROKER_DOWN, Fault
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.oracle import Verdict
from tests.campaign.worker.sentry import Sight
from tests.campaign.worker.slots import CONNECTED, SEEN, Main, WorkerLife, free_slots, worker_lives
from tests.campaign.worker.spans import Span, Spans, both, longest, union, without
from tests.campaign.worker.turns import READS, WAIT, busy, judge_turns

BACK_IN_QUEUE = 2.0
"""Seconds within which a stopping worker returns the messages that it has not begun."""

FORGIVEN: dict[str, str] = {
    "machine": "the machine stood still, as the stall watcher has seen; or the network, the broker,"
    " a worker or a child of it stood in the kernel's run queue: so much is deducted",
    "quorum": "too few nodes answer to this worker: nobody is to run without a quorum; a node that"
    " came back without its memory has no vote for a ttl",
    "broker": "the broker is away, or a worker not connected to it: no message moves",
    "child": "a dead child's slot is no slot until Celery has replaced it, up to 5 s later; and"
    " what that child had been handed lies in its pipe until then, and others of its key behind it",
    "stopped": "a process that is stopped does nothing: it keeps what it was handed, be it in the"
    " socket, and what it was about to send; so does one whose broker is cut off, without a word,"
    " and one without children in which a C call keeps the GIL",
    "stranded": "what a dead connection or worker had is given back when the broker does so: with"
    " Redis after the visibility timeout (Celery's documented limit), with RabbitMQ at once",
    "popped": "Redis hands one message to a worker that has no room, in the socket; it goes with"
    " the connection, and comes back after the visibility timeout or never (Celery's limit)",
    "prefetched": "what a worker has fetched waits for a slot of that worker (Celery's prefetch)",
    "eta": "a message is not wanted before its ETA; a worker that is told to stop before that keeps"
    " it until it has ended (Celery's way)",
    "repeated": "RabbitMQ repeats a message whose delay was over as it restarted after 180 s"
    " (`dead_letter_worker_publisher_confirm_timeout`)",
    "pooled": "what Celery's pool was handed before a warm shutdown stays there (Celery's way)",
}
"""Why somebody may wait, by name."""

BROKER_AWAY = (BROKER_DOWN, "broker connections dropped", "broker cut")

BROKER: Main = ("", 0)
ENDS_ASKING = ("enter", "done", "sent")


@dataclass
class Waits:
    """Longest waits, and counts of what was judged.

    Attributes:
        wanted: The longest that a key was free and wanted; seconds.
        noop: The longest that a no-op waited where there was a free slot; seconds.
        probes: How many no-ops were judged.
        popped: How many messages waited in the socket of a worker without room.
        kept_out: The longest that a reader was kept out where it might have been let in; seconds.
        passed: The longest that readers were let in before a writer that waits; seconds.
    """

    wanted: float = 0.0
    noop: float = 0.0
    probes: int = 0
    popped: int = 0
    kept_out: float = 0.0
    passed: float = 0.0


@dataclass
class _Custody:
    """Where a message was, and from when to when.

    Attributes:
        asks: It is in a slot that asks for its key.
        put: When it was put there, which is before it was due.
        dead: It is in the pipe of a child that has ended.
    """

    begin: float
    end: float
    where: Main
    next: Main | None = None
    asks: bool = False
    put: float = float("inf")
    dead: bool = False


def judge_liveness(
    verdict: Verdict,
    ledger: Mapping[str, Sent],
    lines: Mapping[Process, Sequence[Line]],
    alive: Mapping[Process, float],
    faults: Sequence[Fault],
    sights: Iterable[Sight],
    stalls: Sequence[Span],
    slots: Mapping[str, int],
    until: float,
    *,
    at_once: bool = False,
    starved: Callable[[float, float], float] = lambda _begin, _end: 0.0,
) -> Waits:
    """Judge all waits; add violations to the verdict.

    Args:
        verdict: That on the locks.
        ledger: All that was sent.
        lines: The accounts.
        alive: When each process was last seen alive.
        faults: What was done.
        sights: Which tokens were seen on which node.
        stalls: When the machine stood still.
        slots: How many each worker has, at least, by its name.
        until: Up to when it is judged; seconds.
        at_once: The broker gives back at once what a dead connection had.
        starved: For how long those that a message passes had to wait for a core between two times.
    """
    waits = Waits()
    traces = _traces(lines, ledger)
    workers = worker_lives(lines, alive, until)
    for main, worker in workers.items():
        worker.free = free_slots(
            main, worker, lines, alive, ledger, faults, slots, until, verdict.nodes
        )
    anywhere = union(span for worker in workers.values() for span in worker.free)

    def counted(begin: float, end: float) -> float:
        return max(0.0, end - begin - starved(begin, end))

    forgiven = union([*((a - 0.1, b + 0.5) for a, b in stalls), *_broker_away(faults, until)])
    down = [(f.begin, until if f.end is None else f.end) for f in faults if f.kind == BROKER_DOWN]
    popped: dict[Main, float] = {}
    ends = _ends(workers, faults)
    keys: dict[str, list[tuple[Span, str, str]]] = {}
    dead: dict[str, Spans] = {}
    there: dict[str, Spans] = {}
    for sent in sorted(ledger.values(), key=lambda one: one.at):
        spans: list[tuple[Span, str]] = []
        trace = traces.get(sent.id, [])
        for custody in _custodies(sent, trace, workers, down, until, at_once, starved):
            where = anywhere
            if custody.dead:
                dead.setdefault(sent.resource, []).append((custody.begin, custody.end))
                continue
            if custody.where != BROKER:
                there.setdefault(sent.id, []).append((custody.begin, custody.end))
                worker = workers[custody.where]
                where = worker.well if custody.asks else worker.free
            got_by = custody.next
            if custody.where == BROKER and not at_once and _gone(custody, ends):
                waits.popped += 1
                continue
            if custody.where == BROKER and got_by is not None and not at_once:
                own = both([(custody.begin, custody.end)], workers[got_by].free)
                late = longest(without(both([(custody.begin, custody.end)], where), own))[0]
                if late > WAIT and popped.get(got_by, 0.0) <= custody.begin:
                    popped[got_by] = custody.end  # "popped": one at a time
                    waits.popped += 1
                    where = workers[got_by].free
            if custody.where == BROKER and got_by is not None:
                where = without(where, workers[got_by].stops)  # it may lie in the socket
            waits_there = without(both([(custody.begin, custody.end)], where), forgiven)
            spans += ((span, custody.where[0] or "the queue") for span in waits_there)
        if sent.resource:
            keys.setdefault(sent.resource, []).extend((s, sent.id, at) for s, at in spans)
        elif sent.task == "probe":
            waits.probes += 1
            begin, end = longest(union(span for span, _where in spans))[1]
            seconds = counted(begin, end)
            waits.noop = max(waits.noop, seconds)
            if seconds > WAIT + SEEN:
                text = f"{seconds:.2f} s, {begin:.3f} to {end:.3f}: {_story(sent, traces)}"
                verdict.problem("a no-op waits though a slot is free", begin, text)
    sights = list(sights)
    held = busy(verdict, sights)
    read: dict[str, dict[str, Spans]] = {
        one.resource: {} for one in ledger.values() if one.task == READS
    }
    for key, wants in keys.items():
        for span, id_, _at in wants if key in read else ():
            read[key].setdefault(id_, []).append(span)
        taken = union([*held.get(key, []), *dead.get(key, [])])
        idle = without(union(span for span, _id, _at in wants), taken)
        for begin, end in idle:
            seconds = counted(begin, end)
            waits.wanted = max(waits.wanted, seconds)
            if seconds > WAIT + SEEN:
                who = [(sent, at) for (a, b), sent, at in wants if a < end and begin < b]
                places = ", ".join(f"{sum(at == p for _s, at in who)} with {p}" for p in
                                   sorted({at for _sent, at in who}))  # fmt: skip
                text = (
                    f"{key} for {seconds:.2f} s, {begin:.3f} to {end:.3f}, by {places};"
                    f" as {_story(ledger[who[0][0]], traces)}"
                )
                verdict.problem("a key is free and wanted, and nobody takes it", begin, text)
    waits.kept_out, waits.passed = judge_turns(verdict, ledger, read, there, sights, counted)
    return waits


def _ends(workers: Mapping[Main, WorkerLife], faults: Sequence[Fault]) -> list[float]:
    """Return when connections to the broker ended."""
    ends = [at for worker in workers.values() for at in (*worker.leaves, worker.died)]
    ends += [worker.stopping for worker in workers.values()]
    ends += [fault.begin for fault in faults if fault.kind in BROKER_AWAY]
    return sorted(ends)


def _gone(custody: _Custody, ends: list[float]) -> bool:
    """Return True if a message was lost with a connection ("popped"), one with each."""
    if custody.next is not None and custody.end < custody.begin + VISIBILITY - 1.0:
        return False
    index = bisect.bisect_left(ends, min(custody.begin, custody.put) - SEEN)
    if index < len(ends) and ends[index] < custody.end:
        del ends[index]
        return True
    return False


def _traces(
    lines: Mapping[Process, Sequence[Line]], ledger: Mapping[str, Sent]
) -> dict[str, list[tuple[Line, Main]]]:
    kinds = ("sent", "received", "pooled", "returned", "got", "enter", "done")
    found: dict[str, list[tuple[Line, Main]]] = {}
    for process, of_one in lines.items():
        for line in of_one:
            if line.kind in kinds and line.task in ledger:
                main = (process.worker, process.main)
                found.setdefault(line.task, []).append((line, main))
    for trace in found.values():
        trace.sort(key=lambda one: one[0].at)
    return found


def _story(sent: Sent, traces: Mapping[str, Sequence[tuple[Line, Main]]]) -> str:
    trace = traces.get(sent.id, ())
    steps = ", ".join(f"{line.kind} {line.at:.3f} ({main[0]})" for line, main in trace[-8:])
    return f"{sent.task}[{sent.id}] sent {sent.at:.3f}: {steps or 'never received'}"


def _broker_away(faults: Sequence[Fault], until: float) -> Spans:
    """Return when the broker was away for all workers; single workers report their own breaks."""
    return [
        (fault.begin, (until if fault.end is None else fault.end) + CONNECTED)
        for fault in faults
        if fault.kind in BROKER_AWAY and not fault.worker
    ]


def _custodies(
    sent: Sent,
    trace: Sequence[tuple[Line, Main]],
    workers: Mapping[Main, WorkerLife],
    down: Spans,
    until: float,
    at_once: bool,
    starved: Callable[[float, float], float],
) -> list[_Custody]:
    """Return where a message was, and when, while no slot worked on it."""
    found: list[_Custody] = []
    if sent.state == "REVOKED" and not trace:
        return found  # Celery reports no message that it discards at once
    if sent.expected == "purged" and not sent.done:
        return found  # when that was is not known
    where: Main | None = BROKER if sent.certain else None
    put, since = sent.at, max(sent.at, sent.eta)
    pooled: float | None = None
    eta = 0.0

    def leave(at: float, to: Main | None) -> None:
        if where is None or since >= at:
            return
        if where == BROKER:
            if not (at_once and any(begin - SEEN < since < end for begin, end in down)):
                found.append(_Custody(since, at, BROKER, to, put=put))  # else "repeated"
            return
        worker = workers[where]
        index = bisect.bisect_left(worker.leaves, since)
        gone = min([*worker.leaves[index : index + 1], worker.died])
        given_back = float("inf")
        kept = worker.stopping < eta
        if worker.stopping < at and pooled is None:
            given_back = worker.died if kept else max(since, worker.stopping) + BACK_IN_QUEUE
        mine = min(gone, given_back, at)
        here, lies = union([] if kept else [(since, mine)]), worker.dying(pooled, starved)
        found.extend(_Custody(*span, where) for span in without(here, lies))
        found.extend(_Custody(*span, where, dead=True) for span in both(here, lies))
        # kombu gives back what it has when it has lost its connection, by another one, and then
        # connects again. Who ends instead, or finds no broker, does not: then it is "stranded"
        # until it is received again, unless the broker knows of it.
        again = any(connect > gone for connect in worker.connects)
        again = again and not any(begin - SEEN < gone < end for begin, end in down)
        if given_back < min(gone, at) or (gone < at and (at_once or again)):
            found.append(_Custody(mine + (CONNECTED if gone <= mine else 0.0), at, BROKER, to))

    for line, main in trace:
        if line.kind == "sent":
            leave(line.at, None)
            # Written ahead of the sending, which a stop may keep from happening.
            stop = next((s for s in workers[main].stops if s[0] - SEEN < line.at < s[1]), (0, 0))
            put, since = line.at, max(line.at, line.more or 0.0, stop[1])
            where, pooled = BROKER, None
        elif line.kind == "received":
            leave(line.at, main)
            eta = line.more or 0.0
            where, since, pooled = main, max(line.at, eta), None
        elif line.kind == "pooled":
            pooled = line.at if main == where else pooled
        elif line.kind == "returned":
            leave(line.at, None)
            where, since, put, pooled = BROKER, line.at, line.at, None
        elif line.kind == "got":
            leave(line.at, None)
            where = None
            # Until it has it, or gives up, or its process is dead: then nobody knows.
            ends = (one.at for one, _m in trace if one.at >= line.at and one.kind in ENDS_ASKING)
            ended = next(ends, line.at)
            found.append(_Custody(line.at, ended, main, asks=True))
    leave(until if not sent.done else min(until, trace[-1][0].at if trace else until), None)
    return found
