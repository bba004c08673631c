"""State of the nodes: their answers, votes and findings of the doctor.

The banner without a quorum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from werkzeug.test import Client

from celery_redlock import Redlock, SingletonTask
from celery_redlock.doctor.probe import Answers, Probe
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.server import LocalServer, start_servers
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.survey.models import NodeLook
from celery_redlock.web import health, make_app, sources
from celery_redlock.web.health import Health, examine
from tests.support.nodes import lock_url, with_acl_user
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

PAGES = ("/", "/lock?resource=order:1", "/waiters", "/nodes", "/events")
FIRST = r'<main [^>]*>\s*<div id="alert">\s*<div class="banner stop" role="alert">'
"""The beginning of a page with an urgent message."""
DAY = 86_400.0


def probes(*facts: NodeInfo | None, **info: str) -> list[Probe]:
    """Return probes of nodes with these facts; None is a silent node."""
    addresses = parse_nodes([f"redis://n{number}" for number in range(len(facts))])
    return [
        Probe(
            number,
            address,
            NodeLook(f"n{number}:6379", one is not None, "" if one else "refused", 0.001),
            Answers() if one is None else Answers(peer=f"10.0.0.{number}", info=info, facts=one),
        )
        for number, (address, one) in enumerate(zip(addresses, facts, strict=True))
    ]


def votes_in(found: Health) -> list[float | None]:
    return [node["votes_in"] for node in found.nodes]


def up(seconds: float, run_id: str = "", **more: Any) -> NodeInfo:
    return NodeInfo(run_id=run_id, uptime=seconds, role="master", eviction="noeviction", **more)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that examines nodes with these facts, under a lock with a ttl of 30 s."""
    redlock = Redlock(["redis://n0", "redis://n1", "redis://n2"], ttl=30.0, restart_guard="uptime")

    def made(*facts: NodeInfo | None, **info: str) -> Health:
        monkeypatch.setattr(health, "observe", lambda *_given: probes(*facts, **info))
        return examine(redlock, None, 1.0)

    yield made
    redlock.close()


def test_quorum_with_a_vote_shows_no_banner(examined: Any) -> None:
    assert examined(up(DAY), up(DAY), up(DAY)).no_quorum is None
    assert examined(up(DAY), None, up(DAY)).no_quorum is None
    assert examined(up(DAY), up(1.0), up(DAY)).no_quorum is None


def test_missing_quorum_shows_how_many_answer_and_how_long_to_wait(
    examined: Any,
) -> None:
    assert examined(None, up(DAY), None).no_quorum == {
        **{"nodes": 3, "answering": 1, "voting": 1, "needed": 2, "wait": None}
    }
    just_started = examined(up(5.0), up(20.0), up(DAY))
    votes = votes_in(just_started)
    assert votes[2] == 0.0 and 25 < votes[0] < 27 and 10 < votes[1] < 12
    assert 10 < just_started.no_quorum["wait"] < 12, "until two have a vote"
    none = examined(up(5.0), up(20.0), None).no_quorum
    assert (none["answering"], none["voting"], none["needed"]) == (2, 0, 2)
    assert 25 < none["wait"] < 27, "the second vote counts"


