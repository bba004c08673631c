"""A process: its clock, its connections, its watchdog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from celery_redlock.keepalive.watchdog import Schedule, Watched
from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.quorum import look
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import Round, Verb
from tests.protocol.sim.world.nodes import Connection, Link
from tests.protocol.sim.world.operation import Operation, Struck
from tests.protocol.sim.world.plan import chance, key_of, struck_at
from tests.protocol.sim.world.worker import Worker

if TYPE_CHECKING:
    from tests.protocol.sim.world.keeper import SharedLeaseTable
    from tests.protocol.sim.world.world import World

CONNECT_TIMEOUT = 1.0
EPOCH = 1.7e9
"""Seconds that wall clocks show when the world begins, apart from their skew."""
TURN = 0.01
"""Seconds a thread may have to wait until it may write."""
BACKOFF, BACKOFF_MAX, SETTLED = 0.05, 1.0, 1.0  # as in driver.py and node.py


class Process:
    """A client: a clock, connections, a watchdog, workers. Mirrors `driver.Driver`.

    Args:
        world: Where it lives.
        index: Its number there.
        host: Whose clocks it has.
        connected: Whether it has connections already, or must make them.
    """

    def __init__(self, world: World, index: int, host: int, *, connected: bool = True) -> None:
        knobs = world.knobs
        self.world = world
        self.index = index
        self.host = host
        self.rate = knobs.client_rates[host] if host < len(knobs.client_rates) else 1.0
        self.skew = knobs.client_skews[host] if host < len(knobs.client_skews) else 0.0
        self.last_fence = 0
        self.paused_until = 0.0
        self.dead = False
        self.waiting: dict[Round, Operation] = {}
        self.schedule = Schedule()
        self._tending = False
        self._ticks = 0
        self.guard = RestartGuard(knobs.guard, knobs.ttl, lambda warning: None)
        servers = knobs.servers or range(knobs.nodes)
        self.links = [Link(self, i, world.servers[s]) for i, s in enumerate(servers)]
        for link in self.links:
            if connected:
                self._open(link)
            else:
                self._reconnect(link)
        self.table: SharedLeaseTable | None = None
        self.workers: list[Worker] = []

    def hire(self) -> None:
        """Let its workers begin."""
        for number in range(self.world.knobs.workers):
            self.workers.append(Worker(self, number))

    def forked(self, parent: Process) -> None:
        """Start as the fork of a process, without any of its leases (`redlock._after_fork`)."""

    def clock(self) -> float:
        """This process's time."""
        return self.rate * self.world.now + 1000.0

    def proposal(self) -> int | None:
        """Return the proposal, as `Redlock._proposal` does; None in a world without fencing."""
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
        """Die as by `kill -9`: requests on the way travel on."""
        self.dead = True
        for worker in self.workers:
            worker.done = True
        if self.table is not None and self.table.keeper is not None:
            self.table.keeper.hears_of_death()

    # -- Operations, as in Driver._carry

    def carry(self, operation: Operation) -> None:
        """Write a round to its nodes."""
        round_ = operation.round
        round_.begin()
        now = self.clock()
        for index in round_.targets:
            if operation.strike:
                operation.point()
            link = self.link(index, round_)
            channel = link.channel
            if channel.unanswered and (round_.verb.extends or channel.stalled(now)):
                self._drain(link)
            if round_.verb.needs_memory and link.trust.to_ask_again(now):
                self._look_again(link, now)
            if channel.ask(round_, now):
                if operation.strike:
                    self._may_be_struck(operation, link)
                self.world.send(link, round_)
            if link.connection is None:
                self._reconnect(link)
        if round_.decided:
            operation.finish()
            return
        self.waiting[round_] = operation
        self.later(max(0.0, round_.until - now), self._overdue, round_)

    def _look_again(self, link: Link, now: float) -> None:
        """Look at the node again, as Node._look_again does."""
        if link.channel.up and not link.channel.stalled(now):
            link.trust.asked_again(now)
            round_ = look(link.index, now)
            link.channel.unanswered.append(round_)
            self.world.send(link, round_)

    def _no_master(self, link: Link) -> None:
        """Drop the connection, as Node._refused does: a new one shows which server it is."""
        assert link.connection is not None
        link.connection.proven = True
        link.breaks += 1
        self.drop(link)

    def _may_be_struck(self, operation: Operation, link: Link) -> None:
        """Between the queue and the socket, as in Node.ask: the connection is of no use then."""
        try:
            operation.point()
        except Struck:
            assert link.connection is not None
            link.connection.proven = True  # the node is not to blame
            link.breaks += 1
            # Requests on their way may arrive behind a release on the next connection.
            self.world.adrift |= {
                (claim.token, link.index)
                for round_ in link.channel.unanswered
                if round_ is not operation.round and round_.verb is not Verb.LOOK
                for claim in round_.claims
            }
            self.drop(link)
            raise

    def answered(self, link: Link) -> Round:
        """The round that the next answer on a connection belongs to, as in Node._take."""
        return link.channel.unanswered.popleft()

    def link(self, index: int, round_: Round) -> Link:
        """The link to a node that a round travels on."""
        return self.links[index]

    def read(self, connection: Connection) -> None:
        """Read one answer, as in Node._receive_one; see to the next."""
        link = connection.link
        world = self.world
        now = self.clock()
        _arrived, asked, reply = connection.replies.popleft()
        round_ = self.answered(link)
        link.trust.heard = max(link.trust.heard, round_.sent)
        if round_.verb is Verb.LOOK:
            if not isinstance(reply, NodeInfo):
                link.trust.unanswered("did not answer if it still is a master", forbidden=False)
            elif link.trust.told(round_.sent, reply, now):
                self._no_master(link)
        elif isinstance(reply, Exception):
            round_.silence(link.index, str(reply))
            if "READONLY" in str(reply):
                self._no_master(link)
        else:
            try:
                recall = round_.claims[0].recall if round_.verb.needs_memory else 0.0
                round_.answer(link.index, reply, now, link.trust.doubt(now, recall))
            except (TypeError, ValueError):
                round_.silence(link.index, "no answer to such a request")
            connection.proven = True
            if round_.verb.wrote(reply):
                link.trust.wrote(round_.sent)
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
        """Drop a connection, and make a new one."""
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
        if not link.server.up or link.server.replica_until > self.world.now:
            self._refused(link)
            return
        link.connecting = False
        self._open(link)
        self._settle_all()

    def _open(self, link: Link) -> None:
        link.connections += 1
        key = key_of(self.world.seed, "net", self.index, link.index, link.connections)
        link.connection = Connection(link, key, self.world.now)
        now = self.clock()  # as in Node.opened
        link.trust.connected(link.server.facts(self.world.now), now, now)
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
        knobs = self.world.knobs
        patience = knobs.patience
        shortest = min(min(claim.deadline - now, patience) for claim in claims)
        shortest = min(shortest, self.schedule.wakes - now)
        steps = quorum.extend(claims, now, max(0.001, shortest))
        strike = 0
        if knobs.strikes:  # a round that meets a bug must not end the leases
            strike = struck_at(self._stream("strike", 0), self._ticks, knobs)
        operation = Operation(
            self,
            steps,
            lambda ballot: self._tended(alive, ballot.confirmed()),
            lambda: self._tended(alive, ()),
            strike,
        )
        # Another thread may have the connections meanwhile, and release a claim due for extension.
        drawn = chance(self._stream("turn", 0), self._ticks)
        if drawn < 0.5:
            operation.start(None)
        else:
            operation.round = next(steps)
            self.later((drawn - 0.5) * 2 * TURN, operation.start)

    def _tended(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        self._tending = False
        if self.table is not None:
            for claim in renewed:
                self.table.granted(claim)
        self._settle_leases(due, renewed)
        self._wake()

    def _settle_leases(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        for watched in self.schedule.settle(due, renewed, self.clock()):
            watched.lost(watched.claim)
