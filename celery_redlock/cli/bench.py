"""`redlock bench`: measure acquire and release on the configured nodes."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import click

from ..config.settings import read_settings
from ..locking.redlock import Redlock
from ..protocol.errors import NotAcquired
from ..protocol.texts import counted, of_nodes
from ..protocol.values import quorum_of
from ..survey.snapshot import survey
from .context import NO_QUORUM, SECONDS, Site, on_site, table

__all__ = ["command"]

TTL_S = 10.0
"""Ttl of the bench's keys, seconds: how long they stay if the bench is killed."""
PAUSE_S = 0.01
"""Pause after a failed acquire, seconds, so that nodes that are down are not hammered."""


@click.command("bench")
@click.option(
    "--seconds",
    type=SECONDS,
    default=3.0,
    show_default=True,
    help="How long to measure.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1, max=256),
    default=1,
    show_default=True,
    help="Threads that acquire and release at the same time, each with its own key.",
)
@on_site
def command(site: Site, seconds: float, concurrency: int) -> int:
    """Measure how fast these nodes grant and release locks.

    The result is compared with a bare round trip: one small request to each node, the fastest of
    three. The round trip to a quorum is that of its slowest node.

    It loads the nodes: do not run it while they are busy. Its keys have a random prefix, and are
    deleted at the end. Exit code 3 if too few nodes answered.
    """
    known = site.redlock
    redlock = Redlock(
        site.nodes or read_settings(site.app).nodes,
        ttl=min(TTL_S, known.client.longest_ttl),
        prefix=f"{known.prefix}bench-{secrets.token_hex(8)}:",  # keys that nobody else has
        node_timeout=known.node_timeout,
        restart_guard="off",
    )
    try:
        looks = survey(redlock).looks
        redlock.connect()
        acquired, released, failed = _measure(redlock, seconds, concurrency)
        left = len(survey(redlock).entries)
    finally:
        redlock.close()
    acquiring, releasing = _figures(acquired), _figures(released)
    count, quorum = len(acquired), quorum_of(len(looks))
    trip = sorted(look.rtt for look in looks if look.reachable)[quorum - 1]
    data = {
        "seconds": seconds,
        "concurrency": concurrency,
        "nodes": [look.data() for look in looks],
        "quorum_round_trip": trip,
        "acquire": acquiring,
        "release": releasing,
        "failed": failed,
        "per_second": count / seconds,
        "ratio": (acquiring["p50"] + releasing["p50"]) / (2 * trip) if count else None,
        "left": left,
    }
    rows = [(f"round trip to {look.name}", "", _ms(look.data()["rtt"]), "") for look in looks]
    rows += [("round trip to a quorum", "", _ms(trip), "")]
    for name, each in (("acquire", acquiring), ("release", releasing)):
        rows.append((name, str(each["count"]), _ms(each["p50"]), _ms(each["p99"])))
    said = [
        table(("", "count", "p50", "p99"), rows),
        f"{data['per_second']:.0f} acquired and released per second,"
        f" by {counted(concurrency, 'thread')}",
    ]
    if count:
        said.append(
            f"an acquire or a release takes {data['ratio']:.1f} times as long as a bare round trip"
            f" to {of_nodes(quorum, len(looks))}, which takes {_ms(trip)}"
        )
    if failed:
        said.append(f"{failed} were not acquired")
    if left:
        said.append(f"{counted(left, 'key')} left over, for {TTL_S:g} s at most")
    site.say(data, "\n".join(said))
    return 0 if count else NO_QUORUM


def _measure(redlock: Redlock, seconds: float, count: int) -> tuple[list[float], list[float], int]:
    """Return the durations of all acquires and releases, and the number of failed acquires."""
    acquired: list[float] = []
    released: list[float] = []
    failed: list[str] = []
    until = time.perf_counter() + seconds

    def work(name: str) -> None:
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

    # Daemon threads, so that Ctrl-C ends the program.
    threads = [threading.Thread(target=work, args=(str(n),), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return acquired, released, len(failed)


def _figures(taken: list[float]) -> dict[str, Any]:
    ordered, count = sorted(taken), len(taken)
    p50, p99 = (ordered[int(share * count)] if taken else None for share in (0.5, 0.99))
    return {"count": count, "p50": p50, "p99": p99}


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f} ms"