def test_longest_ttl_of_the_tasks_decides_which_nodes_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tasks are imported for that, unless all nodes are older than any ttl can be."""
    app = Celery("shop", set_as_current=False, broker="memory://")
    app.conf.update(redlock_nodes=["redis://n0", "redis://n1", "redis://n2"])
    app.conf.update(redlock_restart_guard="uptime", redlock_ttl=10.0)
    imported: list[str] = []

    def load() -> None:
        imported.append("tasks")

        @app.task(base=SingletonTask, name="slow", lock_ttl=600.0)
        def slow() -> None: ...

        app.finalize()

    monkeypatch.setattr(app.loader, "import_default_modules", load)
    redlock = Redlock.from_app(app)
    told = [up(2 * DAY)] * 3
    monkeypatch.setattr(health, "observe", lambda *_given: probes(*told))
    assert votes_in(examine(redlock, app, 1.0)) == [0.0] * 3 and not imported
    told[0] = up(100.0)
    left, *others = votes_in(examine(redlock, app, 1.0))
    assert imported and others == [0.0, 0.0] and 500 <= left < 520
    monkeypatch.setattr(app.loader, "import_default_modules", lambda: 1 / 0)
    assert votes_in(examine(redlock, app, 1.0))[1:] == [0.0, 0.0], "broken tasks hide no node"
    redlock.close()
    app.close()


def test_failed_examination_of_the_nodes_hides_no_lock(
    client: Client, holds: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holds("order:1")
    monkeypatch.setattr(sources, "examine", lambda *_given: 1 / 0)
    told = client.get("/locks.json").json
    assert [row["resource"] for row in told["rows"]] == ["order:1"] and told["no_quorum"] is None
    assert client.get("/nodes").status_code == 200 and "order:1" in client.get("/").text
    assert "the nodes could not be examined" in caplog.text


@pytest.mark.parametrize(
    "facts",
    [
        NodeInfo(run_id="b", uptime=DAY, role="slave", master="10.0.0.9:6379"),
        NodeInfo(run_id="b", uptime=DAY, role="master", cluster=True),
        up(DAY, "a"),
    ],
    ids=["a replica", "a cluster member", "one server under two names"],
)
def test_unsuitable_node_has_no_vote_and_no_time_to_wait(examined: Any, facts: NodeInfo) -> None:
    found = examined(up(DAY, "a"), facts, None)
    assert votes_in(found) == [0.0, None, None]
    told = found.no_quorum
    assert (told["answering"], told["voting"], told["wait"]) == (2, 1, None)
    (wrong,) = (one for one in found.nodes[1]["findings"] if one["check"] in ("role", "twins"))
    assert wrong["level"] == "wrong" and wrong["fix"]


def test_version_of_a_server_is_shown_printable_and_short(examined: Any) -> None:
    evil = "7.0\x1b[31m<b>" + "9" * 500
    version = examined(up(DAY), up(DAY), up(DAY), redis_version=evil).nodes[0]["version"]
    assert version.startswith("Redis 7.0\\x1b[31m<b>") and len(version) < 50
    both = examined(up(DAY), None, None, redis_version="7.2.4", valkey_version="8.1.0")
    assert both.nodes[0]["version"] == "Valkey 8.1.0" and both.nodes[1]["version"] is None


def test_node_is_shown_with_version_uptime_and_findings_of_the_doctor(
    client: Client, servers: list[LocalServer]
) -> None:
    with redis.Redis(port=servers[1].port, decode_responses=True) as node:
        node.config_set("maxmemory", "100mb")
        node.config_set("maxmemory-policy", "allkeys-lru")
        server = node.info("server")
    told = client.get("/nodes.json").json
    version = server.get("valkey_version", server["redis_version"])
    assert [node["version"].split()[1] for node in told["nodes"]] == [version] * 5
    assert all(0 <= node["uptime"] < DAY and node["votes_in"] == 0.0 for node in told["nodes"])
    assert told["no_quorum"] is None
    found = [[one["check"] for one in node["findings"]] for node in told["nodes"]]
    assert ["eviction" in checks for checks in found] == [False, True, False, False, False]
    (evicts,) = (one for one in told["findings"] if one["check"] == "eviction")
    name = told["nodes"][1]["name"]
    assert evicts["where"] == name and "noeviction" in evicts["fix"]
    assert "Writes are not tried here" in client.get("/").text
    seen = client.get("/nodes").text
    assert "Writes are not tried here" in seen
    assert version in seen and "It evicts keys" in seen and "redlock doctor" in seen


def test_hung_node_and_one_that_is_down_get_the_advice_of_the_doctor(
    servers: list[LocalServer],
) -> None:
    with Proxy(servers[0].port) as proxy:
        proxy.mode = "deaf"
        hung, down = f"127.0.0.1:{proxy.port}", "127.0.0.2:1"
        redlock = Redlock([f"redis://{hung}/0", f"redis://{down}/0", servers[1].url])
        found = {one["where"]: one["fix"] for one in examine(redlock, None, 1.0).findings}
        redlock.close()
    assert found[hung].startswith("it accepts connections and does not answer: stopped, swapping")
    assert found[down].startswith("start it, or open the way to it; ")


def test_looking_at_the_nodes_page_writes_nothing(
    client: Client, servers: list[LocalServer]
) -> None:
    def writes() -> int:
        with redis.Redis(port=servers[0].port) as node:
            stats = node.info("commandstats")
        names = ("set", "eval", "evalsha", "zadd", "publish", "del", "pexpire")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names)

    before = writes()
    assert client.get("/nodes.json").json["nodes"][0]["version"]
    assert writes() == before


def test_node_just_started_has_no_vote_and_the_page_says_for_how_long(
    servers: list[LocalServer],
) -> None:
    redlock = Redlock([server.url for server in servers], ttl=3600.0, restart_guard="uptime")
    page = make_app(redlock=redlock, idle=None)
    try:
        client = Client(page)
        told = client.get("/locks.json").json
        assert told["failure"] is None and 0 < told["no_quorum"]["wait"] < 3700
        assert (told["no_quorum"]["answering"], told["no_quorum"]["voting"]) == (5, 0)
        assert all(0 < node["votes_in"] < 3700 for node in told["nodes"])
        text = client.get("/nodes").text
        assert re.search(FIRST, text) and "No quorum: no lock can be taken" in text
        assert "5 of 5 nodes answer, but none has a vote; 3 must." in text
        assert "a quorum votes in" in text and text.count("No vote for ") == 5
    finally:
        page.close()
        redlock.close()


def test_every_page_shows_a_missing_quorum_first(
    client: Client, servers: list[LocalServer]
) -> None:
    for path in PAGES:
        assert "No quorum" not in client.get(path).text, path
    for server in servers[2:]:
        server.kill()
    wait_until(lambda: client.get("/locks.json").json["no_quorum"], 30, "the page notices")
    for path in PAGES:
        text = client.get(path).text
        assert re.search(FIRST, text), path
        assert "No quorum: no lock can be taken." in text
        assert "2 of 5 nodes answer; 3 must." in text
    rows = client.get("/nodes.json").json["nodes"]
    assert [node["answers"] for node in rows] == [True, True, False, False, False]
    assert all((node["rtt"] is not None) == node["answers"] for node in rows)
    assert "none since" not in client.get("/nodes").text, "that some are down is a change"
    for server in servers[2:]:
        server.start()
    wait_until(lambda: not client.get("/locks.json").json["no_quorum"], 30, "they are back")
    assert "No quorum" not in client.get("/").text
    rows = client.get("/nodes.json").json["nodes"]
    changes = [[change["what"] for change in node["timeline"]] for node in rows]
    assert changes[:2] == [[], []] and all("down" in each for each in changes[2:]), changes

    def blind() -> bool:
        told = client.get("/lock.json?resource=order:1").json["timeline"]
        return "blind" in [change["what"] for change in told]

    wait_until(blind, 30, "the timeline says that nobody saw what came and went meanwhile")


def test_nodes_that_may_not_be_scanned_are_no_lost_quorum() -> None:
    """The workers' user may not scan, and locks work all the same."""
    with start_servers(3, config=with_acl_user()) as nodes:
        redlock = Redlock([lock_url(node) for node in nodes], restart_guard="off")
        page = make_app(redlock=redlock, idle=None)
        try:
            client = Client(page)
            told = client.get("/nodes.json").json
            assert "scan" in told["failure"] and told["no_quorum"] is None
            assert [(node["answers"], node["reachable"]) for node in told["nodes"]] == [
                (True, False)
            ] * 3
            assert "Not readable" in client.get("/nodes").text
            assert "3<span" in client.get("/").text, "of 3 that answer"
            passwords = re.findall(r":([^:@/]+)@", " ".join(map(lock_url, nodes)))
            assert len(passwords) == 3
            for path in (*PAGES, "/nodes.json", "/locks.json"):
                text = client.get(path).text
                assert "No quorum" not in text, path
                assert not [word for word in passwords if word in text], path
        finally:
            page.close()
            redlock.close()
