"""Those who want locks: processes, and the workers in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import quorum
from ..lease import Claim, Owner
from ..quorum import EXTENDING, Round, Steps
from ..watchdog import Schedule, Watched
from .nodes import Connection, Link
from .plan import chance, key_of

if TYPE_CHECKING:
    from .world import World

CONNECT_TIMEOUT = 1.0
EPOCH = 1.7e9
"""Seconds that wall clocks show when the world begins, but for their skew."""
TURN = 0.01
"""Seconds a thread may have to wait until it may write."""
BACKOFF, BACKOFF_MAX, SETTLED = 0.05, 1.0, 1.0  # as in driver.py and node.py


class Process:
    """A client: a clock, connections, a watchdog, workers. Mirrors `driver.Driver`."""

    def __init__(self, world: World, index: int) -> None:
        knobs = world.knobs
        self.world = world
        self.index = index
        self.rate = knobs.client_rates[index] if index < len(knobs.client_rates) else 1.0
        self.skew = knobs.client_skews[index] if index < len(knobs.client_skews) else 0.0
        self.last_fence = 0
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

    def proposal(self) -> int | None:
        """As `Redlock._proposal`; None in a world without fencing."""
        if not self.world.knobs.fencing:
            return None
        wall = EPOCH + self.world.now + self.skew
        return max(self.last_fence + 1, int(wall * 1e6))

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
            if channel.unanswered and (round_.verb in EXTENDING or channel.stalled(now)):
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
        steps = quorum.acquire(claim, process.clock(), knobs.patience, process.proposal())
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
        process.last_fence = claim.fencing_token or 0
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
