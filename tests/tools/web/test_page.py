"""The page over real nodes, as HTML and as JSON: it shows what was seen, and nothing more."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from html.parser import HTMLParser
from typing import Any

import pytest
import redis
from celery import Celery
from werkzeug.test import Client

from celery_redlock import Redlock
from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.protocol.texts import printable
from celery_redlock.protocol.values import Owner
from celery_redlock.web import make_app, sources
from celery_redlock.web.formatting import named_in, quoted
from tests.support.names import Patch, Servers
from tests.support.nodes import TOKEN
from tests.support.wait import wait_until

PAGES = ("/", "/lock?resource=order:1", "/waiters", "/nodes", "/events")
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "k" * 512,
    "ctrl\x00\x07\x1b[31m\r\n",
    "\u202egnp.exe",
    "{{ 7 * 7 }}{% raw %}",
    "a&b=c+d%20e#f?g",
    "\ud800 alone",
)


def rows(client: Client, path: str = "/locks.json") -> list[dict[str, Any]]:
    return client.get(path).json["rows"]


class Text(HTMLParser):
    """The visible text of a page, with its elements and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen, self.tags, self.attributes = "", [], []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.seen += data

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _value in attrs]


def test_held_lock_is_shown_with_its_holder_and_nodes(client: Client, holds: Any) -> None:
    holds("order:1")
    (row,) = rows(client)
    assert (row["resource"], row["task"], row["host"], row["pid"]) == (
        *("order:1", "shop.tasks.pay", "worker-a", 4001),
    )
    assert row["state"] == "held" and row["nodes"] == 5 and row["votes"] == ["has"] * 5
    assert 500 < row["left"] <= 600
    seen = Text(client.get("/").text).seen
    assert "order:1" in seen and "shop.tasks.pay" in seen and "5 of 5" in seen


def put(servers: Servers, key: str, value: str | None = None) -> None:
    """Write a token, or another value, on some nodes."""
    for server in servers:
        with redis.Redis(port=server.port) as node:
            if value is None:
                node.set(f"redlock:{key}", Owner("h", 1, "t").token("0" * 32), px=60_000)
            else:
                node.set(f"redlock:{key}", value)


def test_lock_on_less_than_a_quorum_is_not_called_held(client: Client, servers: Servers) -> None:
    put(servers[:2], "split")
    put(servers[:1], "foreign", "of another program")
    by_name = {row["resource"]: row for row in rows(client, "/locks.json?show=trouble")}
    assert by_name["split"]["state"] == "short" and not by_name["split"]["held"]
    assert by_name["foreign"]["kind"] == "foreign" and by_name["foreign"]["state"] == "never"
    for server in servers[3:]:
        server.kill()

    def seen() -> Any:
        (row,) = (row for row in rows(client) if row["resource"] == "split")
        return row if row["silent"] == 2 else None

    row = wait_until(seen, 30, "the page notices")
    assert row["state"] == "unsure"
    assert row["votes"] == ["has", "has", "none", "silent", "silent"]
    assert "Uncertain" in Text(client.get("/").text).seen


def test_page_without_a_quorum_shows_the_time_of_its_data(
    client: Client, holds: Any, servers: Servers
) -> None:
    holds("order:1")
    assert rows(client)
    for server in servers[2:]:
        server.kill()

    def failed() -> Any:
        told = client.get("/locks.json").json
        return told if told["failure"] else None

    told = wait_until(failed, 30, "the page notices")
    assert "3 are needed" in told["failure"]
    assert [row["resource"] for row in told["rows"]] == ["order:1"]
    assert [node["reachable"] for node in told["nodes"]] == [True, True, False, False, False]
    seen = Text(client.get("/").text).seen
    assert "You see the state of" in seen and "It may have changed since" in seen
    one = client.get("/lock.json?resource=order:1").json
    assert one["failure"] and one["entries"] == []
    assert "Free:" not in Text(client.get("/lock?resource=order:1").text).seen


def test_page_says_that_it_is_looking_before_the_first_survey_has_ended(
    serve_app: Any, servers: Servers, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sources, "PAGE_WAIT_S", 0.0)
    looking = threading.Event()
    for look in ("survey", "examine"):
        monkeypatch.setattr(sources, look, lambda *_, **_more: looking.wait(30.0) and None)
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = [server.url for server in servers]
    client = serve_app(app)
    for path in ("/", "/nodes"):
        seen = Text(client.get(path).text).seen
        assert "Looking at the nodes. They have not answered yet" in seen
    stats = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", client.get("/").text)
    looking.set()
    assert [name for name, _ in stats[:3]] == ["Held", "Reserved", "Waiting"] and len(stats) == 5
    assert {value for _name, value in stats} == {"\N{EN DASH}"}


