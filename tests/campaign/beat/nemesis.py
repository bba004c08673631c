"""Faults, by seed, while beats run: deaths and pauses of beats and nodes, losses of the quorum.

The plan is a function of the seed; whom a fault hits is, too, but for beats that are not up just
then. Each fault that was done is written down with its times, for the oracle.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from celery_redlock.server import LocalServer
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.campaign.beat.oracle import Fault
from tests.support.beats import Beat, Site

Node: TypeAlias = LocalServer | LocalPostgres | LocalEtcd
KILL_EVERY = 5.0
STOP_EVERY = 8.0
STOP_FOR = 3.0
"""Seconds; longer than the interval of the entry."""
NODE_EVERY = 4.5
ALONE_EVERY = 15.0
"""Period of the faults of a lone node, which is a quorum: ticks around a fault are not judged."""
NODE_FOR = 2.5
LOSS_FOR = 4.0


@dataclass
class Chronicle:
    """Faults of the beats of each site, and of all."""

    common: list[Fault] = field(default_factory=list)
    of_site: dict[str, list[Fault]] = field(default_factory=dict)
    skipped: int = 0

    def of(self, site: Site) -> list[Fault]:
        return [*self.common, *self.of_site.get(site.kind, [])]

    def count(self, kind: str) -> int:
        every = [*self.common, *(fault for of_one in self.of_site.values() for fault in of_one)]
        return sum(fault.kind == kind for fault in every)


class Nemesis:
    """Does the acts of `plan`, from entry to the end of `run`.

    Args:
        sites: Whose beats suffer.
        nodes: The lock nodes; all are up.
        seed: Of all choices; None for no faults at all.
        loss_every: Seconds between two losses of the quorum.
    """

    def __init__(
        self,
        sites: list[Site],
        nodes: Sequence[Node],
        seed: int | None,
        *,
        loss_every: float = 60.0,
    ) -> None:
        self.sites = sites
        self.nodes = nodes
        self.loss_every = loss_every
        self.done = Chronicle()
        self._quiet = seed is None
        self._random = random.Random(seed)
        self._later: list[tuple[float, Callable[[], None]]] = []

    def plan(self, seconds: float) -> list[tuple[float, Callable[[], None]]]:
        """Return the acts of a run, each with its time in seconds from the beginning."""
        acts: list[tuple[float, Callable[[], None]]] = []
        if self._quiet:
            return acts
        for site in self.sites:
            for every, act in ((KILL_EVERY, self.kill), (STOP_EVERY, self.stop)):
                at = self._random.uniform(0.5, every)
                while at < seconds - STOP_FOR - 1.0:
                    acts.append((at, lambda act=act, site=site: act(site)))  # type: ignore[misc]
                    at += every * self._random.uniform(0.9, 1.1)
        # One act on the nodes at a time: two that forget, and three, in the life of one claim would
        # be more than five nodes can bear.
        node_acts = [self.kill_one, self.kill_two, self.pause_one, self.pause_two]
        at = 2.0
        next_loss = min(self.loss_every / 2, max(2.0, seconds - 10.0))
        while at < seconds - LOSS_FOR - 4.0:
            if at >= next_loss:
                acts.append((at, self.lose_quorum))
                next_loss = at + self.loss_every
            else:
                acts.append((at, node_acts[0]))
                node_acts.append(node_acts.pop(0))
            rest = NODE_EVERY if len(self.nodes) > 1 else ALONE_EVERY
            at += rest + self._random.uniform(0.0, 0.3)
        return sorted(acts, key=lambda act: act[0])

    def run(self, seconds: float, every: Callable[[], None] | None = None) -> None:
        """Do all acts; return when the time is over and everything is up again.

        Args:
            seconds: How long.
            every: Called about ten times a second.
        """
        begin = time.monotonic()
        self._later = self.plan(seconds)
        with self._watch_the_machine():
            while time.monotonic() < begin + seconds or self._later:
                while self._later and begin + self._later[0][0] <= time.monotonic():
                    self._later.pop(0)[1]()
                if every is not None:
                    every()
                time.sleep(0.01)
                self._now = time.monotonic() - begin

    _now = 0.0

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((self._now + seconds, act))
        self._later.sort(key=lambda act: act[0])

    # -- beats ---------------------------------------------------------------------------------

    def _victim(self, site: Site) -> Beat | None:
        """Return a beat that is up, if another one stays up."""
        up = [beat for beat in site.beats if beat.ready]
        if len(up) < 2:
            self.done.skipped += 1
            return None
        return self._random.choice(up)

    def kill(self, site: Site) -> None:
        beat = self._victim(site)
        if beat is None:
            return
        begin, pid = time.time(), beat.pid
        self._note(site, Fault("kill", begin, beat.kill(), pid))
        forget = self._random.random() < 0.3
        self._after(self._random.uniform(0.2, 1.0), lambda: beat.start(forget=forget))

    def stop(self, site: Site) -> None:
        beat = self._victim(site)
        if beat is None:
            return
        begin, pid = time.time(), beat.pid
        beat.pause()

        def wake() -> None:
            beat.resume()
            self._note(site, Fault("stop", begin, time.time(), pid))

        self._after(STOP_FOR, wake)

    def _note(self, site: Site, fault: Fault) -> None:
        self.done.of_site.setdefault(site.kind, []).append(fault)

    # -- nodes ---------------------------------------------------------------------------------

    def pause_one(self) -> None:
        self._pause("node", 1, NODE_FOR)

    def pause_two(self) -> None:
        self._pause("node", 2, NODE_FOR)

    def kill_one(self) -> None:
        self._kill(1)

    def kill_two(self) -> None:
        self._kill(2)

    def lose_quorum(self) -> None:
        self._pause("quorum", 3, LOSS_FOR)

    def _some(self, kind: str, count: int) -> tuple[list[Node], str]:
        """Return so many nodes and the kind of their fault: a lone node is a quorum."""
        alone = len(self.nodes) == 1
        return self._random.sample(self.nodes, 1 if alone else count), "quorum" if alone else kind

    def _pause(self, kind: str, count: int, seconds: float) -> None:
        nodes, kind = self._some(kind, count)
        for node in nodes:
            node.pause()
        begin = time.time()

        def wake() -> None:
            end = time.time()
            for node in nodes:
                node.resume()
            self.done.common.append(Fault(kind, begin, end))

        self._after(seconds, wake)

    def _kill(self, count: int) -> None:
        nodes, kind = self._some("node", count)
        begin = time.time()
        for node in nodes:
            node.kill()

        def start() -> None:
            for node in nodes:
                node.start()
            self.done.common.append(Fault(kind, begin, time.time()))

        self._after(NODE_FOR, start)

    # -- the machine ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watch_the_machine(self) -> Iterator[None]:
        """Note when this process, which has next to nothing to do, could not run for long."""
        over = threading.Event()

        def watch() -> None:
            before = time.time()
            while not over.wait(0.02):
                now = time.time()
                if now - before > 0.4:
                    self.done.common.append(Fault("stall", before, now))
                before = now

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
