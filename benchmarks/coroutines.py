"""`AsyncRedlock` beside `Redlock`: one that acquires and releases, and a hundred on one key."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.stats import ms, paired_ratio, quantile, table
from celery_redlock import AsyncRedlock, Redlock

CROWD = 100
OPTIONS: Any = {"ttl": 10.0, "restart_guard": "off"}
WHO = {"threads": "Redlock, 100 threads", "coroutines": "AsyncRedlock, 100 coroutines"}


def measure(urls: Sequence[str], rounds: int, each: int = 200) -> dict[str, Any]:
    """Seconds: of each acquire and release, `each` a round; and until a crowd is through."""
    figures: dict[str, Any] = {who: {"pairs": [], "crowds": []} for who in WHO}

    async def both() -> None:
        redlock = Redlock(urls, **OPTIONS)
        async with AsyncRedlock(urls, **OPTIONS) as other:
            for number in range(-1, rounds):  # the first warms up
                turns = [("threads", _threads(redlock, each)), ("coroutines", _loop(other, each))]
                for who, turn in turns if number % 2 else turns[::-1]:
                    pairs, crowd = await turn
                    if number >= 0:
                        figures[who]["pairs"].append(pairs)
                        figures[who]["crowds"].append(crowd)
        redlock.close()

    asyncio.run(both())
    return figures


async def _loop(redlock: AsyncRedlock, each: int) -> tuple[list[float], float]:
    pairs = []
    for _ in range(each):
        begun = time.perf_counter()
        await redlock.release(await redlock.acquire("alone"))
        pairs.append(time.perf_counter() - begun)

    async def turn() -> None:
        async with redlock.lock("crowd", wait=60.0):
            pass

    begun = time.perf_counter()
    await asyncio.gather(*[turn() for _ in range(CROWD)])
    return pairs, time.perf_counter() - begun


async def _threads(redlock: Redlock, each: int) -> tuple[list[float], float]:
    """It blocks the loop, in which nothing else runs."""
    pairs = []
    for _ in range(each):
        begun = time.perf_counter()
        redlock.release(redlock.acquire("alone"))
        pairs.append(time.perf_counter() - begun)

    def turn() -> None:
        with redlock.lock("crowd", wait=60.0):
            pass

    threads = [threading.Thread(target=turn) for _ in range(CROWD)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pairs, time.perf_counter() - begun


def show(figures: dict[str, Any]) -> str:
    """As text."""
    head = ["", "acquire + release, p50 ms", "p99 ms", "x Redlock", "all through one key"]
    rows = []
    for who, label in WHO.items():
        pairs = figures[who]["pairs"]
        flat = [seconds for one in pairs for seconds in one]
        ratio = paired_ratio(pairs, figures["threads"]["pairs"])
        crowd = f"{median(figures[who]['crowds']):.2f} s"
        rows.append([label, ms(median(flat)), ms(quantile(flat, 0.99)), f"{ratio:.2f}", crowd])
    return table(head, rows)
