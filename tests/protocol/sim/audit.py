"""Invariants of every world, and the auditor that checks them.

The auditor keeps books of its own: it shares no arithmetic with the code that it checks, and has
what no process has: the true time and the memories of the nodes.

    I1  Claims of one resource are disjoint in true time: [grant, min(release sent, declared lost,
        valid until)); unless all of them are readers'.
    I2  Fail closed: no process counts a lease as held at or after valid-until by its own clock,
        and the holder of a watched lease is notified of a loss by then.
    I3  Fencing tokens strictly increase, in the order of the grants of a resource.
    I4  A key is gone a ttl after it was last written; in the end every node is empty.
    I5  No write with a token lands behind its release on one connection, nor on any that no fault
        broke; where nothing fails, a finished attempt leaves nothing behind.
    I6  When all has healed, a fresh client wins at the first attempt; and some client wins in the
        end.
    I7  A key changes by expiry or by a request that bears its token; acquiring never overwrites.
    I8  Rounds end in time, whatever the nodes do.
    I9  No answer is neither a yes nor a no, and is still sent the release.
    I10 A node holds all names of a claim or none. Of a name with a limit there are never more
        holders than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import base_of, slots
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import Vote, is_shared
from tests.protocol.sim.world.nodes import Connection, Link, Server
from tests.protocol.sim.world.plan import Audit
from tests.protocol.sim.world.process import Process
from tests.protocol.sim.world.worker import Worker
from tests.protocol.sim.world.world import World

EPSILON = 1e-6
PROMPT = 0.012
"""Seconds within which a process that is not paused must act."""
SPLITS = 100
"""Attempts that may fail in a row in a world without faults while there is no holder."""


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(invariant, text)
        self.invariant = invariant

    def __str__(self) -> str:
        return ": ".join(self.args)


class Book:
    """The auditor's record of one token."""

    __slots__ = (
        *("asked", "denied", "done", "expiries", "freed"),
        *("holder", "over", "said", "signalled", "valid"),
    )

    def __init__(self, nodes: int) -> None:
        self.expiries = [-math.inf] * nodes
        self.valid = -math.inf
        self.over = False  # the deadline has passed once, or it was released
        self.signalled = self.done = False
        self.holder: Claim | None = None
        self.denied = False  # its holder has learnt that it is not held
        self.said: dict[int, Vote] = {}
        self.asked: list[int] = []
        self.freed: dict[int, object] = {}


