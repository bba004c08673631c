"""Schedule of the faults: phases, by seed.

Four tracks run side by side: one act at a time on the nodes, one on the network, one on the
workers, one on the broker and with load. A phase says how long each rests between two acts.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.campaign.worker.acts import Acts, EtcdActs, PostgresActs
from tests.campaign.worker.chronicle import Chronicle
from tests.campaign.worker.crew import Steps
from tests.campaign.worker.feeder import Feeder
from tests.campaign.worker.stage import Stage


@dataclass(frozen=True)
class Phase:
    """Seconds of rest between two acts, at most, on each track; 0: nothing happens there.

    Attributes:
        only: Where acts of a track are named, no others happen on it.
    """

    name: str
    nodes: float
    network: float
    processes: float
    load: float = 0.0
    only: tuple[str, ...] = ()


PHASES = (
    Phase("nodes", 1.0, 8.0, 8.0),
    Phase("network", 5.0, 0.7, 8.0),
    Phase("processes", 5.0, 8.0, 0.7),
    Phase("majority", 3.0, 0.0, 5.0, only=("lose_majority",)),
    Phase("memory", 0.5, 0.0, 8.0, only=("forget_one_of_three",)),
    Phase("others", 0.5, 0.0, 8.0, only=("swap", "demote")),
    Phase("load", 0.0, 0.0, 0.0, 0.5),
    Phase("readers", 2.5, 2.5, 2.5, 0.3, only=("stream",)),
    Phase("all", 2.5, 2.5, 2.5, 4.0),
)
SLEEPERS = Phase("sleepers", 0.0, 0.0, 0.3, only=("stop_worker",))
"""Whole workers are stopped, lose their leases, and wake. For the search for one kind of bug."""
ENDINGS = Phase("endings", 0.0, 0.0, 0.3, only=("terminate", "kill_child"))
"""Bodies are ended from outside, while others wait for what they hold. The same."""
BUSY = Phase("busy", 0.0, 0.0, 0.0, 0.3, only=("busy_slots",))
FLOOD = Phase("flood", 0.0, 0.0, 0.0, 0.3, only=("flood",))
RECONNECTS = Phase("reconnects", 0.0, 0.0, 0.0, 0.3, only=("drop_broker",))
LEAVING = Phase("leaving", 0.0, 0.0, 0.0, 0.3, only=("restart_busy",))
"""One kind of load each, for the same purpose."""
READING = Phase("reading", 0.0, 0.0, 0.0, 0.3, only=("stream",))
LATER = Phase("later", 0.0, 0.0, 0.0, 0.3, only=("revoke_later",))
"""Tasks with an ETA. The same."""
GENTLE = (
    "pause_nodes", "restart_with_memory", "restart_empty", "client_kill", "script_flush", "flush",
    "no_room", "no_clients", "long_script", "load", "drop_broker", "revoke_later", "busy_slots",
)  # fmt: skip
SHORT = Phase("short", 0.8, 1.0, 2.0, 2.0, only=GENTLE)
"""A little of all, for `make test`."""
PRODUCERS = Phase("producers", 0.0, 0.0, 0.0, 0.3, only=("kill_producers",))
"""Producers reserve a key and are killed before they have published. For the same purpose."""
SHORT_OF_POSTGRES = Phase("short", 0.8, 1.0, 2.0, 2.0, only=(
    "pause_server", "kill_server", "end_backends", "deafen", "lock_rows", "cancel_queries",
    *GENTLE,
))  # fmt: skip
OF_REDIS = ("memory", "others", "readers")
"""Phases for which other stores have nothing, or something of their own."""
PHASES_OF_POSTGRES = (
    *(phase for phase in PHASES if phase.name not in OF_REDIS),
    Phase("memory", 0.5, 0.0, 8.0, only=("kill_server", "crash_backend")),
    Phase("sessions", 0.5, 8.0, 8.0, only=(
        "stop_backend", "end_backends", "deafen", "cancel_queries", "lock_rows", "lock_tables",
    )),
)  # fmt: skip
"""Where there is one node: no others in its place."""
PHASES_OF_ETCD = (
    *(phase for phase in PHASES if phase.name not in OF_REDIS),
    Phase("members", 0.5, 0.0, 8.0, only=("pause_member", "kill_member")),
)
DIRECTED = (SHORT, PRODUCERS, READING, LATER, SLEEPERS, ENDINGS, BUSY, FLOOD, RECONNECTS, LEAVING)
PRACTICE = Phase("practice", 0.0, 0.0, 0.0)


def phases_of(store: str) -> tuple[Phase, ...]:
    """Return the phases that a store is put through."""
    return {"redis": PHASES, "etcd": PHASES_OF_ETCD}.get(store, PHASES_OF_POSTGRES)


class Nemesis:
    """Runs phases, one after the other.

    Args:
        stage: What suffers.
        feeder: As of `Acts`.
        seed: Of all choices.
        seconds: How long in all.
        phases: Which; shuffled anew each time all were.
        acts: The class of what is done; that of the stage's store, if none is named.
    """

    def __init__(
        self,
        stage: Stage,
        feeder: Feeder,
        seed: int,
        seconds: float,
        phases: tuple[Phase, ...] = PHASES,
        acts: Any = None,
    ) -> None:
        self.chronicle = Chronicle()
        self.phase = PRACTICE
        self._seconds = seconds
        self._random = random.Random(f"{seed}/nemesis")
        acts = acts or {"redis": Acts, "etcd": EtcdActs}.get(stage.store, PostgresActs)
        self._acts = acts(stage, feeder, self.chronicle, self._random)
        self._phases = self._shuffled(phases)
        # All are seen once, even in a short run.
        self._length = max(4.0, min(20.0, seconds / len(phases)))
        self._queue: list[tuple[float, int, Steps]] = []
        self._number = itertools.count()

    def _shuffled(self, phases: tuple[Phase, ...]) -> Iterator[Phase]:
        while True:
            yield from self._random.sample(phases, len(phases))

    def run(self, every: Callable[[], bool] | None = None) -> None:
        """Until the time is over and everything is healed.

        Args:
            every: Called often; True ends the run.
        """
        begin = time.monotonic()
        changes = begin
        for track in ("nodes", "network", "processes", "load"):
            self._later(0.0, self._track(track))
        try:
            while (at := time.monotonic()) < begin + self._seconds:
                if at >= changes:
                    self.phase = next(self._phases)
                    changes += self._length
                while self._queue and self._queue[0][0] <= at:
                    self._step(heapq.heappop(self._queue)[2])
                self._acts.revive()
                if every is not None and every():
                    break
                time.sleep(0.01)
        finally:
            while self._queue:
                heapq.heappop(self._queue)[2].close()

    def _later(self, seconds: float, steps: Steps) -> None:
        heapq.heappush(self._queue, (time.monotonic() + seconds, next(self._number), steps))

    def _step(self, steps: Steps) -> None:
        self._later(next(steps), steps)

    def _track(self, name: str) -> Steps:
        while True:
            rest = getattr(self.phase, name)
            if not rest:
                yield 0.1
                continue
            table = self._acts.TRACKS[name]
            named = {act: 1 for act in self.phase.only if act in table}
            acts, weights = zip(*(named or table).items(), strict=True)
            act = self._random.choices(acts, weights)[0]
            yield self._random.uniform(0.3, 1.0) * rest
            yield from self._acts.act(act)
