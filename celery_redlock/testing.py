"""Fakes for tests that want no server, and a world of them that is run by a seed.

`FakeClock` and `FakeNode` stand in for the clock and for one Redis master. `World` puts many of
them together: processes that want locks, nodes that grant them, connections between, and faults,
all on one virtual clock. It runs the very generators, rounds, claims, channels and schedule that
production runs; only the sockets, and the loop over them in `driver.py`, are replaced.

What the world keeps to, since a lock's safety hangs on it:

- A connection delivers in order, each way, whatever delays it; only connections overtake each
  other. A partition delays what is sent and loses nothing (TCP sends again). What is lost is the
  contents of a connection whose node died or which was reset.
- A paused process or node reads nothing, and finds everything on waking. A dead one finds nothing.
- Every random number is a pure function of the seed, its purpose and a count, so that removing one
  fault leaves the delays of all other messages as they were.

No sockets, no threads, no real time.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import quorum
from .channel import Channel
from .lease import Claim, Owner
from .quorum import Round, Steps, Verb
from .watchdog import Schedule, Watched

__all__ = ["Audit", "FakeClock", "FakeNode", "Fault", "Knobs", "World", "chance"]

FOREIGN = "<not a lock>"
"""What a node answers for the token where a key of another type lies under our name."""
CONNECT_TIMEOUT = 1.0
TURN = 0.01
"""Seconds a thread may have to wait until it may write."""
BACKOFF, BACKOFF_MAX, SETTLED = 0.05, 1.0, 1.0  # as in driver.py and node.py


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Let time pass; the new time in seconds."""
        self.now += seconds
        return self.now


class FakeNode:
    """One Redis master, as far as a lock can tell: keys that hold a token until they expire.

    Attributes:
        held: Per resource, its token and when that expires, by the clock of the caller; seconds.
        witness: Called with (resource, token before, token after, claim) at every change that a
            request makes; for tests.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, float]] = {}
        self.witness: Callable[[str, str | None, str | None, Claim], None] | None = None

    def execute(self, verb: Verb, claims: Sequence[Claim], now: float) -> Any:
        """Do what a round asks for; what `Round.answer` takes for a reply."""
        if verb is Verb.EXTEND:
            return "".join([self._extend(claim, now) for claim in claims])
        claim = claims[0]
        token = self.token(claim.resource, now)
        if verb is Verb.ACQUIRE:
            if token is None:
                self._set(claim, None, now)
            return token
        if verb is Verb.PEEK:
            return None if token is None else (token, self.held[claim.resource][1] - now)
        return self._delete(claim, token)

    def token(self, resource: str, now: float) -> str | None:
        """The token that `resource` holds, or None."""
        entry = self.held.get(resource)
        if entry is None:
            return None
        if now >= entry[1]:
            del self.held[resource]
            return None
        return entry[0]

    def occupy(self, resource: str) -> None:
        """Put a key of another type, without an expiry, under the name of `resource`."""
        self.held[resource] = (FOREIGN, float("inf"))

    def _extend(self, claim: Claim, now: float) -> str:
        token = self.token(claim.resource, now)
        if token == claim.token:
            self._set(claim, token, now)
            return quorum.RENEWED
        if token is None:
            self._set(claim, None, now)
            return quorum.SET_AGAIN
        return quorum.REFUSED

    def _set(self, claim: Claim, before: str | None, now: float) -> None:
        # A server counts whole milliseconds, from one that has begun already.
        self.held[claim.resource] = (claim.token, int(now * 1000) / 1000 + claim.ttl)
        if self.witness is not None:
            self.witness(claim.resource, before, claim.token, claim)

    def _delete(self, claim: Claim, token: str | None) -> bool:
        if token != claim.token:
            return False
        del self.held[claim.resource]
        if self.witness is not None:
            self.witness(claim.resource, token, None, claim)
        return True


# -- A world, by a seed ------------------------------------------------------------------------

_MASK = (1 << 64) - 1


def chance(key: int, count: int) -> float:
    """A number in [0, 1), drawn by `key` and `count` alone (the finaliser of splitmix64)."""
    x = (key + count * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x >> 11) * 1.1102230246251565e-16


def key_of(seed: int, *purpose: object) -> int:
    """The key of one stream of random numbers."""
    name = f"{seed}/{purpose}".encode()
    return zlib.crc32(name) << 32 | zlib.crc32(name, 0x5EED)


@dataclass(frozen=True)
class Knobs:
    """What kind of world it is; each seed draws its own (`tests/sim/swarm.py`).

    Attributes:
        nodes: How many the clients believe to talk to.
        servers: Which server each of them is; another than `range(nodes)` lists one twice.
        processes: How many clients, each with a clock and connections of its own.
        workers: Threads of each, which share its connections and its watchdog.
        keys: Resources they contend for.
        rounds: How often each worker wants a lock.
        tries: Attempts it makes for it before it gives up.
        ttl, node_timeout: As of `Redlock`; seconds.
        delay: Usual seconds a message travels.
        tail: Part of the messages that are late, up to seven node timeouts.
        think, hold: Seconds between two locks, and with one, at most.
        extension: Whether held locks are extended.
        client_rates, node_rates: How fast each clock runs, in parts of true time.
        skews: Seconds each node's clock is off.
        interrupts: Part of the operations that an exception strikes.
    """

    nodes: int = 3
    servers: tuple[int, ...] = ()
    processes: int = 2
    workers: int = 1
    keys: int = 1
    rounds: int = 3
    tries: int = 3
    ttl: float = 1.0
    node_timeout: float = 0.05
    delay: float = 0.002
    tail: float = 0.0
    think: float = 0.1
    hold: float = 0.5
    extension: bool = True
    client_rates: tuple[float, ...] = ()
    node_rates: tuple[float, ...] = ()
    skews: tuple[float, ...] = ()
    interrupts: float = 0.0

    @property
    def patience(self) -> float:
        """Seconds a round waits, as `Redlock` has it."""
        return min(self.node_timeout, self.ttl / 10)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        kind: `crash` (memory lost), `restart` (memory kept), `freeze` (a node), `pause` (a
            process), `death` (of a process), `cut` (links, `way` both, requests or replies),
            `reset` (links), `refuse` (a node answers writes with an error), `jump` (a node's clock,
            by `amount`).
        at: When, in true seconds.
        lasts: For how long; seconds.
        nodes, processes: Whom it concerns.
    """

    kind: str
    at: float
    lasts: float = 0.0
    nodes: tuple[int, ...] = ()
    processes: tuple[int, ...] = ()
    way: str = "both"
    amount: float = 0.0