class Auditor(Audit):
    """Raises `Violation` as soon as one is seen.

    Args:
        only: The invariants to look at; all if empty.
    """

    def __init__(self, only: Sequence[str] = ()) -> None:
        self.only = only

    def start(self, world: World) -> None:
        """Take the witness stand at every node."""
        self.world = world
        self.books: dict[str, Book] = {}
        self.granted_to: dict[str, list[tuple[Worker, Claim]]] = {}
        self.fences: dict[str, int] = {}
        self.wrote_at: dict[Round, float] = {}
        self.splits = 0
        knobs = world.knobs
        self.quorum = knobs.nodes // 2 + 1
        self.knobs = knobs
        self.allowance = knobs.ttl * 0.01 + 0.002
        self.quiet = not world.faults and not knobs.tail
        self.round_trip = 3.2 * knobs.delay
        for server in world.servers:
            server.node.witness = world._changed

    def _book(self, claim: Claim) -> Book:
        book = self.books.get(claim.token)
        if book is None:
            book = self.books[claim.token] = Book(self.world.knobs.nodes)
        return book

    def _fail(self, invariant: str, text: str) -> None:
        if not self.only or invariant in self.only:
            raise Violation(invariant, f"at {self.world.now:.6f}: {text}")

    # -- At the nodes

    def sent(self, link: Link, round_: Round, now: float) -> None:
        """When a request was first written; for which nodes."""
        verb = round_.verb
        if verb is Verb.ACQUIRE:
            self._book(round_.claims[0]).asked.append(link.index)
            self.wrote_at.setdefault(round_, now)
        elif verb.extends:
            self.wrote_at.setdefault(round_, now)
            if verb is Verb.RENEW and now < round_.sent + EPSILON:
                self._kept(round_)

    def _kept(self, round_: Round) -> None:
        """I4: a keeper does not go on with what its child gave back or gave up."""
        for claim in round_.claims:
            book = self._book(claim)
            if book.signalled or book.done:
                self._fail("I4", f"{claim.token} is extended though its holder has done with it")

    def changed(
        self,
        server: Server,
        over: Connection,
        name: str,
        before: str | None,
        after: str | None,
        claim: Claim,
    ) -> None:
        """I5 and I7, at every change of a key."""
        if before is not None and before != claim.token:
            self._fail("I7", f"{claim.token} changed the key of {before} on node {server.index}")
        if after is not None:
            expiry = server.node.until(name, after)
            if expiry > server.clock(self.world.now) + claim.ttl + EPSILON:
                self._fail("I4", f"{claim.token} stays longer than its ttl")
            book = self.books.get(claim.token)
            freed_on = book.freed.get(over.link.index) if book is not None else None
            # What the dead have written travels on, while others free what they held.
            known = freed_on is over or not (over.link.breaks or over.link.process.dead)
            if before is None and freed_on is not None and known:
                self._fail("I5", f"{claim.token} was set on node {server.index} after its release")

    def executed(self, server: Server, round_: Round) -> None:
        """I10, after every request."""
        now = server.clock(self.world.now)
        for claim in round_.claims if self.world.knobs.several > 1 else ():
            every = [slots(base_of(name), self.knobs.limit) for name in claim.resources]
            tokens = [[server.node.token(slot, now) for slot in each] for each in every]
            held = [claim.token in each for each in tokens]
            if any(held) and not all(held):
                self._fail("I10", f"node {server.index} holds a part of {claim.token}")

    def freed(self, server: Server, over: Connection, claim: Claim) -> None:
        """Remember on which connection."""
        self._book(claim).freed[over.link.index] = over

    # -- At the processes

    def answered(self, link: Link, round_: Round, reply: Any, now: float) -> None:
        """Keep the books, then compare."""
        verb = round_.verb
        if verb is Verb.ACQUIRE:
            claim = round_.claims[0]
            if isinstance(reply, Exception):
                return
            yes = reply is None or reply == claim.token or isinstance(reply, int)
            self._book(claim).said[link.index] = Vote.YES if yes else Vote.NO
            if yes:
                self._confirmed(link.index, claim, self.wrote_at[round_], now)
        elif verb.extends and not isinstance(reply, Exception):
            sent = self.wrote_at[round_]
            for claim, outcome in zip(round_.claims, reply, strict=True):
                if outcome != "0":
                    self._confirmed(link.index, claim, sent, now)

    def _confirmed(self, node: int, claim: Claim, sent: float, now: float) -> None:
        book = self.books[claim.token]
        granted = claim.granted_at is not None
        if granted and now >= book.valid:
            book.over = True
        if not book.over:
            expiries = book.expiries
            expiries[node] = max(expiries[node], sent + claim.ttl)
            book.valid = sorted(expiries)[len(expiries) - self.quorum] - self.allowance
        if granted:
            self._compare(book, claim, now)
            self._alone(claim)

    def _compare(self, book: Book, claim: Claim, now: float) -> None:
        # A keeper may have missed the end; its opinion has no effect then.
        if claim.held(now) and not (book.over and book.holder is not claim):
            if book.over:
                self._fail("I2", f"{claim.token} is held again after its deadline")
            if claim.deadline > book.valid + EPSILON:
                self._fail(
                    "I2", f"{claim.token} says {claim.deadline:.6f}, valid until {book.valid:.6f}"
                )
            if now >= book.valid:
                self._fail("I2", f"{claim.token} is said to be held at {now:.6f}")

    def granted(self, worker: Worker, claim: Claim, now: float) -> None:
        """I1, I2, I3 and I9."""
        if claim.proposal is not None:
            last, token = self.fences.get(claim.resource, 0), claim.fencing_token or 0
            if token <= last:
                self._fail("I3", f"{claim.token} got fencing token {token} after {last}")
            self.fences[claim.resource] = token
        book = self._book(claim)
        book.holder = claim
        yes = sum(vote is Vote.YES for vote in book.said.values())
        if yes < self.quorum:
            self._fail("I9", f"{claim.token} was granted by {yes} nodes")
        if now >= book.valid:
            book.over = True
        self._compare(book, claim, now)
        self.splits = 0
        for name in self._names(claim):
            self.granted_to.setdefault(name, []).append((worker, claim))
        self._alone(claim)

    def _names(self, claim: Claim) -> set[str]:
        """All that is exclusive of what it claims; of a slot also the key that it is a slot of."""
        names = set(claim.resources)
        return names | {base_of(name) + "*" for name in names} if self.knobs.limit > 1 else names

    def _alone(self, claim: Claim) -> None:
        for name in self._names(claim):
            holders = self._holders(name)
            most = self.knobs.limit_of(name[:-1]) if name.endswith("*") else 1
            if all(is_shared(claim.token) for _worker, claim in holders):
                continue
            if len(holders) > most:
                who = " and ".join(claim.token for _worker, claim in holders)
                self._fail("I1" if most == 1 else "I10", f"{who} hold {name}")

    def _holders(self, name: str) -> list[tuple[Worker, Claim]]:
        grants = self.granted_to.get(name, ())
        holders = []
        for worker, other in grants:
            process = worker.process
            over = process.clock() >= other.deadline or (process.dead and process.table)
            if not (other.ended or other.lost or over):
                holders.append((worker, other))
        self.granted_to[name] = [
            (worker, other) for worker, other in grants if not (other.ended or other.lost)
        ]
        return holders

    def held(self, worker: Worker, claim: Claim, says: bool, now: float) -> None:
        """I2."""
        book = self.books[claim.token]
        if now >= book.valid:
            book.over = True
        if says:
            self._compare(book, claim, now)
            if book.over or book.denied:
                self._fail("I2", f"{claim.token} is said to be held at {now:.6f}")
        book.denied = not says
        self._told(worker, claim, book, now)

    def _told(self, worker: Worker, claim: Claim, book: Book, now: float) -> None:
        """Check that the process of a watched lease was notified of a loss, unless paused."""
        process = worker.process
        if (
            self.world.knobs.extension
            and not book.signalled
            and now > book.valid + PROMPT
            and process.paused_until < self.world.now - PROMPT
            and process.true(book.valid) > process.paused_until
        ):
            self._fail("I2", f"{claim.token} was not told of its loss at {book.valid:.6f}")

    def signalled(self, worker: Worker, claim: Claim, now: float) -> None:
        """I2: by the deadline."""
        book = self.books[claim.token]
        self._told(worker, claim, book, now)
        book.signalled = True

    def closed(self, process: Process, round_: Round, now: float) -> None:
        """I8, and I9: the votes are those that were given."""
        late = now - round_.until
        if late > PROMPT and process.paused_until < self.world.now - PROMPT and round_.waits:
            self._fail("I8", f"{round_.verb.word} closed {late:.3f} s late")
        if round_.verb is Verb.ACQUIRE:
            said = self._book(round_.claims[0]).said
            for node, vote in enumerate(round_.votes):
                told = said.get(node)
                if vote in (Vote.YES, Vote.NO) and vote is not told:
                    self._fail("I9", f"node {node} said {told}, counted as {vote}")

    def failed(self, worker: Worker, claim: Claim, ballot: Round, now: float) -> None:
        """I9: who did not say no is sent the undoing. I6: somebody wins."""
        self._undone(worker.process, claim)
        if self.quiet:
            self.splits += 1
            live = any(
                not (other.ended or other.lost)
                for name in claim.resources
                for _w, other in self.granted_to.get(name, ())
            )
            if live:
                self.splits = 0
            elif self.splits > SPLITS:
                self._fail("I6", f"{self.splits} attempts failed while nobody held the lock")

    def interrupted(self, worker: Worker, claim: Claim) -> None:
        """I9, as for any attempt that failed."""
        self._undone(worker.process, claim)

    def _undone(self, process: Process, claim: Claim) -> None:
        book = self._book(claim)
        for node in book.asked:
            if book.said.get(node) is not Vote.NO:
                self._freeing(process, node, claim)
        self._finished(claim)

    def _freeing(self, process: Process, node: int, claim: Claim) -> None:
        """A release or an undoing of `claim` is on its way to `node`, or will be."""
        channel = process.links[node].channel
        for round_ in (*channel.unanswered, *channel.owed.values()):
            if round_.verb in (Verb.UNDO, Verb.RELEASE) and round_.claims[0] is claim:
                return
        if node in self._book(claim).freed or not channel.up:
            return
        if process.links[node].connection is None or not process.links[node].connection.alive:
            return
        self._fail("I9", f"{claim.token} is not undone on node {node}")

    def released(self, worker: Worker, claim: Claim, held: bool, now: float) -> None:
        """I2: not held to the end if it was over before."""
        self.books[claim.token].done = True
        self._finished(claim)

    def _finished(self, claim: Claim) -> None:
        """I5: where nothing fails, nothing is left of an attempt, soon."""
        book = self.books[claim.token]
        book.over = True
        if self.quiet and 3 * self.round_trip < 0.4 * claim.ttl:
            self.world.at(self.world.now + 3 * self.round_trip, self._nothing_left, claim)

    def _nothing_left(self, claim: Claim) -> None:
        for server in self.world.servers:
            now = server.clock(self.world.now)
            tokens = [server.node.token(name, now, claim.token) for name in claim.resources]
            left = claim.token in tokens
            if left and (claim.token, server.index) not in self.world.adrift:
                self._fail("I5", f"{claim.token} is left on node {server.index}")


def conclude(world: World) -> None:
    """I4 and I6, after the world has healed and a ttl has passed."""
    knobs = world.knobs
    for process in world.processes:
        for worker in process.workers:
            if not worker.done:
                raise Violation(
                    "I8", f"worker {process.index}.{worker.number} never came to an end"
                )
    for server in world.servers:
        for resource in [*server.node.held, *server.node.readers]:
            token = server.node.token(resource, server.clock(world.now))
            if token is not None:
                raise Violation("I4", f"node {server.index} still holds {token} at {world.now:.3f}")
    world.knobs = knobs = replace(knobs, tail=0.0, interrupts=0.0, strikes=0.0)
    fresh = Process(world, len(world.processes), knobs.processes)
    if knobs.guard:
        # Uptimes are reported in whole seconds; and a promoted replica has a vote once it is known.
        world.now += 1.1 * knobs.ttl + 2.1
    fresh.hire()
    worker = fresh.workers[0]
    worker._rounds = worker._tries = 1
    seen = world.grants
    world.run()
    if world.grants == seen:
        raise Violation("I6", "a fresh client was refused though all has healed and expired")
