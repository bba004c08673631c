"""`make endings`: plays every ending on real processes, and writes what was measured into the docs.

python -m tests.promises.worker.table [--pool NAME ...] [--only WORDS] [--strains] [--store NAME]

With `--pool` or `--only` the page is left alone. Over another store than Redis only the endings are
played, of prefork, into a table of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import billiard
import celery

from celery_redlock.server import LocalServer
from tests.promises.worker.ending import Ending, Row, play
from tests.promises.worker.holding import SETUPS, SOFT, Held, Setup, bear, strained_by
from tests.promises.worker.scenarios import ENDINGS, POOLS, played_on
from tests.support import stores
from tests.support.cluster import Cluster
from tests.support.etcd_monitor import EtcdMonitor
from tests.support.monitor import Monitor
from tests.support.nodes import with_acl_user
from tests.support.postgres_monitor import LOGGED, PostgresMonitor
from tests.support.worker import Worker
from tests.support.worker import pool as param

PAGE = Path(__file__).parents[3] / "docs" / "endings.md"
INSTALLED = [pool for pool in POOLS if not any(mark.args[0] for mark in param(pool).marks)]
CHILDREN = "3"
MONITORS: dict[str, type[Monitor]] = {
    "redis": Monitor,
    "postgresql": PostgresMonitor,
    "etcd": EtcdMonitor,
}
OPTIONS: dict[str, dict[str, Any]] = {"redis": {"config": with_acl_user()}, "postgresql": LOGGED}
NODES = {
    "redis": "five nodes",
    "postgresql": "one PostgreSQL database",
    "etcd": "an etcd cluster of one member",
}
ABREAST = 3
"""Workers that are strained at once: their bodies mostly wait."""


class Shared:
    """A worker that many endings are played on, as long as all goes well."""

    def __init__(self, cluster: Cluster, pool: str, stack: contextlib.ExitStack) -> None:
        self._cluster = cluster
        self._pool = pool
        self._stack = stack
        self._worker: Worker | None = None

    def get(self, ending: Ending) -> Worker | None:
        """The worker to play it on; None, and it is stopped, if the ending has its own."""
        if ending.worker is None:
            if self._worker is None:
                worker = self._cluster.worker("-P", self._pool, "-c", CHILDREN)
                self._worker = self._stack.enter_context(worker)
        elif self._worker is not None:
            self._worker.kill()
            self._worker = None
        return self._worker


@contextlib.contextmanager
def world(store: str = "redis") -> Iterator[tuple[Cluster, Monitor]]:
    """Servers, and the app that sends."""
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(stores.start(store, 5, **OPTIONS.get(store, {})))
        broker = stack.enter_context(LocalServer(config=with_acl_user()))
        path = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = Cluster(nodes, broker, Path(path))
        stack.callback(cluster.close)
        yield cluster, stack.enter_context(MONITORS[store](cluster))


def chosen(pool: str, only: str = "") -> list[Ending]:
    """Return the endings to play on a pool, those on a shared worker first."""
    endings = [*played_on(pool, own=False), *played_on(pool, own=True)]
    return [ending for ending in endings if only in ending.name]


def measure(pool: str, endings: list[Ending], store: str) -> dict[str, Row | None]:
    """Play the endings and return the measurements, None where a promise was broken."""
    rows: dict[str, Row | None] = {}
    while left := [ending for ending in endings if ending.name not in rows]:
        with world(store) as (cluster, monitor), contextlib.ExitStack() as stack:
            shared = Shared(cluster, pool, stack)
            for ending in left:
                begin = time.monotonic()
                key = f"{pool}-{len(rows)}"
                try:
                    worker = shared.get(ending)
                    row = rows[ending.name] = play(ending, cluster, monitor, pool, worker, key)
                    took = time.monotonic() - begin
                    print(f"{pool:8} {ending.name:60} {line(row)}   [{took:.1f} s]", flush=True)
                except Exception:
                    rows[ending.name] = None
                    print(f"{pool:8} {ending.name:60} FAILED", flush=True)
                    traceback.print_exc()
                    for output in cluster.path.glob("worker-*.log"):
                        print(output.read_text(errors="replace")[-2000:])
                    break  # what it left must not disturb the others
    return rows


def strain(cluster: Cluster, monitor: Monitor, setup: Setup) -> dict[str, Held | None]:
    """Return the fate of the lock of one body after another, on one worker."""
    found: dict[str, Held | None] = {}
    queue = f"held{SETUPS.index(setup)}"
    with cluster.worker("-P", setup.pool, "-c", "2", queue=queue, **SOFT, **setup.conf) as worker:
        for number, strain in enumerate(strained_by()):
            try:
                key = f"{queue}-{number}"
                seen = found[strain.name] = bear(strain, cluster, monitor, worker, key)
                ok = "" if seen.held == (strain.name not in setup.loses) else "   NOT AS IT MUST BE"
                print(f"{setup.name}: {strain.name}: {cell(seen)}{ok}", flush=True)
                if ok:
                    found[strain.name] = None
            except Exception:
                found[strain.name] = None
                print(f"{setup.name}: {strain.name}: FAILED", flush=True)
                traceback.print_exc()
    return found


def cell(seen: Held) -> str:
    if seen.held:
        return f"held, by the {seen.kept_by}"
    return f"lost, noticed by the {seen.noticed_by or 'nobody'}"


def strains_table(measured: dict[str, dict[str, Held | None]]) -> str:
    names = [strain.name for strain in strained_by()]
    lines = [f"| pool | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for setup, found in measured.items():
        cells = [cell(seen) if seen else "" for seen in map(found.get, names)]
        lines.append(f"| {setup} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    freed = "" if row.freed is None else f"{max(row.freed, 0.001):.3f} s"
    return f"{freed} | {row.by} | {row.overlaps} | {row.message}"


def table(measured: dict[str, dict[str, Row | None]], store: str) -> str:
    """All that was measured, as Markdown."""
    lines = [
        f"Celery {celery.__version__}, billiard {billiard.__version__},"
        f" Python {sys.version.split()[0]}, {sys.platform}; {NODES[store]}.",
        "",
        "| ending | pool | free after | by whom | overlaps | message |",
        "|---|---|---|---|---|---|",
    ]
    for ending in ENDINGS:
        for pool, rows in measured.items():
            row = rows.get(ending.name)
            if row is not None:
                lines.append(f"| {ending.name} | {pool} | {line(row)} |")
    return "\n".join(lines) + "\n"


def render(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name."""
    begin, end = f"<!-- {name}: written by make endings -->\n", f"<!-- {name}: end -->\n"
    head, found, rest = page.partition(begin)
    assert found, f"no {begin!r} in {PAGE.name}"
    return f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", action="append", choices=POOLS)
    parser.add_argument("--only", default="", help="only endings whose name has these words")
    parser.add_argument("--store", default="redis", choices=MONITORS)
    parser.add_argument("--strains", action="store_true", help="only what a lock outlives")
    arguments = parser.parse_args()
    begin = time.monotonic()
    part = arguments.pool or arguments.only
    measured: dict[str, dict[str, Row | None]] = {}
    if not arguments.strains:
        pools = INSTALLED if arguments.store == "redis" else ["prefork"]
        for pool in arguments.pool or pools:
            measured[pool] = measure(pool, chosen(pool, arguments.only), arguments.store)
    held: dict[str, dict[str, Held | None]] = {}
    if not part and arguments.store == "redis":
        with world() as (cluster, monitor), ThreadPoolExecutor(ABREAST) as threads:
            setups = [setup for setup in SETUPS if setup.pool in INSTALLED]
            found = threads.map(partial(strain, cluster, monitor), setups)
            held = {setup.name: cells for setup, cells in zip(setups, found, strict=True)}
    parts: list[Mapping[str, object]] = [*measured.values(), *held.values()]
    rows = [row for one in parts for row in one.values()]
    failed = rows.count(None)
    print(f"{len(rows)} played in {time.monotonic() - begin:.0f} s, {failed} failed")
    if not (part or failed):
        page = PAGE.read_text(encoding="utf-8")
        if measured:
            name = "endings" if arguments.store == "redis" else arguments.store
            page = render(page, name, table(measured, arguments.store))
        if held:
            page = render(page, "strains", strains_table(held))
        PAGE.write_text(page, encoding="utf-8")
        print(f"written into {PAGE.relative_to(PAGE.parents[1])}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