def test_old_rows_are_grey_and_say_since_when_they_are_not_updated(
    serve_app: Any, redlock: Redlock, holds: Any, servers: Servers
) -> None:
    holds("order:1")
    client = serve_app(redlock=redlock)
    assert not re.search(r'class="[^"]*\bold\b', client.get("/").text)
    for server in servers[2:]:
        server.kill()
    told = wait_until(
        lambda: (it := client.get("/locks.json").json)["failure"] and it, 30, "the page notices"
    )
    shown = client.get("/").text
    assert re.search(r'<table class="[^"]*\bold\b', shown)
    since = time.strftime("%H:%M:%S", time.gmtime(told["at"]))
    assert f"1 entry, not updated since {since}" in Text(shown).seen


def test_the_list_of_locks_is_also_found_by_its_name(client: Client, holds: Any) -> None:
    holds("order:1")
    shown = client.get("/locks?q=order", follow_redirects=True)
    assert (shown.status_code, shown.request.path) == (200, "/")
    assert "for “order”" in shown.text and "order:1" in shown.text


def test_unseen_locks_are_not_counted_as_none(serve: Any, servers: Servers) -> None:
    for server in servers[2:]:
        server.kill()
    seen = Text(serve().get("/").text).seen
    assert "No quorum" in seen and "Nothing is held" not in seen
    assert re.search(r"(Held|Reserved|attention)\s*0", seen) is None


def test_search_is_over_key_task_id_and_host(client: Client, holds: Any) -> None:
    holds("order:1")
    holds("mail:2", task="Post.send", host="worker-b")
    for query, found in [
        ("order", ["order:1"]),
        ("POST send", ["mail:2"]),
        ("worker-b", ["mail:2"]),
        ("6f1c", ["mail:2", "order:1"]),
        ("nothing-like-it", []),
    ]:
        answer = client.get("/locks.json", query_string={"q": query}).json
        assert [row["resource"] for row in answer["rows"]] == found, query


def test_lock_named_like_a_turn_is_a_lock(client: Client, holds: Any) -> None:
    """An old version kept its turns under such names; they are no reservations."""
    holds("order:1#turn")
    (row,) = rows(client)
    assert (row["resource"], row["kind"]) == ("order:1#turn", "lock")
    assert rows(client, "/locks.json?show=reservation") == []
    assert client.get("/locks.json").json["counts"]["reserved"] == 0


def test_number_of_waiting_tasks_is_hidden_without_workers_to_ask(
    client: Client, holds: Any
) -> None:
    holds("order:1")
    assert client.get("/locks.json").json["counts"]["waiting"] is None
    text = client.get("/").text
    assert "sort=waiting" not in text and 'data-label="Waiting"' not in text
    assert "<dt>Waiting</dt>" not in text and "tasks that wait inside workers" not in text


@pytest.mark.parametrize("name", HOSTILE, ids=printable)
def test_hostile_key_is_shown_printable_and_breaks_nothing(
    client: Client, holds: Any, name: str
) -> None:
    holds(name, task=name[:200], host=name.replace("|", "")[:200])
    plain = {tag for path in PAGES for tag in Text(client.get(path).text).tags}
    for path in ("/", f"/lock?resource={quoted(name)}"):
        answer = client.get(path)
        assert answer.status_code == 200
        page = Text(answer.text)
        assert page.seen.replace("\n", "").isprintable()
        assert set(page.tags) <= plain | {"section", "table"}
        assert not [one for one in page.attributes if one.startswith("on") or one == "style"]
    assert printable(name) in Text(client.get(f"/lock?resource={quoted(name)}").text).seen
    entry = client.get(f"/lock.json?resource={quoted(name)}").json["entries"][0]
    assert entry["resource"] == name and entry["state"] == "held"


@pytest.mark.parametrize("name", [*HOSTILE, "\udcff", "\ud83d\ude00", "a b"], ids=ascii)
def test_any_key_survives_a_link(name: str) -> None:
    assert named_in(f"x=1&resource={quoted(name)}&y=2".encode()) == name


def test_free_lock_is_called_free_and_a_link_to_no_key_is_no_crash(client: Client) -> None:
    assert "Free: none of the nodes" in Text(client.get("/lock?resource=nobody").text).seen
    assert client.get("/lock.json?resource=nobody").json["entries"] == []
    for query in ("", "resource=", "resource=%ff%fe", "resource=%ED%A0", "%=&;&resource"):
        assert client.get(f"/lock?{query}").status_code in (200, 400)
    assert client.get(f"/lock?resource={'x' * 10_001}").status_code == 400


