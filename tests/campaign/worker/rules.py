"""Judge traces of workers by the rules of docs/algorithm.md. Pure.

"Smart casual verification": the algorithm is checked elsewhere (simulator, Spin); here is checked
that what ran *was* the algorithm. `RULES` numbers them; every breach names its rule. A trace that
was cut off, as its process was killed, is judged as far as it goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.campaign.worker.chronicle import Fault, unseen_swap
from tests.campaign.worker.journal import Process
from tests.campaign.worker.tracing import Event

RULES: dict[int, str] = {
    1: "a token is used by one attempt, of one process, and never again",
    2: "granted means: a quorum said yes to this very token, and was heard before",
    3: "a deadline is at most the q-th largest send time of what was acknowledged, plus the ttl,"
    " less the drift",
    4: "what was heard at or after the deadline counts for nothing: no lease is revived",
    5: "a node whose memory is doubted has no vote: nor has one that has just started, or stands"
    " where another stood, until a ttl after the other was last heard",
    6: "nothing that may set a token is asked behind its release, of that node, by that process",
    7: "who releases a token has asked for it; or, of its worker, another had, and is dead or done",
    8: "an attempt that was not granted is undone on every node that did not say no",
    9: "only what was granted is extended",
    10: "answers of a node are taken in the order in which it was asked",
    11: "of one resource no lease is granted before all earlier ones are released or past their"
    " deadlines, but a reader's beside readers'",
}

DRIFT_RATE, DRIFT_FLOOR = 0.01, 0.002
EXACT = 1e-6
"""Seconds by which two sums of the same numbers may differ."""
KEPT = 0.25
"""Seconds within which a token must be undone: its process may be kept from running that long."""
FREED = 1.0
"""Seconds within which a dead child's tokens are freed by its worker."""
SETS = ("acquire", "extend")
FREES = ("release", "undo")
EXTENDS = ("extend", "renew")
READER = "~"
"""End of the digest of a reader's token."""
RESERVED = "#reserved"
"""End of the names of reservations: a publisher takes one, the end of the message frees it."""
FORGETS = ("FLUSHALL", "clock stepped")
"""Faults that break a premise: rule 11 does not hold over them."""


@dataclass(frozen=True)
class Breach:
    """A breach of a rule."""

    rule: int
    at: float
    text: str

    def __str__(self) -> str:
        return f"{RULES[self.rule]}: {self.text}"


@dataclass
class _Token:
    """Everything known of one token, over all processes."""

    shared: bool = False
    asked_by: Process | None = None
    rounds: set[float] = field(default_factory=set)
    resource: str = ""
    ttl: float = 0.0
    yes: dict[int, float] = field(default_factory=dict)
    no: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=dict)
    undone: set[int] = field(default_factory=set)
    acknowledged: dict[int, float] = field(default_factory=dict)
    granted: float = math.inf
    over: float = math.inf
    deadline: float = -math.inf
    last: float = 0.0


def check(
    traces: Mapping[Process, Sequence[Event]],
    nodes: int,
    faults: Sequence[Fault] = (),
    died: Mapping[Process, float] | None = None,
    *,
    guard: bool = True,
    follows_up: bool = False,
) -> list[Breach]:
    """Return all breaches, by their time.

    Args:
        traces: Of all processes, from their beginnings.
        nodes: How many nodes there are.
        faults: What was done to them.
        died: When those that are no more were last seen alive.
        guard: Nodes that may have forgotten locks have no vote.
        follows_up: The answer to one question may be another one.
    """
    checker = _Checker(traces, nodes, faults, died or {}, guard, follows_up)
    return sorted(checker.run(), key=lambda b: b.at)


def _merged(traces: Mapping[Process, Sequence[Event]]) -> list[tuple[Process, Event]]:
    """Return all events by time; those of one process in the order of writing."""
    events = [(e.at, n, p, e) for p, of_one in traces.items() for n, e in enumerate(of_one)]
    events.sort(key=lambda one: one[:2])
    return [(process, event) for _at, _n, process, event in events]


