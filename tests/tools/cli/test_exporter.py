"""The exporter: each gauge moves for its cause, on real servers; nodes that are down are values."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from werkzeug.test import Client

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.cli import main
from celery_redlock.cli.exporter import guarded
from celery_redlock.config.options import GLOBAL
from celery_redlock.protocol.names import RESERVED_SUFFIX
from celery_redlock.protocol.values import Owner
from celery_redlock.server import start_servers
from celery_redlock.survey import exporter
from celery_redlock.survey.exporter import exposition, make_registry
from celery_redlock.survey.waiting import Parked
from tests.support.names import Log, Patch, Servers
from tests.support.nodes import TOKEN
from tests.support.wait import wait_until

LONG = 30.0
CHARGE = Owner("web-1", 42, "id-1", task="shop.charge")
REPORT = Owner("web-1", 43, "id-2", task="shop.report")

Nodes = list[redis.Redis]


@pytest.fixture
def redlock(servers: Servers) -> Iterator[Redlock]:
    redlock = Redlock([one.url for one in servers[:3]])
    redlock.connect(LONG)
    yield redlock
    redlock.close()


@pytest.fixture
def nodes(admins: list[redis.Redis]) -> Nodes:
    return admins[:3]


def shown(
    redlock: Redlock, parked: Callable[[], Parked] | None = Parked
) -> Callable[..., float | None]:
    """Return a function that reads a value of the current scrape."""
    registry = make_registry(redlock, cache=0, timeout=LONG, parked=parked)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(f"celery_redlock_{name}", labels)
        return found

    return value


def everywhere(nodes: Nodes, key: str) -> None:
    wait_until(lambda: all(node.exists(key) for node in nodes), LONG, f"{key} is on each node")


def test_exporter_counts_held_and_reserved_keys_and_the_oldest_hold(
    redlock: Redlock, nodes: Nodes
) -> None:
    for node in nodes[:2]:
        node.set(f"redlock:r{RESERVED_SUFFIX}", CHARGE.token("0" * 32, 1.0), px=60_000)
    see, charge = shown(redlock), {"task": "shop.charge"}
    assert (see("reserved", **charge), see("held", **charge)) == (1, None)
    with redlock.lock("r", owner=CHARGE), redlock.lock("q", owner=CHARGE), redlock.lock("p"):
        see = shown(redlock)
        assert (see("held", **charge), see("held", task="")) == (2, 1)
        oldest = see("oldest_hold_seconds", **charge)
        assert oldest is not None and 0 <= oldest < LONG


def test_exporter_counts_waiters_and_the_oldest_wait(redlock: Redlock) -> None:
    lease = redlock.acquire("r", owner=CHARGE)
    threads = [
        threading.Thread(target=redlock.acquire, args=("r",), kwargs={"wait": LONG, "ttl": 0.5})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    task = {"task": "shop.charge"}
    wait_until(lambda: shown(redlock)("waiting", **task) == 2, LONG, "two wait for its lock")
    see = shown(redlock)
    assert see("longest_line", **task) == 2
    assert (see("oldest_wait_seconds", **task) or 0) > 0
    redlock.release(lease)
    for thread in threads:
        thread.join()


def test_exporter_counts_parked_tasks_only_with_an_app(redlock: Redlock, nodes: Nodes) -> None:
    for node in nodes:
        node.zadd("redlock:r#line", {"worker:1": 1.0})
    waits = [{"resource": name, "waited": 9.0, "where": "parked"} for name in "rrrq"]
    told = Parked.of([{"waits": waits, "queued": ["r"]}])
    charge = {"task": "shop.charge"}
    with redlock.lock("r", owner=CHARGE):
        see = shown(redlock, parked=lambda: told)
        assert (see("waiting", **charge), see("longest_line", **charge)) == (3, 3)
        assert see("oldest_wait_seconds", task="") == 9
        assert see("waiting", task="") == 1  # none for a free key: it is about to be taken
        see = shown(redlock, parked=None)
        assert see("held", **charge) == 1
        for name in ("waiting", "longest_line", "oldest_wait_seconds"):
            assert see(name, **charge) is None


def test_exporter_counts_locks_by_number_of_nodes_and_split_ones(
    redlock: Redlock, nodes: Nodes
) -> None:
    redlock.acquire("r")
    everywhere(nodes, "redlock:r")
    assert shown(redlock)("locks_on_nodes", nodes="3") == 1
    nodes[0].delete("redlock:r")
    see = shown(redlock)
    assert [see("locks_on_nodes", nodes=str(n)) for n in (1, 2, 3)] == [0, 1, 0]
    assert see("split") == 0
    for number, node in enumerate(nodes):
        node.set("redlock:r", CHARGE.token(f"{number:032x}", 1.0), px=60_000)
    see = shown(redlock)
    assert (see("split"), see("held", task="shop.charge")) == (1, None)


def test_exporter_counts_keys_without_a_ttl_as_leaks_of_their_node(
    redlock: Redlock, nodes: Nodes
) -> None:
    redlock.acquire("r", owner=CHARGE)
    everywhere(nodes, "redlock:r")
    nodes[1].persist("redlock:r")
    nodes[1].set("redlock:backup", "by hand")
    see = shown(redlock)
    assert [see("leaked_keys", node=node) for node in redlock.nodes] == [0, 2, 0]
    assert see("foreign_keys") == 1


def test_exporter_shows_a_node_that_is_down_as_a_value(redlock: Redlock, servers: Servers) -> None:
    redlock.acquire("r")
    servers[0].kill()
    see = shown(redlock)
    down, up, other = redlock.nodes
    assert (see("node_up", node=down), see("node_up", node=up)) == (0, 1)
    assert see("node_ping_seconds", node=down) is None
    assert see("leaked_keys", node=down) is None
    assert 0 < (see("node_ping_seconds", node=other) or 0) < LONG
    assert (see("nodes"), see("quorum_up"), see("survey_errors_total")) == (3, 1, 0)
    assert see("held", task="") == 1


def test_exporter_without_a_quorum_still_shows_each_node(
    redlock: Redlock, servers: Servers
) -> None:
    redlock.acquire("r")
    for server in servers[:2]:
        server.kill()
    registry = make_registry(redlock, cache=LONG, timeout=LONG)
    text = exposition(registry)
    assert "celery_redlock_quorum_up 0.0" in text
    up = dict(re.findall(r'celery_redlock_node_up{node="([^"]+)"} (\d)', text))
    assert up == dict(zip(redlock.nodes, "001", strict=True))
    assert "celery_redlock_held" not in text and "leaked" not in text
    assert "celery_redlock_survey_errors_total 1.0" in text


def test_exporter_counts_a_bug_as_a_survey_error_and_answers(
    redlock: Redlock, monkeypatch: Patch, caplog: Log
) -> None:
    def broken(*_args: Any, **_options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(exporter, "survey", broken)
    text = exposition(make_registry(redlock))
    assert "celery_redlock_survey_errors_total 1.0" in text
    assert "the survey of the nodes failed" in caplog.text


def test_exporter_serves_many_scrapes_from_one_look(redlock: Redlock, monkeypatch: Patch) -> None:
    looks: list[float] = []
    survey = exporter.survey

    def counted(*args: Any, **options: Any) -> Any:
        looks.append(1)
        return survey(*args, **options)

    monkeypatch.setattr(exporter, "survey", counted)
    registry = make_registry(redlock, cache=1e9)
    threads = [threading.Thread(target=exposition, args=(registry,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) == 1
    age = registry.get_sample_value("celery_redlock_survey_age_seconds")
    assert age is not None and age > 0


def test_exporter_caches_a_slow_look_for_longer(redlock: Redlock, monkeypatch: Patch) -> None:
    now, looks = [0.0], []

    def slow(*_args: Any, **_options: Any) -> Any:
        looks.append(now[0])
        now[0] += 10.0
        raise KeyError

    monkeypatch.setattr(exporter, "survey", slow)
    monkeypatch.setattr(exporter.time, "monotonic", lambda: now[0])
    nodes = exporter.Nodes(redlock, cache=5.0)
    for now[0] in (0.0, 50.0, 99.0, 101.0):
        list(nodes.collect())
    assert looks == [0.0, 101.0]


def test_exporter_shows_no_token_and_no_key(redlock: Redlock) -> None:
    with redlock.lock("secret-key", owner=CHARGE) as lease:
        text = exposition(make_registry(redlock))
        assert lease.token not in text and not TOKEN.search(text)
        assert "secret-key" not in text and "id-1" not in text


def test_exporter_escapes_and_bounds_names_of_tasks(redlock: Redlock, monkeypatch: Patch) -> None:
    monkeypatch.setattr(exporter, "MAX_TASKS", 1)
    evil = dataclasses.replace(CHARGE, task="e\x1b[31m" + "x" * 300)
    label = exporter._labels([CHARGE, CHARGE, REPORT])
    assert [label(owner) for owner in (CHARGE, REPORT, evil, None)] == [
        *("shop.charge", "(others)", "(others)", "")
    ]
    known = exporter._labels([evil])(evil)
    assert known.startswith(r"e\x1b[31mxx") and len(known) == 200


def nodes_of(servers: Servers) -> list[str]:
    return ["--nodes", ",".join(server.url for server in servers[:3])]


def test_exporter_once_prints_metrics_and_json_is_for_programs(
    redlock: Redlock, servers: Servers
) -> None:
    with redlock.lock("r", owner=CHARGE):
        result = CliRunner().invoke(main, [*nodes_of(servers), "exporter", "--once"])
    assert result.exit_code == 0
    families = {family.name for family in text_string_to_metric_families(result.output)}
    assert {"celery_redlock_held", "celery_redlock_node_up"} <= families
    for server in servers[:3]:
        server.kill()
    result = CliRunner().invoke(main, [*nodes_of(servers), "exporter", "--json"])
    assert result.exit_code == 0  # that no quorum answers is what it was to tell
    told = json.loads(result.output)
    assert {"name": "celery_redlock_quorum_up", "labels": {}, "value": 0.0} in told


def test_exporter_without_an_app_takes_the_address_of_the_runbook(servers: Servers) -> None:
    def run(address: str) -> Any:
        env = {"REDLOCK_DOCS": address}
        return CliRunner().invoke(main, [*nodes_of(servers), "exporter", "--once"], env=env)

    shown = run("https://docs.example.org/{page}.html").stdout
    assert 'celery_redlock_runbook{url="https://docs.example.org/runbook.html"} 1.0' in shown
    result = run("https://docs.example.org/")
    assert result.exit_code == 2 and "--docs must be an address with {page}" in result.output


@pytest.mark.defaults
def test_exporter_shows_the_seconds_until_a_quorum_votes() -> None:
    with start_servers(3) as fresh:
        command = [*nodes_of(fresh), "exporter", "--json"]
        votes = "celery_redlock_quorum_votes_in_seconds"
        told = json.loads(CliRunner().invoke(main, command).output)
        (left,) = [one["value"] for one in told if one["name"] == votes]
        assert 20 < left <= GLOBAL["ttl"].default + 2
    with start_servers(1) as one:  # its vote is not waited for, by default
        told = json.loads(CliRunner().invoke(main, [*nodes_of(one), "exporter", "--json"]).output)
        assert {"name": votes, "labels": {}, "value": 0.0} in told


def test_exporter_without_prometheus_client_says_what_to_install(
    redlock: Redlock, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"celery-redlock\[prometheus\]"):
        make_registry(redlock)


def test_exporter_serves_until_it_is_ended(servers: Servers, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with open(said, "wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", "from celery_redlock.cli import main; main()"),
                *(*nodes_of(servers), "exporter", "--listen", "127.0.0.1:0"),
            ],
            stderr=output,
        )
    try:
        address = wait_until(
            lambda: re.search(r"http://127\.0\.0\.1:\d+/metrics", said.read_text()),
            *(LONG, "it listens"),
        )
        assert address is not None
        with urllib.request.urlopen(address[0], timeout=LONG) as answer:
            assert "celery_redlock_quorum_up 1.0" in answer.read().decode()
            assert answer.headers["Server"] is None, "waitress, as the page, and not wsgiref"
        rebound = urllib.request.Request(address[0], headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(rebound, timeout=LONG)
        taken = address[0].split("/")[2]
        result = CliRunner().invoke(main, [*nodes_of(servers), "exporter", "--listen", taken])
        said_so = f"cannot serve on {taken.replace(':', ' port ')}: Address already in use"
        assert result.exit_code == 2 and said_so in result.output
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        *(("127.0.0.1:9467", 200), ("10.1.2.3", 200), ("[::1]:9467", 200), ("localhost", 200)),
        *(("redlock-exporter:9467", 200), ("prom.example.org", 200), ("a.shop.svc:9467", 200)),
        *(("evil.example", 400), ("127.0.0.1.nip.io", 400), ("prom.example.org.evil", 400)),
        *(("", 400), ("localhost:80@evil.example", 400)),
    ],
)
def test_exporter_answers_only_host_names_that_no_web_site_can_have(host: str, code: int) -> None:
    """A web site may point its name at the exporter, and must not be able to read the answer."""

    def app(_environ: Any, start: Any) -> Any:
        start("200 OK", [])
        return [b"celery_redlock_held 1.0"]

    answer = Client(guarded(app, ["Prom.example.org", ".svc"])).get("/", headers={"Host": host})
    assert answer.status_code == code and ("held" in answer.text) == (code == 200)