@pytest.mark.parametrize("many", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_locks_are_paged(client: Client, servers: Servers, many: int) -> None:
    token = Owner("h", 1, "t").token("0" * 32)
    for server in servers:
        with redis.Redis(port=server.port) as node:
            node.mset({f"redlock:bulk:{number:05d}": token for number in range(many)})

    def first() -> Any:
        told = client.get("/locks.json").json
        return told if told["matched"] == many else None

    told = wait_until(first, 60, "all are seen")
    assert told["pages"] == many // 50 and len(told["rows"]) == 50
    last = client.get("/locks.json?page=99999&q=bulk").json["rows"][-1]
    assert last["resource"] == f"bulk:{many - 1:05d}"
    answer = client.get("/?page=7")
    assert len(answer.data) < 200_000 and f"7 of {many // 50}" in Text(answer.text).seen
    assert client.get("/locks.json?page=99999").json["page"] == many // 50
    assert client.get("/locks.json?page=-3").json["page"] == 1


def test_timeline_of_a_lock_page_shows_changes_and_since_when(
    client: Client, redlock: Redlock
) -> None:
    def kinds() -> list[str]:
        client.get("/")
        told = client.get("/lock.json?resource=order:1").json
        assert told["watched_since"]
        return [change["what"] for change in told["timeline"]]

    assert kinds() == []
    lease = redlock.acquire("order:1", owner=Owner("h", 7, "id", task="shop.pay"))
    wait_until(lambda: kinds() == ["came"], 30, "it is seen to come", every=0.05)
    redlock.release(lease)
    wait_until(lambda: kinds() == ["gone", "came"], 30, "it is seen to go", every=0.05)
    gone = client.get("/lock.json?resource=order:1").json["timeline"][0]
    assert gone["after"] < gone["at"] and "pid 7 on h" in gone["who"]
    seen = Text(client.get("/lock?resource=order:1").text).seen
    assert "Watching began" in seen and "between" in seen and "Freed or expired" in seen


def test_every_page_has_the_data_of_its_json_and_no_token(client: Client, holds: Any) -> None:
    lease = holds("order:1")
    for path in PAGES:
        by_name = client.get(path.replace("?", ".json?") if "?" in path else f"{path}.json")
        if path == "/":
            by_name = client.get("/locks.json")
        by_accept = client.get(path, headers={"Accept": "application/json"})
        assert by_name.mimetype == by_accept.mimetype == "application/json"
        assert by_name.json.keys() == by_accept.json.keys()
        html = client.get(path)
        assert html.mimetype == "text/html" and "Accept" in html.headers["Vary"]
        for said in (html.text, by_name.text, by_accept.text):
            assert lease.token not in said and not TOKEN.search(said)


def test_page_refreshes_only_if_asked(client: Client) -> None:
    assert "http-equiv" not in client.get("/").text
    live = client.get("/?refresh=5")
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in live.text
    assert 'content="2"' in client.get("/?refresh=0").text
    assert "refresh=5" in live.text, "its links go on with it"


def test_metrics_without_prometheus_client_say_what_to_install(
    client: Client, monkeypatch: Patch
) -> None:
    monkeypatch.delitem(sys.modules, "celery_redlock.survey.exporter", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    answer = client.get("/metrics")
    assert answer.status_code == 404
    assert 'pip install "celery-redlock[prometheus]"' in answer.text


def test_missing_pages_and_methods_are_answered_with_404_and_405(client: Client) -> None:
    assert client.get("/no-such-page").status_code == 404
    assert client.get("/static/../page.py").status_code == 404
    assert client.get("/static/page.py").status_code == 404
    refused = client.post("/nodes")
    assert refused.status_code == 405 and "GET" in refused.headers["Allow"]
    assert client.get("/no.json").json["error"]


def test_dashboard_needs_an_app_or_a_redlock(redlock: Redlock) -> None:
    for given in ({}, {"app": object(), "redlock": redlock}):
        with pytest.raises(ConfigurationError, match="one of the two"):
            make_app(**given)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_page_in_a_forked_child_looks_by_itself(client: Client, holds: Any) -> None:
    # A web server loads the page, and forks; threads do not come along.
    holds("order:1")
    assert rows(client)
    holds("order:2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            os._exit(len(rows(client)))
        finally:
            os._exit(99)
    _pid, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 2, "what the parent saw had one"
