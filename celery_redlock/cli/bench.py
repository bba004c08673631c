"""`redlock bench`: how long acquiring and releasing take, on these very nodes."""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ..config.settings import read_settings
from ..locking.redlock import Redlock
from ..protocol.errors import NotAcquired, QuorumUnavailable
from ..protocol.values import quorum_of
from ..stores.redis.address import Address
from ..stores.redis.resp import Parser
from ..survey.snapshot import survey
from .context import NO_QUORUM, Site, on_site, table
from .formatting import counted, nodes_data

__all__ = ["Figures", "command"]

TTL = 10.0
"""Seconds after which the key of a bench that was killed is gone."""


@dataclass
class Figures:
    """Times that were measured, in seconds."""

    taken: list[float] = field(default_factory=list)

    def at(self, share: float) -> float | None:
        """The time that this share of all took at most; None without any."""
        ordered = sorted(self.taken)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    def data(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"count": len(self.taken), "p50": self.at(0.5), "p99": self.at(0.99)}

    def cells(self) -> tuple[str, ...]:
        """As a table takes it."""
        return str(len(self.taken)), _ms(self.at(0.5)), _ms(self.at(0.99))


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
    help="Threads that acquire and release at the same time, each a key of its own.",
)
@on_site
def command(site: Site, seconds: float, concurrency: int) -> int:
    """Acquire and release on the nodes, as fast as it goes, and say how long each took.

    It loads them: not while they are busy. Its keys stand below a prefix of their own, nobody
    else's, and are gone afterwards. Exit code 3 if too few nodes answered.
    """
    redlock = _own(site)
    try:
        seen = survey(redlock)
        alone = [_Bare([address], redlock.prefix) for address in redlock.client.addresses]
        bare = _Bare(redlock.client.addresses, redlock.prefix)
        acquired, released, failed = Figures(), Figures(), [0]
        nodes = [one.measure(seconds * 0.1 / len(alone)) for one in alone]
        trip = bare.measure(seconds * 0.1)
        redlock.connect()
        threads = [
            threading.Thread(
                target=_work,
                args=(redlock, str(number), seconds * 0.7, acquired, released, failed),
                daemon=True,
            )
            for number in range(concurrency)
        ]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - begun
        trip.taken += bare.measure(seconds * 0.1).taken
        left = len(survey(redlock).entries)
    finally:
        redlock.close()
    pair = (acquired.at(0.5) or 0.0) + (released.at(0.5) or 0.0)
    base = trip.at(0.5)
    data = {
        "seconds": seconds,
        "concurrency": concurrency,
        "nodes": [
            {**look, "round_trip": figures.data()}
            for look, figures in zip(nodes_data(seen.looks), nodes, strict=True)
        ],
        "quorum_round_trip": trip.data(),
        "acquire": acquired.data(),
        "release": released.data(),
        "failed": failed[0],
        "per_second": len(released.taken) / taken,
        "ratio": pair / (2 * base) if base and pair else None,
        "left": left,
    }
    rows = [
        *((f"round trip to {n}", *f.cells()) for n, f in zip(redlock.nodes, nodes, strict=True)),
        ("round trip to a quorum", *trip.cells()),
        ("acquire", *acquired.cells()),
        ("release", *released.cells()),
    ]
    site.say(data, lambda: _text(rows, data))
    return 0 if acquired.taken else NO_QUORUM


def _own(site: Site) -> Redlock:
    """A lock over the same nodes, with keys that nobody else has."""
    known = site.redlock
    given = site.nodes if site.nodes else read_settings(site.app).nodes
    prefix = f"{known.prefix}bench-{secrets.token_hex(8)}:"
    return Redlock(
        given, ttl=TTL, prefix=prefix, node_timeout=known.node_timeout, restart_guard="off"
    )


def _work(
    redlock: Redlock,
    name: str,
    seconds: float,
    acquired: Figures,
    released: Figures,
    failed: list[int],
) -> None:
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        try:
            lease = redlock.acquire(name)
        except NotAcquired:
            failed[0] += 1
            time.sleep(0.01)  # nodes that are away must not be hammered
            continue
        granted = time.perf_counter()
        redlock.release(lease)
        released.taken.append(time.perf_counter() - granted)
        acquired.taken.append(granted - begun)


class _Trips(Parser):
    """Reads for as long as is measured: a handshake has an end."""

    longest = math.inf


class _Bare:
    """Asks nodes the cheapest question there is, all at once, until a quorum has answered."""

    def __init__(self, addresses: Sequence[Address], key: str) -> None:
        self._addresses, self._key = addresses, key
        self._quorum = quorum_of(len(addresses))

    def measure(self, seconds: float) -> Figures:
        """Round trips for some seconds, one after the other; none if there is no quorum."""
        figures = Figures()
        connections = []
        try:
            for address in self._addresses:
                connection = address.connection(parser_class=_Trips)
                with contextlib.suppress(Exception):
                    connection.connect()
                    connections.append(connection)
            if len(connections) < self._quorum:
                return figures
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                figures.taken.append(self._trip(connections))
        except Exception as error:
            raise QuorumUnavailable(f"a node went away: {type(error).__name__}") from None
        finally:
            for connection in connections:
                connection.disconnect()
        return figures

    def _trip(self, connections: Sequence[Any]) -> float:
        waiting = {connection._sock.fileno(): connection for connection in connections}
        answered, taken = 0, 0.0
        begun = time.perf_counter()
        for connection in connections:
            connection.send_command("PTTL", self._key)
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 1.0)
            if not ready:
                raise TimeoutError
            for fd in ready:
                waiting.pop(fd).read_response()
                answered += 1
            if answered >= self._quorum and not taken:
                taken = time.perf_counter() - begun
        return taken


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f} ms"


def _text(rows: Sequence[Sequence[object]], data: dict[str, Any]) -> str:
    ratio = "-" if data["ratio"] is None else f"{data['ratio']:.1f}"
    said = [
        table(["", "count", "p50", "p99"], rows),
        f"{data['per_second']:.0f} acquired and released per second,"
        f" by {counted(data['concurrency'], 'thread')}",
        f"acquire and release take {ratio} x a bare round trip to a quorum each, on average",
    ]
    if data["failed"]:
        said.append(f"{data['failed']} were not acquired")
    if data["left"]:
        said.append(f"{counted(data['left'], 'key')} left over, for {TTL:g} s at most")
    return "\n".join(said)
