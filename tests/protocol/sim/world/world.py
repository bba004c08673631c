"""The world: nodes, the connections to them, and the time in which all happens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round, Verb
from tests.protocol.sim.world.keeper import LeaseSupervisor
from tests.protocol.sim.world.nodes import Connection, Link, Server
from tests.protocol.sim.world.plan import Audit, Fault, Knobs, chance
from tests.protocol.sim.world.process import Process


class World:
    """Nodes, processes and what happens to them, on a virtual clock.

    Args:
        seed: Names the world: the same seed, knobs and faults are the same run.
        knobs: What kind of world it is.
        faults: What goes wrong in it.
        audit: Is told what happens.
        trace: Keep a line of text for every event.

    Attributes:
        adrift: Tokens and nodes of requests that were on their way on a connection which a strike
            closed.
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
        self.adrift: set[tuple[str, int]] = set()
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
        self.processes: list[Process] = []
        for host in range(knobs.processes):
            process = Process(self, len(self.processes), host)
            self.processes.append(process)
            process.hire()
            if knobs.keeper:
                self.processes.append(LeaseSupervisor(self, len(self.processes), process))
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
            return  # the node is gone, and the process does not know it yet
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
        if not server.up:  # what survived the break of an old connection is lost with the server
            requests.clear()
            return
        wait = max(server.frozen_until, link.requests_cut)
        if wait > self.now:
            self.at(wait, self._arrive, connection)
            return
        _arrives, number, round_ = requests.popleft()
        self.operations += 1
        if server.replica_until > self.now and (
            round_.verb.sets or round_.verb in (Verb.FENCE, Verb.RENEW)
        ):
            reply: Any = OSError("READONLY You can't write against a read only replica.")
        elif round_.verb is Verb.LOOK and server.refuses_until <= self.now:
            reply = server.facts(self.now)
        elif server.refuses_until > self.now and round_.verb is not Verb.PEEK:
            reply = OSError("-BUSY Redis is busy running a script")
        elif server.full_until > self.now and round_.verb in (Verb.ACQUIRE, Verb.FENCE):
            reply = OSError("-OOM command not allowed")
        else:
            self._serving = server, connection
            server.node.full = server.full_until > self.now
            reply = server.node.execute(round_.verb, round_.claims, server.clock(self.now))
            self.audit.executed(server, round_)
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
        self.audit.changed(server, connection, resource, before, after, claim)

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
            elif kind == "death" and not process.dead:
                process.die()
            elif kind == "fork" and process.workers and not process.dead:
                self._fork(process)
        for server in (self.servers[n] for n in fault.nodes):
            if kind == "freeze":
                server.frozen_until = max(server.frozen_until, end)
            elif kind == "refuse":
                server.refuses_until = max(server.refuses_until, end)
            elif kind == "full":
                server.full_until = max(server.full_until, end)
            elif kind == "jump":
                server.offset += fault.amount
            elif kind in ("crash", "restart") and server.up:
                self._crash(server, kind == "crash")
                self.at(end, self._revive, server)
            elif kind == "swap" and server.up:
                server.swap(self.now, fault.amount)
                self._cut_off(server)
                if fault.lasts:
                    self.at(end, self._swap_back, server)
            elif kind == "role" and server.up:
                server.demote(end)
        for link in links:
            if kind == "cut":
                if fault.way != "replies":
                    link.requests_cut = max(link.requests_cut, end)
                if fault.way != "requests":
                    link.replies_cut = max(link.replies_cut, end)
            elif kind == "reset" and link.connection is not None:
                # Requests in the server's kernel may still be executed; the rest is lost.
                connection = link.connection
                survive = int(chance(connection.key, -1) * (len(connection.requests) + 1))
                while len(connection.requests) > survive:
                    connection.requests.pop()
                self._break(connection)
            elif kind == "silence" and link.connection is not None:
                link.connection.requests.clear()
                self._break(link.connection, fault.lasts)

    def _crash(self, server: Server, forgets: bool) -> None:
        server.up = False
        if forgets:
            server.node.forget()
            server.runs += 1
            server.started = math.inf
        self._cut_off(server)

    def _swap_back(self, server: Server) -> None:
        server.swap_back()
        self._cut_off(server)

    def _cut_off(self, server: Server) -> None:
        """Break all connections to a server; requests on the way are lost."""
        for process in self.processes:
            for link in process.links:
                if link.server is server and link.connection is not None:
                    link.connection.requests.clear()
                    self._break(link.connection)

    def _revive(self, server: Server) -> None:
        server.up = True
        if server.started == math.inf:
            server.started = server.clock(self.now)

    def _fork(self, process: Process) -> None:
        child = Process(self, len(self.processes), process.host, connected=False)
        self.processes.append(child)
        met = process.guard._met.items()
        child.guard._met = {index: replace(memory) for index, memory in met}
        child.forked(process)
        child.hire()

    def _break(self, connection: Connection, unheard: float = 0.0) -> None:
        """Break a connection, and notify its process later."""
        connection.alive = False
        connection.replies.clear()
        link = connection.link
        link.breaks += 1
        heard = max(self.now + self._travel(connection.key, -2), link.replies_cut) + unheard
        self.at(heard, link.process.heard_of_break, connection)


def show(round_: Round) -> str:
    """A round, for the trace."""
    return f"{round_.verb.word} {' '.join(getattr(claim, 'token', '') for claim in round_.claims)}"