class Audit:
    """Hooks that do nothing: what a world tells whoever checks it."""

    def start(self, world: World) -> None:
        """All is set up, nothing has happened yet."""

    def sent(self, link: Link, round_: Round, now: float) -> None:
        """A request was written, at the client's time `now`."""

    def changed(
        self, server: Server, over: Connection, before: str | None, after: str | None, claim: Claim
    ) -> None:
        """A request that came over a connection changed a key."""

    def freed(self, server: Server, over: Connection, claim: Claim) -> None:
        """A release or an undoing was carried out, whatever it found."""

    def answered(self, link: Link, round_: Round, reply: Any, now: float) -> None:
        """An answer was read, and has been handed to its round."""

    def closed(self, process: Process, round_: Round, now: float) -> None:
        """A round was decided, or overdue."""

    def granted(self, worker: Worker, claim: Claim, now: float) -> None:
        """A worker has a lock."""

    def failed(self, worker: Worker, claim: Claim, ballot: Round, now: float) -> None:
        """An attempt failed."""

    def interrupted(self, worker: Worker, claim: Claim) -> None:
        """An exception struck an attempt, and it has been cleaned up."""

    def signalled(self, worker: Worker, claim: Claim, now: float) -> None:
        """The watchdog told a worker that its lease is lost."""

    def held(self, worker: Worker, claim: Claim, says: bool, now: float) -> None:
        """A worker has asked whether its lock is still held."""

    def released(self, worker: Worker, claim: Claim, held: bool, now: float) -> None:
        """A lock was given back."""


class Server:
    """A node of the world: a fake node with a clock of its own, that can be down or frozen."""

    def __init__(self, index: int, rate: float, offset: float) -> None:
        self.index = index
        self.rate = rate
        self.offset = offset
        self.node = FakeNode()
        self.up = True
        self.frozen_until = 0.0
        self.refuses_until = 0.0
        self.connections: list[Connection] = []

    def clock(self, now: float) -> float:
        """This node's time at the true time `now`."""
        return self.rate * now + self.offset


