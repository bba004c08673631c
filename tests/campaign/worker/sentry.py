"""Observations from outside, all the time: the keys on each node, and the processes alive.

Looked at straight at the servers, past all links.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from dataclasses import dataclass, field

from tests.campaign.worker.journal import Journal, Process, now, short
from tests.campaign.worker.queues import Look, Queues
from tests.support.eyes import RedisEyes, Server, eyes

EVERY = 0.08
"""Seconds between two looks."""
STALL = 0.4
"""Seconds that a thread with next to nothing to do may sleep too long; more is a stall."""


@dataclass
class Sight:
    """A token of a resource, with the first and last time it was on each node.

    A reader's if shared.
    """

    resource: str
    token: str
    first: dict[int, float] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)
    shared: bool = False

    def majority_until(self, quorum: int) -> float:
        """Return when it was last on a quorum; 0 if it never was."""
        last = sorted(self.last.values(), reverse=True)
        return last[quorum - 1] if len(last) >= quorum else 0.0


class Sentry:
    """Looks until it is closed.

    Args:
        nodes: The servers.
        resources: The keys.
        journal: The accounts of the processes.
        read: Those of the keys whose wait queues are looked at as well.

    Attributes:
        sights: By resource and token.
        alive: When each process was last seen alive, just before the look.
        stalls: When this machine, or at least this process, stood still.
        network: The thread that carries the links, by its native id.
        broker: The broker's process; 0 where it has many.
        queues: What the wait queues have shown.
    """

    def __init__(
        self,
        nodes: list[Server],
        resources: tuple[str, ...],
        journal: Journal,
        read: tuple[str, ...] = (),
    ) -> None:
        self.sights: dict[tuple[str, str], Sight] = {}
        self.alive: dict[Process, float] = {}
        self.dead: set[Process] = set()
        self.stalls: list[tuple[float, float]] = []
        self.network = self.broker = 0
        self.queues = Queues()
        self._read = read
        self._queued: dict[str, list[tuple[float, float]]] = {}
        self._nodes = nodes
        self._resources = resources
        self._journal = journal
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._watch, args=(number,), daemon=True)
            for number in range(len(nodes))
        ]
        self._threads.append(threading.Thread(target=self._count, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(5.0)

    def _watch(self, number: int) -> None:
        """Watch the tokens of all resources on a node."""
        node = self._nodes[number]
        looks = eyes(node)
        while not self._over.wait(EVERY):
            if self._nodes[number].port != node.port:  # another server stands there
                node = self._nodes[number]
                looks = eyes(node)
            at = now()
            with contextlib.suppress(*looks.blind):
                for resource, token in looks.tokens(self._resources):
                    self._see(number, resource, token, at)
                if isinstance(looks, RedisEyes):
                    self._see_queues(number, looks)
        looks.close()

    def _see_queues(self, number: int, looks: RedisEyes) -> None:
        for resource in self._read:
            readers, writers = looks.queue(resource)
            at, wall = now(), time.time()
            tokens = frozenset(map(short, readers))
            joined = frozenset((name, round(at - wall + since, 3)) for name, since in writers)
            with self._lock:
                self.queues.see(number, resource, Look(at, tokens, joined))

    def _see(self, number: int, resource: str, token: str, at: float) -> None:
        name = short(token)
        sight = Sight(resource, name, shared=token.endswith("~shared"))
        with self._lock:
            sight = self.sights.setdefault((resource, name), sight)
            sight.first.setdefault(number, at)
            sight.last[number] = at

    def _count(self) -> None:
        """Note all processes that keep an account, and if this process gets to run."""
        before = now()
        while not self._over.wait(EVERY / 2):
            at = now()
            if at - before > STALL:
                self.stalls.append((before, at))
            before = at
            self._queue("network", f"/proc/self/task/{self.network}/schedstat")
            self._queue("broker", f"/proc/{self.broker}/schedstat")
            for process in self._journal.processes():
                if process not in self.dead:
                    at = now()
                    if process.alive():
                        self.alive[process] = at
                        kind = "main" if process.pid == process.main else "child"
                        name = f"{kind} {process.pid}"
                        self._queue(name, f"/proc/{process.pid}/schedstat")
                    else:
                        self.dead.add(process)

    def _queue(self, name: str, path: str) -> None:
        """Read how long a thread has been in the kernel's run queue so far."""
        with contextlib.suppress(OSError, IndexError), open(path, encoding="ascii") as file:
            waited = int(file.read().split()[1]) / 1e9
            self._queued.setdefault(name, []).append((now(), waited))

    def starved(self, begin: float, end: float) -> float:
        """Return how long the processes that a message passes waited for a core between two times.

        The network, the broker, and of the workers' main processes and their children those that
        waited longest: a message passes one of each.
        """
        longest = dict.fromkeys(("network", "broker", "main", "child"), 0.0)
        for name, samples in list(self._queued.items()):
            kind = name.partition(" ")[0]
            first = bisect.bisect_left(samples, (begin,)) - 1
            last = min(bisect.bisect_left(samples, (end,)), len(samples) - 1)
            if last > first:
                waited = samples[last][1] - samples[max(0, first)][1]
                longest[kind] = max(longest[kind], waited)
        return sum(longest.values())


STAYING = ("#fence", "#done", "#line", "#trusted")


def leftovers(nodes: list[Server]) -> list[str]:
    """Return all lock keys that are on any node now, as "node: key".

    Fencing tokens stay for days, marks of done tasks for as long as these may come again, those of
    trusted nodes for ever. Who was killed, or cut off, as it stood in line is forgotten after a
    minute.
    """
    found = []
    for number, node in enumerate(nodes):
        looks = eyes(node)
        found += [f"node {number}: {key}" for key in looks.names() if not key.endswith(STAYING)]
        looks.close()
    return found
