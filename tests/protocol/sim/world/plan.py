"""The kind of a world, its faults, and the hooks of its auditor."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round

if TYPE_CHECKING:
    from tests.protocol.sim.world.nodes import Connection, Link, Server
    from tests.protocol.sim.world.process import Process
    from tests.protocol.sim.world.worker import Worker
    from tests.protocol.sim.world.world import World

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


def struck_at(key: int, count: int, knobs: Knobs) -> int:
    """At which point of an operation an exception strikes; 0 for most, which none does."""
    drawn = chance(key, count) / knobs.strikes
    # Two rounds, each with two points per node and one at its end.
    return 1 + int(drawn * (4 * knobs.nodes + 2)) if drawn < 1.0 else 0


@dataclass(frozen=True)
class Knobs:
    """The kind of a world; each seed draws its own (`tests/protocol/sim/swarm.py`).

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
        fencing: Whether leases get fencing tokens.
        client_skews: Seconds each client's wall clock is off; fencing proposals are made from it.
        interrupts: Part of the operations that an exception strikes while they wait.
        strikes: Part of the operations that an exception strikes at some point of their code.
        heedless: Seconds that a body goes on at most after its lock is lost.
        nested: Part of the locks under which a second one is asked for.
        keeper: Whether each process has another that extends for it.
        guard: Whether a node that has forgotten has no vote for a while.
        several: Keys that a claim takes at once, at most.
        limit: How many may hold a key at a time; of several keys, every second one.
        varies: Whether each claim draws a limit of its own, up to that one.
        shared: Part of the claims that are readers'.
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
    fencing: bool = False
    client_skews: tuple[float, ...] = ()
    strikes: float = 0.0
    heedless: float = 0.0
    nested: float = 0.0
    keeper: bool = False
    guard: bool = False
    several: int = 1
    limit: int = 1
    varies: bool = False
    shared: float = 0.0

    def limit_of(self, name: str) -> int:
        """Return how many may hold a key at a time."""
        return self.limit if self.several == 1 or int(name[1:]) % 2 == 0 else 1

    @property
    def patience(self) -> float:
        """Seconds a round waits, as `Redlock` has it."""
        return min(self.node_timeout, self.ttl / 10)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        kind: `crash` (memory lost), `restart` (memory kept), `freeze` (a node), `pause` (a
            process), `death` (of a process), `fork` (of a process), `cut` (links, `way` both,
            requests or replies), `reset` (links), `silence` (links: the connection is gone, and the
            process hears of it at the end only), `refuse` (a node answers writes with an error),
            `full` (a node has no memory for new keys), `jump` (a node's clock, by `amount`), `swap`
            (another server is behind a node's address, started `amount` seconds ago; at the end the
            old one again, if there is an end), `role` (a node is demoted and loses its memory, and
            promoted at the end; no connection breaks).
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
    """Hooks that do nothing: events of a world for its auditor."""

    def start(self, world: World) -> None:
        """All is set up, nothing has happened yet."""

    def sent(self, link: Link, round_: Round, now: float) -> None:
        """A request was written, at the client's time `now`."""

    def changed(
        self,
        server: Server,
        over: Connection,
        name: str,
        before: str | None,
        after: str | None,
        claim: Claim,
    ) -> None:
        """A request that came over a connection changed the key of a name."""

    def executed(self, server: Server, round_: Round) -> None:
        """A request was carried out."""

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
        """The watchdog notified a worker that its lease is lost."""

    def held(self, worker: Worker, claim: Claim, says: bool, now: float) -> None:
        """A worker has asked whether its lock is still held."""

    def released(self, worker: Worker, claim: Claim, held: bool, now: float) -> None:
        """A lock was given back."""


def without(knobs: Knobs, **changes: Any) -> Knobs:
    """Knobs with some of them turned; for shrinking a failure."""
    return replace(knobs, **changes)
