"""Judge from the messages and the faults alone whether each tick was sent once.

It shares no code with the library and trusts none of its output. A message is for one due second
of its entry, and which one is bounded by the sender's own clock: not before its schedule said "due"
(`asked`), not after the message left (`sent`); mostly both lie in one second. Where messages cannot
be given each a second of its own, a tick was provably sent twice; a second that no message can be
for was provably left out.

What is forgiven, and counted:

- a tick is left out in the second in which a beat was killed or stopped: that beat may have been
  about to send it. The tick of the next second is its tick as well, as it would be of a lone beat
  that comes late. So few moments are that unlucky that at most one in ten faults is forgiven;
- a message that its beat was about to send when it was stopped leaves when it is woken, whatever
  others have sent by then: no lease can prevent what happens between the last look at the clock
  and the write. Here too, one in ten;
- a beat that is killed or stopped in the moment after its message left has not yet notified the
  others: without a transaction over nodes and broker, one of them sends it again;
- in seconds in which the whole machine stood still, a tick may be left out;
- while the quorum is lost, nothing may be sent; from a moment after its return all must be.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

SETTLED = 0.5
"""Seconds after the loss of the quorum in which a message claimed before may still leave."""
BACK = 2.5
"""Seconds after the quorum's return within which all that is overdue must be sent."""


@dataclass(frozen=True)
class Message:
    """A message. Times are seconds since the epoch, by the clock that all processes share."""

    beat: str
    pid: int
    asked: float
    sent: float


@dataclass(frozen=True)
class Fault:
    """A fault, with its begin and end.

    Attributes:
        kind: "kill" or "stop" (of a beat, `pid`), "node", "quorum", "stall" (of the machine).
    """

    kind: str
    begin: float
    end: float
    pid: int = 0


@dataclass
class Verdict:
    """Verdict on an entry.

    Attributes:
        problems: What no fault explains; none: the run was good.
        forgiven: What a fault explains, by kind.
        count: Messages that were judged.
        ideal: As many there should be.
        longest: The longest time between two messages, but for losses of the quorum; seconds.
    """

    problems: list[str] = field(default_factory=list)
    forgiven: dict[str, int] = field(default_factory=dict)
    count: int = 0
    ideal: float = 0.0
    longest: float = 0.0

    def forgive(self, kind: str) -> None:
        self.forgiven[kind] = self.forgiven.get(kind, 0) + 1

    def believe(self, faults: Iterable[Fault]) -> None:
        """Check that no more is forgiven than bad luck explains."""
        counts: dict[str, int] = {}
        for fault in faults:
            counts[fault.kind] = counts.get(fault.kind, 0) + 1
        unlucky = 1 + (counts.get("kill", 0) + counts.get("stop", 0)) // 10
        for kind, number in self.forgiven.items():
            if kind != "stall" and number > unlucky:
                self.problems.append(f"{number} x {kind}: more than bad luck")
        if self.forgiven.get("stall", 0) > max(2.0, self.ideal / 20):
            self.problems.append(f"the machine stalled too often: {self.forgiven['stall']} times")


def judge_ticks(
    messages: Iterable[Message], faults: Iterable[Fault], begin: float, end: float
) -> Verdict:
    """Judge an entry that is due at each whole second: each is sent once.

    Args:
        messages: All of the entry, whenever sent.
        faults: All of the run.
        begin: From when on all ticks must be there; seconds since the epoch.
        end: Until when.
    """
    faults = list(faults)
    verdict = Verdict()
    seconds, extra = _assign(messages)
    for message in extra:
        if _was_stopped(message, faults):
            verdict.forgive("sent when woken")
        else:
            verdict.problems.append(f"sent twice: {_text(message, begin)}")
    losses = [fault for fault in faults if fault.kind == "quorum"]
    for loss in losses:
        back = [m for m in messages if loss.end <= m.sent <= loss.end + BACK]
        if not back and loss.end + BACK < end:
            verdict.problems.append(f"not within {BACK} s after the quorum's return")
    for second in range(math.ceil(begin), math.floor(end)):
        if any(loss.begin - 1 < second < loss.end + BACK for loss in losses):
            continue
        verdict.ideal += 1
        if second in seconds:
            verdict.count += 1
        elif kind := _excuse(second, faults):
            verdict.forgive(kind)
        else:
            verdict.problems.append(f"left out: second {second - begin:.0f} ({second})")
    _judge_losses(verdict, messages, losses, begin)
    times = sorted(message.sent for message in messages if begin <= message.sent <= end)
    for one, two in itertools.pairwise(times):
        if not any(loss.begin < two and one < loss.end for loss in losses):
            verdict.longest = max(verdict.longest, two - one)
    if not verdict.count:
        verdict.problems.append("nothing was sent")
    verdict.believe(faults)
    return verdict


