"""Observers of nodes of which one answers oddly see the others' locks, and which node it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from werkzeug.test import Client

from celery_redlock import Redlock
from celery_redlock.cli import main
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from celery_redlock.survey.exporter import exposition, make_registry
from celery_redlock.survey.snapshot import KINDS, survey
from celery_redlock.web import make_app
from celery_redlock.worker.remote_control import settings_of, tasks_of
from tests.tools.cli.clinic import examined, shop
from tests.tools.cli.odd_node import ODD, OddNode, bent

SEEDS = 16
ODD_VALUES = [odd for odd in ODD if type(odd) is bytes and len(odd) <= 4096]
TOKEN = Owner("web-1", 4242, "0123-abcd", task="shop.charge").token("0" * 32, 1.7e9)
WHERE = "order:1"


@pytest.fixture
def nodes(servers: list[LocalServer]) -> Iterator[list[LocalServer | OddNode]]:
    """Three nodes that hold one of each kind; the last may answer oddly."""
    for server in servers[:3]:
        with redis.Redis(port=server.port) as client:
            for key in (WHERE, f"{WHERE}#reserved", f"{WHERE}#slot2", "order:2"):
                client.set(f"redlock:{key}", TOKEN, px=600_000)
            client.set(f"redlock:{WHERE}#fence", 17, px=600_000)
            client.zadd(f"redlock:{WHERE}#line", {"a:1": 1.7e15, "b:1": 1.7e15})
            client.rpush("redlock:foreign", "a job")
    with OddNode(servers[2].port) as odd:
        yield [*servers[:2], odd]


@pytest.fixture
def redlock(nodes: list[Any]) -> Iterator[Redlock]:
    made = Redlock([node.url for node in nodes], restart_guard="off")
    yield made
    made.close()


Nodes = list[Any]
See = Callable[[Nodes, Redlock], str]


def strict(text: str) -> Any:
    """Load JSON, and refuse NaN and Infinity, which are none."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def cli(*arguments: str) -> See:
    def see(nodes: Nodes, _redlock: Redlock) -> str:
        urls = ",".join(node.url for node in nodes)
        result = CliRunner().invoke(main, ["--nodes", urls, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), arguments
        assert result.exit_code in (0, 1)
        if "--json" in arguments:
            strict(result.stdout)
        return result.output

    return see


def explain(nodes: Nodes, _redlock: Redlock, timeout: float = 0.3) -> str:
    """Run `explain`, which waits all of its timeout for workers, because there are none."""
    app = shop([node.url for node in nodes], redlock_restart_guard="off")
    given = ["explain", "shop.charge", "[1]", "--timeout", f"{timeout}"]
    result = CliRunner().invoke(group, given, obj=Site(app=app))
    Redlock.from_app(app).close()
    assert result.exit_code == 0, result.output
    return result.output


def exported(_nodes: Nodes, redlock: Redlock) -> str:
    text = exposition(make_registry(redlock, cache=0))
    said = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert said["celery_redlock_survey_errors_total",] == 0
    assert said["celery_redlock_held", "shop.charge"] >= 3
    assert not any(math.isnan(value) for value in said.values())
    return WHERE + text


def page(_nodes: Nodes, redlock: Redlock) -> str:
    made = make_app(redlock=redlock, idle=None)
    try:
        client = Client(made)
        said = ""
        for path in ("/", f"/lock?resource={WHERE}", "/nodes"):
            for accept in ("text/html", "application/json"):
                answer = client.get(path, headers={"Accept": accept})
                assert answer.status_code == 200, (path, answer.text)
                if accept == "application/json":
                    strict(answer.text)
                said += answer.text
        assert "could not be asked" not in said
        return said
    finally:
        made.close()


SEE_IT: dict[str, tuple[See, int]] = {
    "ls": (cli("ls", "--all"), SEEDS),
    "ls for programs": (cli("ls", "--all", "--json"), SEEDS),
    "show": (cli("show", WHERE), SEEDS),
    "stats": (cli("stats"), SEEDS),
    "exporter": (exported, SEEDS),
    "doctor": (cli("doctor"), SEEDS // 2),
    "page": (page, SEEDS // 5),
    "explain": (explain, SEEDS // 8),
}


@pytest.mark.parametrize("name", SEE_IT)
def test_look_shows_all_other_nodes_whatever_one_node_answers(
    nodes: Nodes, redlock: Redlock, name: str
) -> None:
    see, seeds = SEE_IT[name]
    odd: OddNode = nodes[-1]
    expected = {"stats": "shop.charge", "doctor": "127.0.0.1:"}.get(name, WHERE)
    for seed in range(seeds):
        rng = Random(f"{name} {seed}")
        left = [rng.randrange(8)]

        def once(words: list[bytes], reply: Any, rng: Random = rng, left: Any = left) -> Any:
            left[0] -= 1
            return bent(reply, rng) if left[0] < 0 else reply

        odd.odd = once
        said = see(nodes, redlock)
        assert expected in said, (seed, said)
        assert "\x1b" not in said, seed


@pytest.mark.parametrize("name", SEE_IT)
def test_list_in_the_place_of_a_value_ends_no_look(
    nodes: Nodes, redlock: Redlock, name: str
) -> None:
    nodes[-1].odd = lambda words, reply: [b"x"] if words[0] == b"GETRANGE" else reply
    see = partial(explain, timeout=5.0) if name == "explain" else SEE_IT[name][0]
    said = see(nodes, redlock)
    if name != "doctor":  # which asks every node twice, and shows no entries
        assert "answered GETRANGE with a malformed reply" in said or name == "exporter"
        assert f"127.0.0.1:{nodes[-1].port}" in said
    if name == "exporter":
        assert f'node_up{{node="127.0.0.1:{nodes[-1].port}"}} 0.0' in said


@pytest.mark.parametrize(("place", "fits"), [(b"GETRANGE", ODD_VALUES), (b"PTTL", (0, 1))])
def test_malformed_value_makes_its_node_unreachable_for_a_look(
    nodes: Nodes, redlock: Redlock, place: bytes, fits: Any
) -> None:
    for odd in ODD:

        def answer(words: list[bytes], reply: Any, odd: Any = odd) -> Any:
            return odd if words[0] == place else reply

        nodes[-1].odd = answer
        found = survey(redlock, kinds=KINDS)
        assert [look.reachable for look in found.looks] == [True, True, odd in fits], odd
        entries = {(e.resource, e.kind, e.slot): e for e in found.entries}
        assert len(entries) == 7
        owner = entries[WHERE, "lock", 1].owner
        assert owner is not None and owner.task == "shop.charge", odd


@pytest.mark.parametrize("part", ["settings", "tasks", "nodes", "error", "waits"])
def test_worker_that_answers_oddly_ends_no_look_at_the_others(
    servers: list[LocalServer], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Any program that reaches the broker can answer in place of a worker."""
    app = shop([server.url for server in servers[:3]])
    good = {"settings": settings_of(app), "tasks": tasks_of(app), "waits": []}
    for odd in (None, 7, [], [7, "x", None], {"x": []}, "x", [["shop.charge"]], ["shop.charge"]):
        bad = {**good, part: odd}
        if part == "nodes":
            bad = {**good, "settings": {**good["settings"], "nodes": odd}}
        replies = {"bad@h": bad, "other@h": {**good, "settings": {**good["settings"], "ttl": 99}}}
        monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_, r=replies: (r, ""))
        _code, report = examined(Site(app=app))
        said = [one["what"] for one in report["findings"] if one["where"] == "other@h"]
        assert any("redlock_ttl is 99 there" in what for what in said), (odd, report["findings"])
        given = ["show", WHERE, "--timeout", "0.5"]
        shown = CliRunner().invoke(group, given, obj=Site(app=app))
        assert shown.exit_code == 1 and "nobody holds it" in shown.output, odd
