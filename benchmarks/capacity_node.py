"""A node that is measured, its own figures, and the figures that are made of them.

Counts come from the node (INFO, CLIENT LIST). CPU is that of its main thread, which serves all
clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import redis

from benchmarks.processes import until

BARE = "bare pair: `SET NX PX`, `DEL`"
COUNTED = ("commands", "requests", "in", "out", "cpu")
LIMIT_S = 120.0
"""Seconds until any step must have happened."""
TOKEN = "x" * 58
"""The value of a bare pair's key, as long as the token of a lease."""


class Size(NamedTuple):
    """The amount that is measured."""

    rounds: int
    operations: int
    """Number in each round, of each kind."""
    many: int
    """Leases whose memory is measured."""
    connections: int
    leases: int
    processes: int
    """Processes that share the connections and leases of the load."""
    ttl: float
    window: float
    """Seconds for which the load is watched."""


class Node:
    """A node, and the figures that it reports."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.info()
        first = self.info()
        for _ in range(20):
            last = self.info()
        self._look = {name: (last[name] - first[name]) / 20 for name in COUNTED}

    def close(self) -> None:
        self.client.close()

    def info(self) -> dict[str, float]:
        """Return what the node has done so far, in `COUNTED` and by command; and its memory."""
        found: Any = self.client.info("everything")
        user = found.get("used_cpu_user_main_thread", found["used_cpu_user"])
        system = found.get("used_cpu_sys_main_thread", found["used_cpu_sys"])
        calls = {
            name.removeprefix("cmdstat_"): float(stats["calls"])
            for name, stats in found.items()
            if name.startswith("cmdstat_")
        }
        looks = calls.pop("info", 0.0)
        return {
            **calls,
            "looks": looks,
            "commands": sum(calls.values()),
            "requests": float(found["total_reads_processed"]),
            "in": float(found["total_net_input_bytes"]),
            "out": float(found["total_net_output_bytes"]),
            "cpu": user + system,
            "used_memory": float(found["used_memory"]),
            "connected_clients": float(found["connected_clients"]),
        }

    def since(self, before: Mapping[str, float], count: float = 1.0) -> dict[str, float]:
        """Return what the node did since an `info()`, for each of `count`, without our looks."""
        after = self.info()
        looks = after["looks"] - before["looks"]
        return {
            name: (after[name] - before.get(name, 0.0) - looks * self._look.get(name, 0.0)) / count
            for name in after
        }

    def memory(self) -> float:
        return self.info()["used_memory"]

    def memory_of(self, pattern: str) -> float:
        """Return the bytes of a key that fits, on average."""
        keys = list(self.client.scan_iter(match=pattern, count=1000))
        sizes: list[Any] = [self.client.memory_usage(key) for key in keys]
        return sum(sizes) / len(sizes)

    def settle(self) -> None:
        """Wait until nothing happens but what a worker does each second."""
        last = 0.0

        def quiet() -> bool:
            nonlocal last
            previous, last = last, self.info()["commands"]
            return last - previous < 100

        until(quiet, LIMIT_S, "the node is quiet", 0.3)

    def connections(self) -> int:
        return len(self.client.client_list()) - 1

    def pair(self, number: int = 0) -> None:
        """Take and free a key with the two simplest commands that lock."""
        key = f"redlock:bare:{number}"
        self.client.set(key, TOKEN, nx=True, px=30_000)
        self.client.delete(key)

    def pairs(self, count: int) -> dict[str, float]:
        """Return what a bare pair costs."""
        before = self.info()
        for number in range(count):
            self.pair(number)
        return self.since(before, count)


def summed(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each figure, and of the ratios to the bare pairs of the same round."""
    found: dict[str, dict[str, float]] = {}
    for name in rounds[0]:
        found[name] = {what: median(one[name][what] for one in rounds) for what in COUNTED}
        found[name]["x bare"] = median(one[name]["cpu"] / one[BARE]["cpu"] for one in rounds)
    return found