def judge_interval(
    messages: Iterable[Message],
    faults: Iterable[Fault],
    begin: float,
    end: float,
    *,
    every: float,
    ttl: float,
    late: float = 0.0,
) -> Verdict:
    """Judge an entry with an interval: its period is kept, whichever beat sends.

    A tick is claimed after its beat has asked the schedule and before the message leaves, and the
    claim lasts for an interval, less 5 %. So the next message cannot leave within nine tenths of an
    interval after the beat *asked* for the one before, however slow the machine is. Two that left
    closer together than that may each have been claimed in time: the first one was sent late.

    No gap is above two intervals; the count is within 2 % of the ideal (in a short run, half a
    one), both taken between messages where the quorum was not lost.

    Args:
        messages: All of the entry.
        faults: All of the run.
        begin: From when to judge; seconds since the epoch.
        end: Until when.
        every: The interval; seconds.
        ttl: A beat that dies while it sends is missed so long, and a second; seconds.
        late: By how much the next may be late where who has sent the last one, or was about to send
            it, was killed or stopped, as what it has claimed is kept for longer; seconds.
    """
    faults = list(faults)
    verdict = Verdict()
    times = [begin]
    senders: dict[float, Message] = {}
    for message in sorted(messages, key=lambda message: message.sent):
        if begin <= message.sent <= end:
            if _was_stopped(message, faults):
                verdict.forgive("sent when woken")
            else:
                times.append(message.sent)
                senders[message.sent] = message
    times.append(end)
    losses = [fault for fault in faults if fault.kind == "quorum"]
    whole = 0.0
    for number, (one, two) in enumerate(itertools.pairwise(times)):
        if lost := [loss for loss in losses if loss.begin < two and one < loss.end]:
            if two - lost[-1].end > BACK + late:
                verdict.problems.append(f"not within {BACK + late} s after the quorum's return")
            continue
        gap = two - one
        verdict.longest = max(verdict.longest, gap)
        between = 0 < number < len(times) - 2  # two messages; not before the first, after the last
        problem = excuse = ""
        if between and two - senders[one].asked < 0.9 * every:
            problem = f"two within {gap:.3f} s, {one - begin:.2f} s after the begin"
            if _ended_until(one + 0.1, senders[one], faults):
                excuse = "sent again after a kill or stop"
        elif gap > 2 * every:
            problem = f"nothing for {gap:.2f} s, {one - begin:.2f} s after the begin"
            if gap <= every + ttl + 1.2 and _died_sending(one + every, faults):
                excuse = "late after a kill or stop"
        if problem and any(f.kind == "stall" and f.begin < two and one < f.end for f in faults):
            excuse = "stall"
        if excuse:
            verdict.forgive(excuse)
        else:
            verdict.problems += [problem] if problem else []
            verdict.count += between
            if every < gap < every + late and (
                _ended_until(two, senders.get(one), faults) or _died_sending(one + every, faults)
            ):
                gap = every
            whole += gap if between else 0.0
    verdict.ideal = whole / every
    if abs(verdict.count - verdict.ideal) > max(0.5, 0.02 * verdict.ideal):
        verdict.problems.append(f"{verdict.count} sent, {verdict.ideal:.1f} due")
    if not verdict.count:
        verdict.problems.append("nothing was sent")
    _judge_losses(verdict, messages, losses, begin)
    verdict.believe(faults)
    return verdict


def _assign(messages: Iterable[Message]) -> tuple[dict[int, Message], list[Message]]:
    """Give as many messages as possible a second of their own; return the others, too."""
    waiting = sorted(messages, key=lambda message: message.asked)[::-1]
    heap: list[tuple[int, int, Message]] = []
    given: dict[int, Message] = {}
    extra: list[Message] = []
    second = 0
    while waiting or heap:
        if not heap:
            second = max(second, math.floor(waiting[-1].asked))
        while waiting and math.floor(waiting[-1].asked) <= second:
            message = waiting.pop()
            heapq.heappush(heap, (math.floor(message.sent), len(waiting), message))
        while heap and heap[0][0] < second:
            extra.append(heapq.heappop(heap)[2])
        if heap:
            given[second] = heapq.heappop(heap)[2]
        second += 1
    return given, extra


def _was_stopped(message: Message, faults: list[Fault]) -> bool:
    """Return True if its beat was stopped between the decision and the write."""
    return any(
        fault.kind == "stop"
        and fault.pid == message.pid
        and message.asked - 0.1 <= fault.begin
        and fault.end - 0.1 <= message.sent  # woken, then sent
        for fault in faults
    )


def _ended_until(end: float, message: Message | None, faults: list[Fault]) -> bool:
    """Return True if its beat was killed or stopped after its message left, before `end`."""
    return message is not None and any(
        fault.kind in ("kill", "stop")
        and fault.pid == message.pid
        and message.sent <= fault.begin <= end
        for fault in faults
    )


def _excuse(second: int, faults: list[Fault]) -> str:
    """Return the fault that explains a second without a message, if there is one."""
    for fault in faults:
        if fault.kind == "stall" and fault.begin < second + 1 and second < fault.end:
            return "stall"
    for fault in faults:
        if fault.kind in ("kill", "stop") and second - 0.05 <= fault.begin < second + 1:
            return "left out at a kill or stop"
    return ""


def _died_sending(due: float, faults: list[Fault]) -> bool:
    return any(f.kind in ("kill", "stop") and due - 0.2 <= f.begin <= due + 0.5 for f in faults)


def _judge_losses(
    verdict: Verdict, messages: Iterable[Message], losses: list[Fault], begin: float
) -> None:
    for loss in losses:
        meanwhile = [m for m in messages if loss.begin + SETTLED < m.sent < loss.end]
        for message in meanwhile:
            verdict.problems.append(f"sent without a quorum: {_text(message, begin)}")


def _text(message: Message, begin: float) -> str:
    return (
        f"{message.beat} (pid {message.pid}) asked {message.asked - begin:.3f},"
        f" sent {message.sent - begin:.3f}"
    )
