"""`redlock bench`: how long acquiring and releasing take, on these very nodes."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import click

from ..config.settings import read_settings
from ..locking.redlock import Redlock
from ..protocol.errors import NotAcquired
from ..protocol.values import quorum_of
from ..survey.reader import Reader, read_nodes
from ..survey.snapshot import survey
from .context import NO_QUORUM, Site, on_site, table
from .formatting import counted

__all__ = ["command"]

TTL_S = 10.0
"""After which the keys of a bench that was killed are gone."""
ROUND_TRIPS = 300
"""To each node, for their p99; a tenth of a second on a local network."""
TRIPS_TIMEOUT_S = 3.0
"""For one answer, and ten times as much for all: see `read_nodes`."""
PAUSE_S = 0.01
"""After a lock was not acquired: nodes that are away must not be hammered."""


@click.command("bench")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=3600.0),
    default=3.0,
    show_default=True,
    help="How long to measure.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1, max=256),
    default=1,
    show_default=True,
    help="Threads that acquire and release at the same time, each another key.",
)
@on_site
def command(site: Site, seconds: float, concurrency: int) -> int:
    """Acquire and release on the nodes as fast as possible, and say how long each took.

    It loads them: do not run it while they are busy. Its keys have a random prefix, and are gone
    afterwards. Exit code 3 if too few nodes answered.
    """
    redlock = _redlock(site)
    acquired: list[float] = []
    released: list[float] = []
    failed: list[str] = []

    def work(name: str) -> None:
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            try:
                lease = redlock.acquire(name)
            except NotAcquired:
                failed.append(name)
                time.sleep(PAUSE_S)
                continue
            granted = time.perf_counter()
            redlock.release(lease)
            released.append(time.perf_counter() - granted)
            acquired.append(granted - begun)

    try:
        looks = survey(redlock).looks
        trips = [_round_trips(redlock, index) for index in range(len(looks))]
        # A quorum has answered when as many as that have, if all are asked at once.
        last = quorum_of(len(looks)) - 1
        to_quorum = _figures(
            [sorted(each)[last] for each in zip(*filter(None, trips), strict=True) if each[last:]]
        )
        redlock.connect()
        threads = [
            threading.Thread(target=work, args=(str(number),), daemon=True)
            for number in range(concurrency)
        ]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - begun
        left = len(survey(redlock).entries)
    finally:
        redlock.close()
    acquiring, releasing = _figures(acquired), _figures(released)
    pair = (acquiring["p50"] or 0.0) + (releasing["p50"] or 0.0)
    data = {
        "seconds": seconds,
        "concurrency": concurrency,
        "nodes": [
            {**look.data(), "round_trip": _figures(to_it)}
            for look, to_it in zip(looks, trips, strict=True)
        ],
        "quorum_round_trip": to_quorum,
        "acquire": acquiring,
        "release": releasing,
        "failed": len(failed),
        "per_second": len(released) / elapsed,
        "ratio": pair / (2 * to_quorum["p50"]) if pair and to_quorum["p50"] else None,
        "left": left,
    }
    site.say(data, _text(data))
    return 0 if acquired else NO_QUORUM


def _redlock(site: Site) -> Redlock:
    """Return a lock over the same nodes, with keys that nobody else has."""
    known = site.redlock
    nodes = site.nodes if site.nodes else read_settings(site.app).nodes
    prefix = f"{known.prefix}bench-{secrets.token_hex(8)}:"
    return Redlock(
        nodes, ttl=TTL_S, prefix=prefix, node_timeout=known.node_timeout, restart_guard="off"
    )


def _round_trips(redlock: Redlock, index: int) -> list[float]:
    """Return the seconds that the cheapest question took at one node; none if it is away."""

    def query(reader: Reader) -> list[float]:
        taken = []
        for _ in range(ROUND_TRIPS):
            begun = time.perf_counter()
            reader.ask([("PTTL", redlock.prefix)])
            taken.append(time.perf_counter() - begun)
        return taken

    node = redlock.client.addresses[index]
    _looks, (taken,) = read_nodes([node], redlock.prefix, query, TRIPS_TIMEOUT_S)
    return taken or []


def _figures(taken: list[float]) -> dict[str, Any]:
    ordered, count = sorted(taken), len(taken)
    p50, p99 = (ordered[int(share * count)] if taken else None for share in (0.5, 0.99))
    return {"count": count, "p50": p50, "p99": p99}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f} ms"


def _text(data: dict[str, Any]) -> str:
    figures = {f"round trip to {node['name']}": node["round_trip"] for node in data["nodes"]}
    figures["round trip to a quorum"] = data["quorum_round_trip"]
    figures |= {name: data[name] for name in ("acquire", "release")}
    rows = [
        (name, each["count"], _ms(each["p50"]), _ms(each["p99"])) for name, each in figures.items()
    ]
    ratio = "-" if data["ratio"] is None else f"{data['ratio']:.1f}"
    said = [
        table(("", "count", "p50", "p99"), rows),
        f"{data['per_second']:.0f} acquired and released per second,"
        f" by {counted(data['concurrency'], 'thread')}",
        f"acquire and release take {ratio} x a bare round trip to a quorum each, on average",
    ]
    if data["failed"]:
        said.append(f"{data['failed']} were not acquired")
    if data["left"]:
        said.append(f"{counted(data['left'], 'key')} left over, for {TTL_S:g} s at most")
    return "\n".join(said)
