"""Nodes that are killed and come back empty while locks are held: the case for the restart guard.

    python -m tests.contract.amnesia --restarts 200
    python -m tests.contract.amnesia --restarts 20 --guard off     # must find an overlap

Each cycle of five nodes is directed. One holder cannot reach one of the nodes, and so holds its
locks on the four others. Two of these are killed with SIGKILL and come back empty. Now a majority
(two forgetful nodes and the one that was never asked) knows nothing of the locks, and contenders,
old and new, ask for them all the time. Some holders extend their locks, some do not. After each
cycle the nodes are given time to be trusted again, for else there would be nobody left to vote.

Who held what, and when, is written down here and judged here: by no clock or rule of the library,
but that a lease ends at the deadline it has named.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from celery_redlock import NotAcquired, Redlock
from celery_redlock.runtime.clock import monotonic
from celery_redlock.server import LocalServer, start_servers
from tests.support.wait import wait_until

TTL = 2.0
"""Seconds."""
RESOURCES = 6
NOWHERE = "redis://127.0.0.1:1/0"
"""Where a node is that one side cannot reach."""


@dataclass(frozen=True, order=True)
class Hold:
    """A hold of a resource; seconds on the machine's clock."""

    resource: str
    begin: float
    end: float
    who: str


@dataclass
class Outcome:
    """Result of a campaign."""

    restarts: int = 0
    holds: list[Hold] = field(default_factory=list)
    unavailable: int = 0

    @property
    def overlaps(self) -> list[tuple[Hold, Hold]]:
        """Two holds of one resource at one time."""
        found = []
        for one, two in pairwise(sorted(self.holds)):
            if one.resource == two.resource and two.begin < one.end:
                found.append((one, two))
        return found

    def __str__(self) -> str:
        return (
            f"{self.restarts} restarts, {len(self.holds)} locks held, {self.unavailable} times no"
            f" quorum, {len(self.overlaps)} overlaps"
        )


class Campaign:
    """Five nodes, contenders all the while, a holder per cycle.

    Args:
        servers: The nodes.
        guard: `restart_guard` of all who lock.
        seed: Chooses the nodes of each cycle.
    """

    def __init__(self, servers: list[LocalServer], guard: str, seed: int) -> None:
        self.servers = servers
        self.outcome = Outcome()
        self._guard = guard
        self._random = random.Random(seed)
        self._over = threading.Event()

    def run(self, restarts: int, *, until_overlap: bool = False) -> Outcome:
        """Restart nodes so often, or until two clients have held one resource at one time."""
        with self._contenders():
            while self.outcome.restarts < restarts:
                self._cycle()
                if until_overlap and self.outcome.overlaps:
                    break
        return self.outcome

    def _redlock(self, cut: int | None = None) -> Redlock:
        urls = [NOWHERE if i == cut else server.url for i, server in enumerate(self.servers)]
        return Redlock(urls, ttl=TTL, restart_guard=self._guard)

    def _cycle(self) -> None:
        cut, *forgetful = self._random.sample(range(len(self.servers)), 3)
        newcomer = self._redlock()
        wait_until(lambda: self._guard == "off" or not newcomer.check(), 10, "all are trusted")
        holder = self._redlock(cut)
        over = threading.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(holder.close)
            stack.callback(newcomer.close)
            pool = stack.enter_context(ThreadPoolExecutor(RESOURCES + 1))
            begun = threading.Barrier(RESOURCES + 1, timeout=30)
            for number in range(RESOURCES):
                pool.submit(self._hold, holder, f"r{number}", number % 2 == 0, begun)
            begun.wait()
            for node in forgetful:
                self.servers[node].kill()
            for node in forgetful:
                self.servers[node].start()
            self.outcome.restarts += len(forgetful)
            pool.submit(self._contend, newcomer, "newcomer", over)
            self._over.wait(1.2 * TTL)  # the holders' time, and some to see who comes next
            over.set()

    def _hold(
        self, redlock: Redlock, resource: str, extended: bool, begun: threading.Barrier
    ) -> None:
        """Take a lock and keep it, for most of a ttl; `extended` for all of one and more."""
        lost: list[float] = []
        held = redlock.lock(resource, wait=4 * TTL, on_lost=lambda _held: lost.append(monotonic()))
        try:
            held.acquire()
        except NotAcquired:
            self.outcome.unavailable += 1
            begun.wait()
            return
        begin = monotonic()
        if not extended:
            redlock.client.watchdog.drop(redlock.client.claims[held.token])
        begun.wait()
        time.sleep(TTL * (1.1 if extended else 0.9))  # the work
        end = min([monotonic(), held.lease.deadline, *lost])
        self.outcome.holds.append(Hold(resource, begin, end, "holder"))
        held.release()

    @contextlib.contextmanager
    def _contenders(self) -> Iterator[None]:
        locks = [self._redlock() for _ in range(2)]
        with ThreadPoolExecutor(len(locks)) as pool:
            running = [
                pool.submit(self._contend, lock, f"contender {number}", self._over)
                for number, lock in enumerate(locks)
            ]
            try:
                yield
            finally:
                self._over.set()
        for future in running:
            future.result()
        for lock in locks:
            lock.close()

    def _contend(self, redlock: Redlock, who: str, over: threading.Event) -> None:
        """Ask for all resources again and again, and keep each lease for a moment."""
        while not over.is_set():
            for number in range(RESOURCES):
                resource = f"r{number}"
                try:
                    lease = redlock.try_acquire(resource)
                except NotAcquired:
                    self.outcome.unavailable += 1
                    continue
                if lease is not None:
                    begin = monotonic()
                    over.wait(0.01)
                    end = min(monotonic(), lease.deadline)
                    self.outcome.holds.append(Hold(resource, begin, end, who))
                    redlock.release(lease)
            over.wait(0.02)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract.amnesia")
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guard", choices=("uptime", "off"), default="uptime")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    with start_servers(5) as servers:
        outcome = Campaign(servers, given.guard, given.seed).run(given.restarts)
    print(f"guard {given.guard}, seed {given.seed}: {outcome}; {time.monotonic() - begun:.0f} s")
    for one, two in outcome.overlaps[:5]:
        print(f"  {one}\n  {two}")
    return int(bool(outcome.overlaps) is (given.guard == "uptime"))


if __name__ == "__main__":
    sys.exit(main())
