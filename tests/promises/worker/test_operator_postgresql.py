"""An operator's view of a real worker over PostgreSQL: the same as over one Redis node."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_redlock import Redlock
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.server import start_servers
from celery_redlock.testing.postgresql import LocalPostgres
from tests.promises.worker.reserving import declare
from tests.support.cluster import READY, Cluster
from tests.support.nodes import TOKEN
from tests.support.postgres_sites import new_database
from tests.support.wait import wait_until
from tests.support.worker import Worker

KINDS = ("redis", "postgresql")
LOOKS = [
    ("ls", "--wide", "--all"),
    ("ls", "--json", "--all"),
    *(("show", name) for name in ("k:held", "crowd:some", "k:reserved", "k:done", "k:nobody")),
    ("stats",),
    ("watch", "--count", "1"),
    ("exporter", "--once"),
    ("explain", "tests.promises.worker.tasks.until_executed", '["held"]'),
    ("explain", "tests.promises.worker.tasks.until_executed", '["reserved"]'),
    ("explain", "tests.promises.worker.tasks.until_executing", '["nobody"]'),
]
LONG = 1800.0
"""Seconds; longer than this module takes, on a machine that is busy."""
WAITING = {"k:held": 2, "crowd:some": 1}
"""Waiters of each key. A parked delivery that is being tried waits nowhere for that moment."""


class Place(NamedTuple):
    """A store, a worker over it, and an operator's app."""

    cluster: Cluster
    worker: Worker
    app: Celery
    tasks: dict[str, Any]

    def call(self, *arguments: str) -> str:
        """Return the output of a command, once the worker answers it."""

        def said() -> str:
            result = CliRunner().invoke(group, arguments, obj=Site(app=self.app))
            assert result.exit_code in (0, 1) and result.output, result.exception
            assert not TOKEN.search(result.output) and "SECRET" not in result.output
            return "" if " answered within" in result.output else result.output

        return str(wait_until(said, READY, f"the worker answers {arguments[0]}"))


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, database_server: LocalPostgres
) -> Iterator[dict[str, Place]]:
    """The same situation over each kind of store.

    `k:held` is held with a fencing token, and one waits parked and another in a block; of
    `crowd:some` both places are held and one waits; `k:reserved` is reserved and held; `k:done` is
    done; and of all this each has its name.
    """
    with contextlib.ExitStack() as stack:
        node, *brokers = stack.enter_context(start_servers(3))
        urls = {"redis": node.url, "postgresql": new_database(database_server)}
        found = {}
        for kind, broker in zip(KINDS, brokers, strict=True):
            path = tmp_path_factory.mktemp(kind)
            cluster = Cluster([node], broker, path, redlock_nodes=[urls[kind]])
            stack.callback(cluster.close)
            if kind == "postgresql":
                cluster.redlock.close()
                cluster.redlock = Redlock([urls[kind]], ttl=30.0)
            found[kind] = stack.enter_context(_situation(cluster))
        yield found


@contextlib.contextmanager
def _situation(cluster: Cluster) -> Iterator[Place]:
    tasks = declare(cluster.app, lambda *_arguments: None)
    app = Celery("tests.promises.worker.operator", broker=cluster.broker.url, set_as_current=False)
    app.conf.update(cluster.conf)
    declare(app, lambda *_arguments: None)
    with cluster.worker("-c", "6", "-n", "w@test") as worker:
        place = Place(cluster, worker, app, tasks)
        cluster.result(cluster.send("long", "done", 0.01))
        cluster.send("fenced", "held")
        cluster.entered("held")
        tasks["until_executed"].delay("reserved", seconds=LONG)
        cluster.entered("reserved")
        for _ in range(3):
            cluster.send("crowd", "some", LONG)
        cluster.send("fenced", "held")
        waiter = threading.Thread(target=_wait_in_a_block, args=[cluster], daemon=True)
        waiter.start()
        seen = partial(place.call, "ls", "--all")
        wait_until(lambda: _waits(place) == WAITING, READY, "all wait", seen=seen)
        yield place
        cluster.tell("held")
        waiter.join(READY)
        for one in (app, cluster.app):
            Redlock.from_app(one).close()


