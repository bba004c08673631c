"""Readers and writers of one key: readers are let in beside readers, and writers get their turn.

Pure. That a key which nobody holds is taken is judged in `liveness.py`, whoever wants it. But a key
that is read is free for readers, as long as no writer waits; and while one waits, readers that come
later are not to be let in before it. Both within a second, where somebody has a free slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.oracle import Verdict
from tests.campaign.worker.queues import Queues
from tests.campaign.worker.sentry import Sight
from tests.campaign.worker.slots import SEEN
from tests.campaign.worker.spans import Spans, longest, union, without

READS = "reading"
"""The task that only reads."""
WAIT = 1.0
"""Seconds that a key may be free and wanted."""
BARRIER = 1.0
"""Seconds for which new readers let a writer pass that was called, or has just gone."""
NEAR = 1.0
"""Seconds before and after a fault of a node in which it may not notify a writer, and then lets
readers pass it."""
KEPT_OUT = "a reader waits, and neither is the key written nor does a writer wait"
PASSED = "a writer waits, and readers that come later are let in"


def busy(verdict: Verdict, sights: Iterable[Sight], *, readers: bool = True) -> dict[str, Spans]:
    """Return when each key was taken: by a body, or by a token on too many nodes for any other.

    By writers alone, unless by `readers` as well.
    """
    found: dict[str, Spans] = {}
    for body in verdict.bodies:
        if readers or not body.shared:
            found.setdefault(body.resource, []).append((body.begin, body.within))
    for sight in sights:
        last = sight.majority_until(verdict.nodes - verdict.quorum + 1)
        if last and (readers or not sight.shared):
            span = (min(sight.first.values()) - SEEN / 2, last + SEEN / 2)
            found.setdefault(sight.resource, []).append(span)
    return {key: union(spans) for key, spans in found.items()}


def judge_turns(
    verdict: Verdict,
    ledger: Mapping[str, Sent],
    wants: Mapping[str, Mapping[str, Spans]],
    there: Mapping[str, Spans],
    sights: Iterable[Sight],
    counted: Callable[[float, float], float],
) -> tuple[float, float]:
    """Judge the turns of readers and writers; add violations to the verdict.

    Args:
        verdict: That on the locks.
        ledger: All that was sent.
        wants: Of each key that is read, by the id of each message: when it was wanted by that,
            where there was a free slot.
        there: When each message was with a worker, by its id.
        sights: Which tokens were seen on which node.
        counted: How many seconds count of those between two times.

    Returns:
        For how long a reader was kept out at worst, and a writer passed; seconds.
    """
    written = busy(verdict, sights, readers=False)
    kept_out = passed = 0.0
    for key, by_id in wants.items():
        taken = written.get(key, [])
        read = [body for body in verdict.bodies if body.resource == key and body.shared]
        writers = [
            (begin, end + BARRIER)
            for sent in by_id
            if ledger[sent].task != READS
            for begin, end in there.get(sent, ())
        ]
        in_the_way = union([*taken, *writers])
        for sent, spans in by_id.items():
            if ledger[sent].task == READS:
                own = [(body.begin, body.end) for body in read if body.task == sent]  # a copy
                idle = without(union(spans), union([*in_the_way, *own]))
                begin, end = longest(idle)[1]
                seconds = counted(begin, end)
                kept_out = max(kept_out, seconds)
                if seconds > WAIT + SEEN:
                    text = f"{key} for {seconds:.2f} s, {begin:.3f} to {end:.3f}: {sent}"
                    verdict.problem(KEPT_OUT, begin, text)
                continue
            for begin, end in union(spans):
                later = [one for one in read if ledger[one.task].at > begin and one.begin < end]
                for body in later:
                    last = max((until for _since, until in taken if until <= body.begin), default=0)
                    seconds = counted(max(begin, last), body.begin)
                    passed = max(passed, seconds)
                    if seconds > WAIT + SEEN:
                        text = f"{key} {sent} since {begin:.3f}, {seconds:.2f} s later: {body}"
                        verdict.problem(PASSED, body.begin, text)
                        break
    return kept_out, passed


def judge_queues(
    verdict: Verdict,
    ledger: Mapping[str, Sent],
    lines: Mapping[Process, Sequence[Line]],
    faults: Sequence[Fault],
    queues: Queues,
) -> None:
    """Judge what the queues have shown; add violations to the verdict.

    Args:
        verdict: That on the locks.
        ledger: All that was sent, copied before the accounts were read.
        lines: The accounts.
        faults: What was done.
        queues: The findings.
    """
    # A quorum that lets a reader in has one of these.
    least = verdict.nodes - verdict.quorum + 1
    for (key, token), nodes in list(queues.passed.items()):
        seen = [at for at in nodes.values() if not _near(faults, at)]
        if len(seen) >= least:
            text = f"{key} reader's token {token} on {len(seen)} nodes, past a writer in the queue"
            verdict.problem(PASSED, min(seen), text)
    last: dict[str, float] = {}
    for of_one in lines.values():
        for line in of_one:
            last[line.task] = max(line.at, last.get(line.task, 0.0))
    writers: dict[str, list[tuple[float, float]]] = {}
    for sent in ledger.values():
        if sent.task != READS:
            end = last.get(sent.id, float("inf")) if sent.done else float("inf")
            writers.setdefault(sent.resource, []).append((sent.at, end))
    for (key, (name, joined)), nodes in list(queues.stood.items()):
        alone = not any(begin <= joined <= end for begin, end in writers.get(key, ()))
        if alone and len(nodes) >= least:
            text = f"{key} {name} joined the queue as a writer at {joined:.3f}, and there is none"
            verdict.problem(KEPT_OUT, joined, text)


def _near(faults: Sequence[Fault], at: float) -> bool:
    return any(fault.nodes and fault.touches(at - NEAR, at + NEAR) for fault in faults)
