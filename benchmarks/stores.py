"""The places that a lock can be kept in, beside each other, each beside its own bare limit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psycopg

from benchmarks.bare_postgresql import TABLE
from benchmarks.contestants import BARE, FENCED, OURS, Contestant, Entry
from benchmarks.stats import ms, paired_ratio, table
from benchmarks.waiting import hand_over
from celery_redlock import stores
from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.server import start_servers
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support.zookeeper import LocalZooKeeper

ROUND = 0.05  # seconds
WARM_UP = 50
EXTENDED = 1000
FIRST = "one Redis"
DURABLE = {"fsync": "on", "full_page_writes": "on"}
"""As a server that must not forget is run: each commit is on disk before it is said."""
SYNCED = ("--appendonly", "yes", "--appendfsync", "always")
TITLES = {
    "pair": "stores: acquire + release",
    "handover": "handed on to one who waits",
    "extension": f"{EXTENDED} leases extended once",
}
BARE_STORE = Entry("bare", "bare limit: one statement, or transaction, each", "bare_store.py")


def measure(nodes: Sequence[str], rounds: int, handed: int) -> dict[str, Any]:
    """Return what each store takes, and what its bare limit does, in turns: one run, one machine.

    Args:
        nodes: URLs of five Redis servers without persistence.
        rounds: How often each acquires and releases for a moment, and extends its thousand.
        handed: How often the lock is handed to one waiter, by each.
    """
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        teams = []
        for store, urls in stack.enter_context(_stores(nodes)).items():
            bare = BARE if urls[0].startswith("redis") else BARE_STORE
            for entry in (bare, OURS, FENCED):
                team = [Contestant(entry, urls) for _ in range(1 if entry is FENCED else 2)]
                for one in team:
                    stack.callback(one.close)
                teams.append((store, entry.name, team))
        pairs = _pairs(teams, rounds)
        waiting = {(store, name): team for store, name, team in teams if len(team) > 1}
        handed_on = hand_over(waiting, handed)
        extended = _extended(waiting, rounds)
    for what, taken in (("pair", pairs), ("handover", handed_on), ("extension", extended)):
        for (store, name), values in taken.items():
            figures.setdefault(store, {}).setdefault(what, {})[name] = {
                "p50": median(median(one) for one in values),
                "to_bare": paired_ratio(values, taken[store, BARE.name]),
                "to_first": paired_ratio(values, taken[FIRST, name]),
            }
        for store in figures if what == "pair" else ():
            ratio = paired_ratio(taken[store, FENCED.name], taken[store, OURS.name])
            figures[store][what][FENCED.name]["to_unfenced"] = ratio
    return figures


def show(figures: dict[str, Any]) -> str:
    tables = []
    for what, title in TITLES.items():
        rows = []
        for store, of_all in figures.items():
            f = of_all[what]
            ours, bare = f["ours"], f["bare"]
            row = [store, ms(ours["p50"]), ms(bare["p50"]), f"{ours['to_bare']:.2f}"]
            row += [f"{ours['to_first']:.2f}"]
            rows.append(row + ([f"{f['fenced']['to_unfenced']:.2f}"] if "fenced" in f else []))
        head = [title, "p50 ms", "bare limit", "x bare", f"x {FIRST}", "fenced, x unfenced"]
        tables.append(table(head[: len(rows[0])], rows))
    return "\n\n".join(tables)


@contextlib.contextmanager
def _stores(nodes: Sequence[str]) -> Iterator[dict[str, Sequence[str]]]:
    """Start what does not run yet; the URLs of each store, by what to call it."""
    with contextlib.ExitStack() as stack:
        (one,) = stack.enter_context(start_servers(1))
        (synced,) = stack.enter_context(start_servers(1, config=SYNCED))
        found: dict[str, Sequence[str]] = {
            FIRST: [one.url],
            "one Redis, appendfsync always": [synced.url],
            "five Redis": nodes,
        }
        try:
            for store, settings in (
                ("PostgreSQL, fsync on", DURABLE),
                ("PostgreSQL, fsync off", {}),
            ):
                server = stack.enter_context(LocalPostgres(**settings))
                found[store] = [server.url]
                with psycopg.connect(server.url, autocommit=True) as connection:
                    schema = Path(stores.__file__).with_name("postgresql") / "schema.sql"
                    connection.execute(schema.read_text())
                    connection.execute(TABLE)
        except ConfigurationError as why:
            print(f"skipped: PostgreSQL: {why}", flush=True)
        try:
            for store, members in (("etcd, one member", 1), ("etcd, three members", 3)):
                found[store] = [stack.enter_context(LocalEtcd(members)).url]
        except ConfigurationError as why:
            print(f"skipped: etcd: {why}", flush=True)
        try:
            if find_spec("kazoo") is None:
                raise ConfigurationError("its client kazoo is missing")
            for store, members in (("ZooKeeper, one server", 1), ("ZooKeeper, three servers", 3)):
                found[store] = [stack.enter_context(LocalZooKeeper(members, 20.0)).url]
        except ConfigurationError as why:
            print(f"skipped: ZooKeeper: {why}", flush=True)
        yield found


def _pairs(teams: Sequence[tuple[str, str, Sequence[Contestant]]], rounds: int) -> Any:
    order = Random(1)
    sizes, taken = {}, {}
    for store, name, team in teams:
        warm = team[0].ask(f"round {WARM_UP}")["seconds"]
        sizes[store, name], taken[store, name] = max(10, round(ROUND / median(warm))), []
    for _ in range(rounds):
        for store, name, team in order.sample(list(teams), len(teams)):
            taken[store, name].append(team[0].ask(f"round {sizes[store, name]}")["seconds"])
    return taken


def _extended(teams: dict[Any, Sequence[Contestant]], rounds: int) -> Any:
    order = Random(1)
    taken: dict[Any, list[list[float]]] = {key: [] for key in teams}
    for number in range(-1, rounds):  # the first acquires them
        for key in order.sample(list(teams), len(teams)):
            answer = teams[key][0].ask(f"extend {EXTENDED}")
            if number >= 0:
                taken[key].append(answer["seconds"])
    return taken