class Connection:
    """Two queues. Each has one event under way at most, for its head: order cannot break."""

    __slots__ = ("alive", "key", "link", "opened", "proven", "replies", "requests", "sent")

    def __init__(self, link: Link, key: int, now: float) -> None:
        self.link = link
        self.key = key
        self.opened = now
        self.proven = False
        self.alive = True
        self.sent = 0
        self.requests: deque[tuple[float, int, Round]] = deque()
        self.replies: deque[tuple[float, Round, Any]] = deque()


class Link:
    """One process's way to one node: what `node.Node` is in production.

    Attributes:
        breaks: How often a fault broke its connection.
    """

    def __init__(self, process: Process, index: int, server: Server) -> None:
        self.process = process
        self.index = index
        self.server = server
        self.channel = Channel(index)
        self.connection: Connection | None = None
        self.connecting = False
        self.failures = 0
        self.connections = 0
        self.breaks = 0
        self.requests_cut = self.replies_cut = 0.0


class World:
    """Nodes, processes and what happens to them, on a virtual clock.

    Args:
        seed: Names the world: the same seed, knobs and faults are the same run.
        knobs: What kind of world it is.
        faults: What goes wrong in it.
        audit: Is told what happens.
        trace: Keep a line of text for every event.
    """

    def __init__(
        self,
        seed: int,
        knobs: Knobs,
        faults: Sequence[Fault] = (),
        audit: Audit | None = None,
        trace: bool = False,
    ) -> None:
        self.seed, self.knobs, self.faults = seed, knobs, tuple(faults)
        self.audit = audit or Audit()
        self.now = 0.0
        self.operations = self.grants = 0
        self.trace: list[str] | None = [] if trace else None
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._late = 7 * knobs.node_timeout
        rates = knobs.node_rates or (1.0,) * knobs.nodes
        skews = knobs.skews or (0.0,) * knobs.nodes
        # Offset: the wall clock of a server starts anywhere but at nought.
        self.servers = [Server(i, rates[i], 50.0 + skews[i]) for i in range(knobs.nodes)]
        self.processes = [Process(self, index) for index in range(knobs.processes)]
        for fault in self.faults:
            self.at(fault.at, self._strike, fault)
        self.healed = max((fault.at + fault.lasts for fault in self.faults), default=0.0)

    # -- Time

    def at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        """Call something at the true time `time`, in seconds."""
        self._count += 1
        heapq.heappush(self._events, (time, self._count, call, argument))

    def run(self, until: float = float("inf")) -> None:
        """Let time pass until nothing more happens, or until `until`."""
        events = self._events
        pop = heapq.heappop
        while events and events[0][0] <= until:
            self.now, _count, call, argument = pop(events)
            call(argument)
        if events:
            self.now = until

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now:10.6f} {text}")

    # -- The network

    def send(self, link: Link, round_: Round) -> None:
        """Write a request to a link's connection."""
        connection = link.connection
        assert connection is not None
        self.audit.sent(link, round_, link.process.clock())
        number = connection.sent
        connection.sent += 1
        if not connection.alive:
            return  # the node is gone, and we have not heard of it yet
        arrives = self.now + self._travel(connection.key, number)
        connection.requests.append((arrives, number, round_))
        if len(connection.requests) == 1:
            self.at(arrives, self._arrive, connection)

    def _travel(self, key: int, number: int) -> float:
        drawn = chance(key, number)
        knobs = self.knobs
        if drawn < knobs.tail:
            return knobs.delay + self._late * drawn / knobs.tail
        return knobs.delay * (0.5 + drawn)

    def _arrive(self, connection: Connection) -> None:
        """The oldest request reaches its node, unless something holds it up."""
        requests = connection.requests
        if not requests:
            return
        link = connection.link
        server = link.server
        wait = max(server.frozen_until, link.requests_cut)
        if wait > self.now:
            self.at(wait, self._arrive, connection)
            return
        _arrives, number, round_ = requests.popleft()
        self.operations += 1
        if server.refuses_until > self.now and round_.verb is not Verb.PEEK:
            reply: Any = OSError("-OOM command not allowed")
        else:
            self._serving = server, connection
            reply = server.node.execute(round_.verb, round_.claims, server.clock(self.now))
            if round_.verb is Verb.RELEASE or round_.verb is Verb.UNDO:
                self.audit.freed(server, connection, round_.claims[0])
        if self.trace is not None:
            self.note(f"node {server.index} <- {link.process.index}: {show(round_)} = {reply!r}")
        if connection.alive:
            replies = connection.replies
            arrives = self.now + self._travel(connection.key ^ 0xA5A5, number)
            replies.append((arrives, round_, reply))
            if len(replies) == 1:
                self.at(arrives, self._return, connection)
        if requests:
            self.at(max(self.now, requests[0][0]), self._arrive, connection)

    def _return(self, connection: Connection) -> None:
        """The oldest answer reaches its process, unless something holds it up."""
        link = connection.link
        process = link.process
        if connection is not link.connection or process.dead or not connection.replies:
            return
        wait = max(process.paused_until, link.replies_cut)
        if wait > self.now:
            self.at(wait, self._return, connection)
            return
        process.read(connection)

    def _changed(self, resource: str, before: str | None, after: str | None, claim: Claim) -> None:
        server, connection = self._serving
        self.audit.changed(server, connection, before, after, claim)

    # -- Faults

    def _strike(self, fault: Fault) -> None:
        kind, end = fault.kind, fault.at + fault.lasts
        self.note(f"fault {fault}")
        links = [
            self.processes[p].links[n]
            for p in fault.processes
            for n in fault.nodes
            if p < len(self.processes) and n < self.knobs.nodes
        ]
        for process in (self.processes[p] for p in fault.processes if p < len(self.processes)):
            if kind == "pause":
                process.paused_until = max(process.paused_until, end)
            elif kind == "death":
                process.die()
        for server in (self.servers[n] for n in fault.nodes):
            if kind == "freeze":
                server.frozen_until = max(server.frozen_until, end)
            elif kind == "refuse":
                server.refuses_until = max(server.refuses_until, end)
            elif kind == "jump":
                server.offset += fault.amount
            elif kind in ("crash", "restart") and server.up:
                self._crash(server, kind == "crash")
                self.at(end, self._revive, server)
        for link in links:
            if kind == "cut":
                if fault.way != "replies":
                    link.requests_cut = max(link.requests_cut, end)
                if fault.way != "requests":
                    link.replies_cut = max(link.replies_cut, end)
            elif kind == "reset" and link.connection is not None:
                # What has reached the server's kernel may still be carried out; the rest is lost.
                connection = link.connection
                survive = int(chance(connection.key, -1) * (len(connection.requests) + 1))
                while len(connection.requests) > survive:
                    connection.requests.pop()
                self._break(connection)

    def _crash(self, server: Server, forgets: bool) -> None:
        server.up = False
        if forgets:
            server.node.held.clear()
        for process in self.processes:
            for link in process.links:
                if link.server is server and link.connection is not None:
                    link.connection.requests.clear()
                    self._break(link.connection)

    def _revive(self, server: Server) -> None:
        server.up = True

    def _break(self, connection: Connection) -> None:
        """A connection is gone; its process will hear of it."""
        connection.alive = False
        connection.replies.clear()
        link = connection.link
        link.breaks += 1
        heard = max(self.now + self._travel(connection.key, -2), link.replies_cut)
        self.at(heard, link.process.heard_of_break, connection)