def _wait_in_a_block(cluster: Cluster) -> None:
    with contextlib.suppress(Exception), cluster.redlock.lock("k:held", wait=LONG):
        pass


def _waits(place: Place) -> dict[str, int]:
    return _waiting(json.loads(place.call("ls", "--json"))["entries"])


def _waiting(entries: Iterable[dict[str, Any]]) -> dict[str, int]:
    return {entry["resource"]: entry["waiting"] for entry in entries if entry["waiting"]}


def same(place: Place, said: str) -> list[str]:
    """Return the output without times, numbers, ids and names of nodes, which differ by place."""
    with contextlib.suppress(ValueError):  # JSON, of several lines
        said = json.dumps(json.loads(said), indent=2)
    for name in (*place.cluster.redlock.nodes, place.worker.hostname()):
        said = said.replace(name, "NAME")
    said = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{8}\b", "ID", said)
    said = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", said)
    said = re.sub(r"N min( N s)?", "N s", said)  # one may be a moment older than the other
    return [re.sub(r" +|-{3,}", " ", line) for line in said.splitlines()]


@pytest.mark.parametrize("arguments", LOOKS, ids=" ".join)
def test_commands_show_the_same_for_postgresql_as_for_redis(
    places: dict[str, Place], arguments: tuple[str, ...]
) -> None:
    def said() -> list[list[str]]:
        # Where the mark of a task stands among them hangs on the task's id, which is drawn.
        return [sorted(same(places[kind], places[kind].call(*arguments))) for kind in KINDS]

    wait_until(lambda: operator.eq(*said()), READY, "both say the same", every=0.5, seen=said)


def told(place: Place) -> dict[str, Any]:
    """Return the worker's answer to `celery inspect redlock`."""
    asked = place.app.control.inspect(timeout=5.0, limit=1)

    def said() -> dict[str, Any] | None:
        (answer,) = (asked._request("redlock") or {"": {"waits": ()}}).values()
        return answer if len(answer["waits"]) == len(WAITING) else None

    return wait_until(said, READY, "the worker says what waits") or {}


def test_inspect_shows_the_same_for_postgresql_and_names_the_database(
    places: dict[str, Place],
) -> None:
    over_redis, over_postgresql = (told(places[kind]) for kind in KINDS)
    (url,) = places["postgresql"].cluster.conf["redlock_nodes"]
    (name,) = over_postgresql["nodes"]
    assert url.endswith(f"@{name}") and re.fullmatch(r"127\.0\.0\.1:\d+/d\d+", name)
    assert over_redis.keys() == over_postgresql.keys()
    assert over_redis["tasks"] == over_postgresql["tasks"]
    for kind in ("holds", "waits"):
        ours, theirs = (
            sorted((one["resource"], one["task"], *sorted(one)) for one in said[kind])
            for said in (over_redis, over_postgresql)
        )
        assert ours == theirs and ours
    # The settings of programs with another database are not the same.
    assert over_redis["settings_digest"] != over_postgresql["settings_digest"]


def test_lock_released_by_hand_goes_to_its_waiter(places: dict[str, Place]) -> None:
    place = places["postgresql"]
    holder = json.loads(place.call("ls", "--json", "--match", "crowd:*"))["entries"][0]
    said = place.call("release", "crowd:some", "--slot", str(holder["slot"]), "--force")
    assert re.match(r"crowd:some.*: freed on 1 node", said)
    wait_until(lambda: "crowd:some" not in _waits(place), READY, "the third has its place")
    said = place.call("release", "k:reserved", "--reservation", "--force")
    assert "freed on 1 node" in said and "reservation" not in place.call("show", "k:reserved")
