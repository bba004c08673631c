"""Judge from the bodies' accounts, the keys that were seen and the faults whether the lock held.

It shares no code with the library. The table of docs/bug-or-limit.md, `VERDICTS` here, says what is
a violation and what a limit; a test compares both. The time allowed, in seconds:

- `TOLD`: a body whose lease is over may go on for so long *of its own running time* before it is
  interrupted. (The library promises 0.05; a machine with more processes than cores cannot show
  that.)
- `PROMPT`: after the end or the death of a body its token is gone from a quorum, if its worker and
  a quorum were let alone meanwhile.
- `RESIDUE`: beyond a ttl after the last moment at which a write of it can have been applied, no
  node shows a token any more.
- `BACK`: after the return of a quorum, bodies run again.

Only these are forgiven by a stall of the machine. An overlap never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.campaign.worker.bodies import REFUSED, Body, bodies
from tests.campaign.worker.chronicle import BROKER_DOWN, Fault, unseen_swap
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.sentry import Sight
from tests.campaign.worker.stage import BACKOFF_MAX, HELPED, TTL
from tests.campaign.worker.stores import NODES

TOLD = 1.0
PROMPT = 1.0
RESIDUE = 0.6
BACK = 2 * TTL + BACKOFF_MAX + 3.0
FORGETS = ("FLUSHALL", "clock stepped")
"""The faults here that break a premise of the algorithm."""
STEPPED = "clock stepped"
"""A node may keep its keys for longer, too."""
HARMLESS = ("child kill -9", "revoke, SIGTERM", "revoke, SIGKILL", BROKER_DOWN)
"""Faults of a worker that do not excuse a lock that is not released."""
HELPER = "helper kill -9"
FREED_BY_HELPER = "worker kill -9"
"""One more of these, where a worker has a helper."""

VERDICTS = (
    "two claims overlap within both validities, and not both only read, premises kept (majority"
    " kept memory or restarted later than TTL, clock rates within the bound, no jump, no eviction)"
    " | **VIOLATION**",
    'library said "held", or let the body go on unsignalled, at or after valid_until on its own'
    " clock; extension claimed without a quorum; fence not increasing; release removed another's"
    " key; key left > TTL; call longer than node_timeout + eps; lock not released on *any* ending"
    " when a quorum was reachable; task lost | **VIOLATION**",
    "overlap only past one side's validity: paused process (SIGSTOP, GC, VM), C call that cannot be"
    " interrupted | documented limit; must be *reported* on wake, and its writes rejected by the"
    " fence",
    "overlap after clock jump > drift allowance, restart with amnesia inside TTL, eviction,"
    " FLUSHALL, operator DEL, failover to an async replica, same server twice (if undetectable) |"
    " documented limit; each has a doctor check or a doc line, and a test that shows it happens",
    "nobody can lock while a majority is down, or for <= TTL after a crash or cut | documented"
    " price",
    "a third client wins nothing while two split the votes | expected; must end by jitter",
    "a key that is free and wanted (its message is with a worker that has a free slot, or in the"
    " queue while some worker has one) is taken later than 1 s; an unrelated no-op waits longer"
    " than 1 s where a slot is free; a reader waits longer than 1 s where a key is only read and"
    " no writer waits; readers that come later than a writer that waits are let in for longer than"
    " 1 s, or by a node in whose queue it stands; a worker joins a queue as a writer where none"
    " is; the prefetch window at rest is not what it was; a message is unacknowledged at rest"
    " | **VIOLATION**",
    "a process asked, heard or concluded something against the rules of the algorithm, by its own"
    " trace | **VIOLATION**",
)


@dataclass(frozen=True)
class Problem:
    """A violation: its kind, its time, its description."""

    kind: str
    at: float
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Verdict:
    """Violations, limits and measurements of a run.

    Attributes:
        problems: Violations.
        limits: Documented limits or prices, and how often each was met.
        bodies: All of them.
        beside: How many readers began beside another.
        nodes: How many nodes there are.
        longest: The longest that a token stayed on a quorum after its body's end; seconds.
        excused: The same, where its worker or a majority of nodes was under a fault.
    """

    problems: list[Problem] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    bodies: list[Body] = field(default_factory=list)
    beside: int = 0
    nodes: int = NODES
    longest: float = 0.0
    excused: float = 0.0

    @property
    def quorum(self) -> int:
        return self.nodes // 2 + 1

    def limit(self, kind: str) -> None:
        self.limits[kind] = self.limits.get(kind, 0) + 1

    def problem(self, kind: str, at: float, text: str) -> None:
        self.problems.append(Problem(kind, at, text))


LEADERS = ("member ", "two of three ", "server kill")
"""Beginnings of the names of faults in which etcd may get another leader."""
DOWN = ("two of three ", "server ")
"""Beginnings of those in which it has no majority."""


def judge(
    lines: Mapping[Process, Sequence[Line]],
    alive: Mapping[Process, float],
    faults: Sequence[Fault],
    sights: Iterable[Sight] = (),
    stalls: Sequence[tuple[float, float]] = (),
    until: float = float("inf"),
    nodes: int = NODES,
    ttl: float = TTL,
) -> Verdict:
    """Return the verdict on the locks, so far.

    Args:
        lines: The accounts.
        alive: When each process was last seen alive.
        faults: What was done.
        sights: Which tokens were seen on which node.
        stalls: When the machine stood still.
        until: Only what had time to end before this is judged by time; seconds.
        nodes: How many nodes there are.
        ttl: For how long a key may live that is put for a ttl.
    """
    verdict = Verdict(bodies=bodies(lines, alive), nodes=nodes)
    by_resource: dict[str, list[Body]] = {}
    for body in verdict.bodies:
        by_resource.setdefault(body.resource, []).append(body)
        for lie, at in body.lies.items():
            if lie == REFUSED and _forgotten(body.begin - TTL, at, faults):
                verdict.limit("a write refused, a node was flushed")
            elif lie == REFUSED and unseen_swap(
                faults, body.begin - TTL, at, *_born(verdict.bodies, body.resource, at)
            ):
                verdict.limit("a write refused, servers were swapped before a process began")
            else:
                verdict.problem("untrue", at, f"{lie}: {body}")
        for _refusal in range(body.refused):
            verdict.limit("a write that came too late was refused by the fence")
        if body.untold > TOLD:
            text = f"went on for {body.untold:.2f} s after its lease was over: {body}"
            verdict.problem("not told", body.begin, text)
    for of_one in by_resource.values():
        _overlaps(verdict, of_one, faults)
        _fences(verdict, of_one)
    _blocks(verdict, list(sights), faults, stalls, until, ttl)
    _returns(verdict, faults, stalls, until)
    verdict.problems.sort(key=lambda problem: problem.at)
    return verdict


def _born(every: Iterable[Body], resource: str, until: float) -> list[float]:
    """Return when the processes began whose bodies had a resource."""
    those = (body for body in every if body.resource == resource and body.begin <= until)
    return [body.process.born for body in those]


def _overlaps(verdict: Verdict, of_one: list[Body], faults: Sequence[Fault]) -> None:
    """Check the bodies of one resource, by begin: any number of readers, or one writer."""
    open_: list[Body] = []
    for body in of_one:
        open_ = [earlier for earlier in open_ if earlier.end > body.begin]
        verdict.beside += body.shared and any(earlier.shared for earlier in open_)
        for earlier in open_:
            text = f"{earlier}  AND  {body}"
            if earlier.shared and body.shared:
                continue
            if body.begin >= min(earlier.within, body.within):
                verdict.limit("overlap past a validity")
            elif _forgotten(earlier.begin, body.begin, faults):
                verdict.limit("overlap within both validities, a node was flushed")
            elif unseen_swap(
                faults, earlier.begin, body.begin, earlier.process.born, body.process.born
            ):
                verdict.limit("overlap within both validities, swapped before a process began")
            else:
                verdict.problem("overlap within both validities", body.begin, text)
        open_.append(body)


def _forgotten(begin: float, end: float, faults: Sequence[Fault]) -> bool:
    """Return True if a node was flushed between the grants of the two locks."""
    return any(fault.kind in FORGETS and fault.touches(begin - 0.5, end) for fault in faults)


def _fences(verdict: Verdict, of_one: list[Body]) -> None:
    """Check that bodies that enter with a valid lease do so in the order of their grants."""
    largest: Body | None = None
    for body in of_one:
        if body.fence is None or body.begin >= body.within:
            continue
        if largest is not None and largest.fence is not None and body.fence <= largest.fence:
            text = f"{largest.fence} of {largest}  THEN  {body.fence} of {body}"
            verdict.problem("fencing tokens do not grow", body.begin, text)
        else:
            largest = body


def _blocks(
    verdict: Verdict,
    sights: list[Sight],
    faults: Sequence[Fault],
    stalls: Sequence[tuple[float, float]],
    until: float,
    ttl: float,
) -> None:
    """Find tokens that stay longer than they may."""
    owners = {(body.resource, body.token): body for body in verdict.bodies}
    for sight in sights:
        owner = owners.get((sight.resource, sight.token))
        first, last = min(sight.first.values()), max(sight.last.values())
        if owner is not None and not owner.exited and owner.end > until - 5.0:
            continue  # it may run yet
        end = owner.end if owner else first
        applied = _settled(end, faults, owner)
        # At each change of its leader all leases of etcd start over; one is in `ttl`. And none ends
        # while it has no majority.
        near = [fault for fault in faults if ttl > TTL and fault.touches(first, last)]
        leaders = sum(fault.kind.startswith(LEADERS) for fault in near)
        again = max(0, leaders - 1) * TTL
        again += sum((f.end or last) - f.begin for f in near if f.kind.startswith(DOWN))
        allowed = applied + ttl * (1 if owner else 2) + RESIDUE + again
        whose = str(owner) if owner else f"{sight.resource} token {sight.token}, no body"
        stepped = any(f.kind == STEPPED and f.touches(end - TTL, last) for f in faults)
        if last > allowed and not stepped and not _stalled(end, last, stalls):
            nodes = [node for node, at in sight.last.items() if at > allowed]
            text = f"on nodes {nodes} until {last:.3f}, allowed {allowed:.3f}: {whose}"
            verdict.problem("key left longer than a ttl", last, text)
        if owner is None:
            continue
        block = sight.majority_until(verdict.quorum) - end - owner.storing
        if _touched(owner, faults, stalls, verdict.quorum):
            verdict.excused = max(verdict.excused, block)
            continue
        verdict.longest = max(verdict.longest, block)
        if block > PROMPT:
            text = f"still on a quorum {block:.2f} s after its end: {whose}"
            verdict.problem("not freed", end, text)


def _settled(end: float, faults: Sequence[Fault], owner: Body | None) -> float:
    """Return when the last write of a body's process has reached its node.

    Cuts and stops delay it. So does a stop of that process right behind its body, before its
    release.
    """
    changed = True
    while changed:
        changed = False
        for fault in faults:
            stops = owner is not None and _stops(fault, owner)
            if fault.end is None or fault.end <= end or not (fault.nodes or stops):
                continue
            if fault.begin <= (end + PROMPT if stops else end):
                end, changed = fault.end, True
    return end


def _stops(fault: Fault, body: Body) -> bool:
    own = (0, body.process.pid, body.process.main)
    return (
        fault.worker == body.process.worker
        and fault.pid in own
        and fault.kind in ("child stop", "worker stop")
    )


def _touched(
    body: Body, faults: Sequence[Fault], stalls: Sequence[tuple[float, float]], quorum: int
) -> bool:
    """Return True if its worker, or a majority of nodes, had a fault around its end."""
    begin, end = body.end - 1.0, body.end + PROMPT
    near = [fault for fault in faults if fault.touches(begin, end)]
    nodes = {node for fault in near if not fault.worker for node in fault.nodes}
    if len(nodes) >= quorum or _stalled(begin, end, stalls):
        return True
    own = [fault for fault in near if fault.worker == body.process.worker]
    pids = (0, body.process.pid, body.process.main)
    harmless = HARMLESS
    if body.process.worker == HELPED:
        if any(fault.kind == HELPER for fault in own):
            return True
        harmless = (*HARMLESS, FREED_BY_HELPER)
    return any(fault.pid in pids and fault.kind not in harmless for fault in own)


def _stalled(begin: float, end: float, stalls: Sequence[tuple[float, float]]) -> bool:
    return any(one < end and begin < two for one, two in stalls)


def _returns(
    verdict: Verdict, faults: Sequence[Fault], stalls: Sequence[tuple[float, float]], until: float
) -> None:
    """Check that a lock is granted soon after a majority came back, if the broker is there."""
    losses = [f for f in faults if len(f.nodes) >= verdict.quorum and not f.worker and f.end]
    for loss in losses:
        back = loss.end or 0.0
        again = any(other.begin > loss.begin and other.begin < back + BACK for other in losses)
        down = [f for f in faults if f.kind == BROKER_DOWN and f.touches(back, back + BACK)]
        if again or down or back + BACK > until or _stalled(back, back + BACK, stalls):
            continue
        if not any(back <= body.begin <= back + BACK for body in verdict.bodies):
            text = f"no body began within {BACK:g} s of a quorum's return"
            verdict.problem("no return", back, text)
        verdict.limit("nobody could lock without a majority")