class Process:
    """A client: a clock, connections, a watchdog, workers. Mirrors `driver.Driver`."""

    def __init__(self, world: World, index: int) -> None:
        knobs = world.knobs
        self.world = world
        self.index = index
        self.rate = knobs.client_rates[index] if index < len(knobs.client_rates) else 1.0
        self.paused_until = 0.0
        self.dead = False
        self.waiting: dict[Round, Operation] = {}
        self.schedule = Schedule()
        self._tending = False
        self._ticks = 0
        servers = knobs.servers or range(knobs.nodes)
        self.links = [Link(self, i, world.servers[s]) for i, s in enumerate(servers)]
        for link in self.links:
            self._open(link)
        self.workers = [Worker(self, number) for number in range(knobs.workers)]

    def clock(self) -> float:
        """This process's time."""
        return self.rate * self.world.now + 1000.0

    def true(self, time: float) -> float:
        """The true time at which its clock shows `time`."""
        return (time - 1000.0) / self.rate

    def later(self, seconds: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call something in so many of its own seconds, if it is alive and awake then."""
        self.world.at(self.world.now + seconds / self.rate, self._awake, (call, argument))

    def _awake(self, what: tuple[Callable[[Any], None], Any]) -> None:
        if self.dead:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, self._awake, what)
            return
        what[0](what[1])

    def die(self) -> None:
        """`kill -9`: what it has written travels on."""
        self.dead = True
        for worker in self.workers:
            worker.done = True

    # -- Operations, as in Driver._carry

    def carry(self, operation: Operation) -> None:
        """Write a round to its nodes."""
        round_ = operation.round
        round_.begin()
        now = self.clock()
        for index in round_.targets:
            link = self.link(index, round_)
            channel = link.channel
            if channel.unanswered and (round_.verb is Verb.EXTEND or channel.stalled(now)):
                self._drain(link)
            if channel.ask(round_, now):
                self.world.send(link, round_)
            if link.connection is None:
                self._reconnect(link)
        if round_.decided:
            operation.finish()
            return
        self.waiting[round_] = operation
        self.later(max(0.0, round_.until - now), self._overdue, round_)

    def link(self, index: int, round_: Round) -> Link:
        """The link to a node that a round travels on."""
        return self.links[index]

    def read(self, connection: Connection) -> None:
        """Read one answer, as in Node._receive_one; see to the next."""
        link = connection.link
        world = self.world
        now = self.clock()
        _arrived, asked, reply = connection.replies.popleft()
        round_ = link.channel.answered()
        if isinstance(reply, Exception):
            round_.silence(link.index, str(reply))
        else:
            try:
                round_.answer(link.index, reply, now)
            except (TypeError, ValueError):
                round_.silence(link.index, "no answer to such a request")
            connection.proven = True
        world.audit.answered(link, asked, reply, now)
        if connection.replies:
            world.at(max(world.now, connection.replies[0][0]), world._return, connection)
        self._settle(round_)

    def _settle(self, round_: Round) -> None:
        if round_.decided:
            operation = self.waiting.pop(round_, None)
            if operation is not None:
                operation.finish()

    def _overdue(self, round_: Round) -> None:
        if round_ in self.waiting:
            for link in self.links:  # an unread answer is no silence
                self._drain(link)
        operation = self.waiting.pop(round_, None)
        if operation is not None:
            operation.finish()

    def _drain(self, link: Link) -> None:
        connection, now = link.connection, self.world.now
        while (
            connection is not None
            and connection.replies
            and connection.replies[0][0] <= now
            and link.replies_cut <= now
        ):
            self.read(connection)

    # -- Connections, as in Driver._connect and Node._drop

    def heard_of_break(self, connection: Connection) -> None:
        """The socket says that its peer is gone."""
        if not self.dead and self.paused_until > self.world.now:
            self.world.at(self.paused_until, self.heard_of_break, connection)
        elif not self.dead and connection is connection.link.connection:
            self.drop(connection.link)

    def drop(self, link: Link) -> None:
        """Give a connection up, and make a new one."""
        connection = link.connection
        assert connection is not None
        link.connection = None
        link.channel.dropped()
        if connection.proven or self.world.now - connection.opened > SETTLED:
            link.failures = 0
        else:
            link.channel.unreachable("it connects and breaks")
        self._reconnect(link)
        self._settle_all()

    def _settle_all(self) -> None:
        for round_ in list(self.waiting):
            self._settle(round_)

    def _reconnect(self, link: Link) -> None:
        if not link.connecting:
            link.connecting = True
            self._knock(link)

    def _knock(self, link: Link) -> None:
        """The next attempt to connect, after its backoff."""
        pause = 0.0
        if link.failures:
            ceiling = min(BACKOFF_MAX, BACKOFF * 2.0 ** min(link.failures, 16))
            pause = ceiling * chance(self._stream("backoff", link.index), link.failures)
        link.failures += 1
        self.later(pause, self._try, link)

    def _try(self, link: Link) -> None:
        world, server = self.world, link.server
        free = max(server.frozen_until, link.requests_cut, link.replies_cut, world.now)
        if server.up and free <= world.now + CONNECT_TIMEOUT:
            travel = 2 * world.knobs.delay * chance(self._stream("connect", link.index), 0)
            self.later((free - world.now + travel) * self.rate, self._connected, link)
        else:
            self.later(CONNECT_TIMEOUT if server.up else 0.0, self._refused, link)

    def _refused(self, link: Link) -> None:
        link.channel.unreachable("refused")
        self._settle_all()
        self._knock(link)

    def _connected(self, link: Link) -> None:
        if not link.server.up:
            self._refused(link)
            return
        link.connecting = False
        self._open(link)
        self._settle_all()

    def _open(self, link: Link) -> None:
        link.connections += 1
        key = key_of(self.world.seed, "net", self.index, link.index, link.connections)
        link.connection = Connection(link, key, self.world.now)
        for round_ in link.channel.connected(self.clock()):
            self.world.send(link, round_)

    def _stream(self, purpose: str, number: int) -> int:
        return key_of(self.world.seed, purpose, self.index, number)

    # -- The watchdog, as in Watchdog._run and Redlock._extend

    def watch(self, worker: Worker, claim: Claim) -> None:
        """Extend a lease from now on."""
        self.schedule.add(Watched(claim, float("inf"), worker.lost), self.clock())
        self._wake()

    def _wake(self) -> None:
        if not self._tending and self.schedule.wakes != float("inf"):
            self._ticks += 1
            wait = max(0.0, self.schedule.wakes - self.clock())
            self.later(wait, self._tick, self._ticks)

    def _tick(self, tick: int) -> None:
        now = self.clock()
        if self._tending or tick != self._ticks:
            return
        if self.schedule.wakes > now + 1e-9:
            self._wake()
            return
        due = self.schedule.take(now + 1e-9)
        alive, over = self.schedule.part(due, now)
        self._settle_leases(over, ())
        if not alive:
            self._wake()
            return
        self._tending = True
        claims = [watched.claim for watched in alive]
        patience = self.world.knobs.patience
        shortest = min(min(claim.deadline - now, patience) for claim in claims)
        shortest = min(shortest, self.schedule.wakes - now)
        steps = quorum.extend(claims, now, max(0.001, shortest))
        operation = Operation(self, steps, lambda ballot: self._tended(alive, ballot.confirmed()))
        # Another thread may hold the connections meanwhile, and release what is to be extended.
        drawn = chance(self._stream("turn", 0), self._ticks)
        if drawn < 0.5:
            operation.start(None)
        else:
            operation.round = next(steps)
            self.later((drawn - 0.5) * 2 * TURN, operation.start)

    def _tended(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        self._tending = False
        self._settle_leases(due, renewed)
        self._wake()

    def _settle_leases(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        for watched in self.schedule.settle(due, renewed, self.clock()):
            watched.lost(watched.claim)


class Operation:
    """A generator of rounds that is being run. Mirrors `Driver.run`."""

    __slots__ = ("done", "over", "process", "round", "steps")

    round: Round

    def __init__(self, process: Process, steps: Steps[Any], done: Callable[[Any], None]) -> None:
        self.process = process
        self.steps = steps
        self.done = done
        self.over = False

    def start(self, _argument: Any = None) -> None:
        """Write its first round."""
        if not hasattr(self, "round"):
            self._advance(lambda: next(self.steps))
        else:
            self.process.carry(self)

    def finish(self) -> None:
        """Its round is decided or overdue."""
        process, round_ = self.process, self.round
        round_.close("no answer")
        now = process.clock()
        process.world.audit.closed(process, round_, now)
        if not self.over:
            self._advance(lambda: self.steps.send(now))

    def interrupt(self) -> None:
        """An exception strikes in the middle of it."""
        self.over = True
        self.process.waiting.pop(self.round, None)
        self.steps.close()

    def _advance(self, step: Callable[[], Round]) -> None:
        try:
            self.round = step()
        except StopIteration as stop:
            self.over = True
            self.done(stop.value)
            return
        self.process.carry(self)


class Worker:
    """A thread that wants a lock, again and again. Mirrors `Redlock._try` and `_release`."""

    def __init__(self, process: Process, number: int) -> None:
        self.process = process
        self.number = number
        self.claim: Claim | None = None
        self.done = False
        self._rounds = process.world.knobs.rounds
        self._tries = self._attempts = 0
        self._draws = 0
        self._key = key_of(process.world.seed, "worker", process.index, number)
        self._owner = Owner(f"host{process.index}", 10 + number)
        process.later(self._draw() * process.world.knobs.think, self._begin)

    def _draw(self) -> float:
        self._draws += 1
        return chance(self._key, self._draws)

    def _begin(self, _argument: Any = None) -> None:
        if self._rounds <= 0:
            self.done = True
            return
        self._rounds -= 1
        self._tries = self.process.world.knobs.tries
        self._attempt()

    def _attempt(self, _argument: Any = None) -> None:
        process, knobs = self.process, self.process.world.knobs
        self._attempts += 1
        resource = f"r{int(self._draw() * knobs.keys)}" if knobs.keys > 1 else "r0"
        claim = Claim(resource, self._owner.token(str(self._attempts)), knobs.ttl, knobs.nodes)
        self.claim = claim
        steps = quorum.acquire(claim, process.clock(), knobs.patience)
        operation = Operation(process, steps, self._tried)
        struck = self._struck()
        operation.start()
        if struck:
            process.later(struck * knobs.patience, self._interrupted, operation)

    def _struck(self) -> float:
        knobs = self.process.world.knobs
        if not knobs.interrupts:
            return 0.0
        drawn = self._draw()
        return drawn / knobs.interrupts if drawn < knobs.interrupts else 0.0

    def _interrupted(self, operation: Operation) -> None:
        if operation.over:
            return
        operation.interrupt()
        claim = self.claim
        assert claim is not None
        self.clean_up(claim)
        self.process.world.audit.interrupted(self, claim)
        self._rest()

    def clean_up(self, claim: Claim) -> None:
        """What `Redlock._try` does when an exception strikes in it."""
        steps = quorum.undo(claim, self.process.clock())
        Operation(self.process, steps, lambda _nothing: None).start()

    def _tried(self, ballot: Round) -> None:
        process, claim, knobs = self.process, self.claim, self.process.world.knobs
        assert claim is not None
        now = process.clock()
        if claim.granted_at is None:
            process.world.audit.failed(self, claim, ballot, now)
            self._tries -= 1
            if self._tries > 0:
                process.later(self._draw() * knobs.patience, self._attempt)
            else:
                self._rest()
            return
        process.world.grants += 1
        process.world.audit.granted(self, claim, now)
        process.world.note(f"granted {process.index}.{self.number} until {claim.deadline:.6f}")
        if knobs.extension:
            process.watch(self, claim)
        self._work((claim, now + self._draw() * knobs.hold))

    def _work(self, what: tuple[Claim, float]) -> None:
        """Work under the lock, asking now and then whether it still is ours."""
        process = self.process
        claim, until = what
        now = process.clock()
        if claim.ended:
            return
        says = claim.held(now)
        process.world.audit.held(self, claim, says, now)
        if not says or now >= until:
            self._release()
        else:
            process.later(min(until - now, claim.ttl / 4), self._work, what)

    def lost(self, claim: Claim) -> None:
        """The watchdog says that the lease is lost."""
        process = self.process
        process.world.audit.signalled(self, claim, process.clock())
        if not claim.ended:
            self._release()

    def _release(self) -> None:
        process, claim, knobs = self.process, self.claim, self.process.world.knobs
        assert claim is not None
        process.schedule.drop(claim)
        process.world.note(f"releases {process.index}.{self.number}")
        steps = quorum.release(claim, process.clock(), knobs.node_timeout)
        operation = Operation(process, steps, self._released)
        struck = self._struck()
        operation.start()
        if struck and not operation.over:
            process.later(struck * knobs.patience, self._release_interrupted, operation)

    def _release_interrupted(self, operation: Operation) -> None:
        if operation.over or self.claim is None:
            return
        operation.interrupt()
        steps = quorum.release(self.claim, self.process.clock(), 0.0)
        Operation(self.process, steps, self._released).start()

    def _released(self, held: bool) -> None:
        assert self.claim is not None
        self.process.world.audit.released(self, self.claim, held, self.process.clock())
        self._rest()

    def _rest(self) -> None:
        self.process.later(self._draw() * self.process.world.knobs.think, self._begin)


def show(round_: Round) -> str:
    """A round, for the trace."""
    return f"{round_.verb.value} {' '.join(claim.token for claim in round_.claims)}"


def without(knobs: Knobs, **changes: Any) -> Knobs:
    """Knobs with some of them turned; for shrinking a failure."""
    return replace(knobs, **changes)