class _Checker:
    def __init__(
        self,
        traces: Mapping[Process, Sequence[Event]],
        nodes: int,
        faults: Sequence[Fault],
        died: Mapping[Process, float],
        guard: bool,
        follows_up: bool,
    ) -> None:
        self._events = _merged(traces)
        self._quorum = nodes // 2 + 1
        self._faults = faults
        self._died = died
        self._guard = guard
        self._late = ("release", *(("peek", "pass") if follows_up else ()))
        self._tokens: dict[str, _Token] = {}
        self._order: dict[tuple[Process, int, int], int] = {}
        self._asked_at: dict[tuple[Process, int, tuple[str, float, str]], tuple[int, int]] = {}
        self._heard: dict[tuple[Process, int, int], list[float]] = {}
        self._released: set[tuple[Process, int, str]] = set()
        self._memory: dict[tuple[Process, int, int], _Memory] = {}
        self._leases: dict[str, list[_Token]] = {}
        self._breaches: list[Breach] = []
        self._number = 0

    def run(self) -> list[Breach]:
        for process, event in self._events:
            self._number += 1
            getattr(self, f"_{event.kind}")(process, event)
        self._unfinished()
        return self._breaches

    def _breach(self, rule: int, event: Event, process: Process, text: str) -> None:
        who = f"{process.worker}/{process.pid} at {event.at:.6f}"
        self._breaches.append(Breach(rule, event.at, f"{text}; {who}"))

    def _of(self, event: Event) -> Iterator[tuple[str, _Token]]:
        for digest, resource, ttl in event.claims:
            token = self._tokens.setdefault(digest, _Token(digest.endswith(READER)))
            token.resource, token.ttl = resource, ttl
            if event.kind == "ask":
                token.last = event.at
            yield digest, token

    # -- what was asked

    def _ask(self, process: Process, event: Event) -> None:
        node = event.node
        self._asked_at[process, node, event.round] = self._number, event.link
        for digest, token in self._of(event):
            what = f"{token.resource} token {digest} on node {node}"
            if event.verb == "acquire":
                token.rounds.add(event.sent)
                if len(token.rounds) > 1 or token.asked_by not in (None, process):
                    self._breach(1, event, process, f"{what}: a second attempt")
                token.asked_by = process
                token.asked[node] = event.link
            if event.verb in SETS and (process, node, digest) in self._released:
                self._breach(6, event, process, f"{what}: {event.verb} behind its release")
            if event.verb in EXTENDS and token.granted == math.inf:
                self._breach(9, event, process, f"{what}: {event.verb}, never granted")
            if event.verb in FREES:
                self._freed(process, event, digest, token)

    def _freed(self, process: Process, event: Event, digest: str, token: _Token) -> None:
        self._released.add((process, event.node, digest))
        token.undone.add(event.node)
        token.over = min(token.over, event.at)
        # A release may be asked again much later: whose it is is known by then.
        token.asked_by = owner = token.asked_by or self._killed_as_it_asked(process, event.at)
        what = f"{token.resource} token {digest} on node {event.node}"
        if owner is None:
            self._breach(7, event, process, f"{what}: nobody had asked for it")
        elif owner not in (None, process) and not token.resource.endswith(RESERVED):
            alive = self._died.get(owner, math.inf) > event.at + KEPT
            if owner.worker != process.worker or (alive and token.granted != math.inf):
                text = f"{what}: it is that of {owner.worker}/{owner.pid}, which lives"
                self._breach(7, event, process, text)

    # -- answers

    def _hear(self, process: Process, event: Event) -> None:
        node = event.node
        asked, link = self._asked_at.get((process, node, event.round), (0, 0))
        if asked < self._order.get((process, node, link), 0) and event.verb not in self._late:
            # (A release is asked again in other words, where its script was not known.)
            text = f"node {node}: the answer to {event.round} behind that to a later one"
            self._breach(10, event, process, text)
        self._order[process, node, link] = max(asked, self._order.get((process, node, link), 0))
        memory = self._memory.setdefault((process, node, link), _Memory())
        yes = event.vote == "yes"
        for position, (digest, token) in enumerate(self._of(event)):
            what = f"{token.resource} token {digest} on node {node}"
            if event.verb in ("acquire", "fence") and yes:
                why = "it was doubted" if event.doubt else ""
                if event.verb == "acquire" and self._guard:
                    why = why or memory.doubt(event.now, token.ttl)
                if why:
                    self._breach(5, event, process, f"{what}: {why}, and counted")
            if event.verb == "acquire":
                if yes:
                    token.yes[node] = event.now
                    self._acknowledge(token, node, event)
                elif event.vote == "no":
                    token.no.add(node)
            elif event.verb in EXTENDS and event.outcomes[position : position + 1] in ("1", "2"):
                self._acknowledge(token, node, event)
        # When it answered is not known: it may have been read long after that. But it lived when
        # it was asked.
        memory.heard = max(memory.heard, event.sent)
        self._heard.setdefault((process, node, link), []).append(event.at)

    def _acknowledge(self, token: _Token, node: int, event: Event) -> None:
        if token.granted != math.inf and event.now >= self._allowed(token) + EXACT:
            return  # rule 4: it counts for nothing
        expiry = event.sent + token.ttl
        token.acknowledged[node] = max(expiry, token.acknowledged.get(node, -math.inf))

    def _allowed(self, token: _Token) -> float:
        """Return the latest deadline that the answers received in time allow."""
        expiries = sorted(token.acknowledged.values(), reverse=True)
        if len(expiries) < self._quorum:
            return -math.inf
        return expiries[self._quorum - 1] - (DRIFT_RATE * token.ttl + DRIFT_FLOOR)

    def _killed_as_it_asked(self, main: Process, at: float) -> Process | None:
        """Return a child that had just died, perhaps before it could write what it asked."""
        for child, died in self._died.items():
            if child.worker == main.worker and at - FREED < died < at:
                return child
        return None

    # -- what was concluded

    def _grant(self, process: Process, event: Event) -> None:
        for digest, token in self._of(event):
            what = f"{token.resource} token {digest}"
            if token.asked_by is None:
                continue  # a keeper's or a reservation's, of another process
            if len(token.yes) < self._quorum:
                self._breach(2, event, process, f"{what}: {len(token.yes)} said yes")
            if event.now >= event.deadline:
                self._breach(4, event, process, f"{what}: granted past its deadline")
            self._deadline(process, event)
            token.granted = event.now
            for earlier in self._leases.setdefault(token.resource, []):
                if earlier is token or (earlier.shared and token.shared):
                    continue
                end = min(earlier.over, earlier.deadline, self._died_of(earlier))
                if event.now < end and not self._forgotten(earlier, event.now, process):
                    self._breach(11, event, process, f"{what}: another's lasts until {end:.6f}")
            self._leases[token.resource].append(token)
            del self._leases[token.resource][:-50]

    def _deadline(self, process: Process, event: Event) -> None:
        for digest, token in self._of(event):
            if token.asked_by is None:
                continue
            allowed = self._allowed(token)
            if event.deadline > allowed + EXACT:
                late = token.granted != math.inf and token.deadline <= event.at
                text = f"{token.resource} token {digest}: {event.deadline:.6f} > {allowed:.6f}"
                self._breach(4 if late else 3, event, process, text)
            token.deadline = event.deadline

    def _lost(self, process: Process, event: Event) -> None:
        for _digest, token in self._of(event):
            if token.asked_by == process:
                token.over = min(token.over, event.at)

    def _died_of(self, token: _Token) -> float:
        return self._died.get(token.asked_by, math.inf) if token.asked_by else math.inf

    def _forgotten(self, earlier: _Token, end: float, process: Process) -> bool:
        begin = earlier.granted
        born = [one.born for one in (process, earlier.asked_by) if one is not None]
        flushed = any(
            fault.kind.startswith(FORGETS) and fault.touches(begin - 0.5, end)
            for fault in self._faults
        )
        return flushed or unseen_swap(self._faults, begin, end, *born)

    def _met(self, process: Process, event: Event) -> None:
        memory = self._memory.setdefault((process, event.node, event.link), _Memory())
        if event.run and event.run == memory.run:
            return  # what it says of its uptime changes with its clock; it is known for longer
        if event.run and memory.run:
            memory.other_until = memory.heard
        memory.run = event.run or memory.run
        # Both ends of an uptime are cut to whole seconds, and it changes as the node's clock steps:
        # what its parent, or another connection of it, knows of the same run is known to it.
        memory.started = event.now - event.uptime - 1.0 if event.uptime is not None else -math.inf
        for (other, node, _link), known in self._memory.items():
            if (other.main, node, known.run) == (process.main, event.node, event.run):
                memory.started = min(memory.started, known.started)

    # -- at the end

    def _unfinished(self) -> None:
        end = self._events[-1][1].at if self._events else 0.0
        for digest, token in self._tokens.items():
            owner = token.asked_by
            if owner is None or token.granted != math.inf or token.last > end - KEPT:
                continue
            if self._died.get(owner, math.inf) < token.last + KEPT:
                continue
            # What a node that is away is owed it gets when it is back on that connection, if
            # within the ttl: a driver that has nothing to ask does not look whether it is back.
            left = {
                node: at
                for node, link in token.asked.items()
                if node not in token.no | token.undone
                for at in self._heard.get((owner, node, link), ())
                if token.last + KEPT < at < token.last + token.ttl
            }
            if left:
                heard = ", ".join(f"{node} (heard at {left[node]:.6f})" for node in sorted(left))
                text = f"{token.resource} token {digest}: not undone on nodes {heard}"
                event = Event(token.last, "ask")
                self._breach(8, event, owner, text)


@dataclass
class _Memory:
    """A process's knowledge of a node's memory."""

    run: str = ""
    heard: float = -math.inf
    other_until: float = -math.inf
    started: float = -math.inf

    def doubt(self, now: float, ttl: float) -> str:
        """Return why it certainly has no vote for a lock of this ttl."""
        if now < self.started + ttl:
            return f"it started at {self.started:.3f} at the earliest"
        if now < self.other_until + ttl:
            return f"another server was there until {self.other_until:.3f} at least"
        return ""


def text_of(breaches: Iterable[Breach]) -> str:
    """Return how often each rule was broken, for people."""
    counts: dict[int, int] = {}
    for breach in breaches:
        counts[breach.rule] = counts.get(breach.rule, 0) + 1
    return ", ".join(f"{n} x rule {rule}" for rule, n in sorted(counts.items())) or "none broken"
