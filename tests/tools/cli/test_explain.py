"""`explain`: the key of a call, its holder, and the call's fate, before the call is made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner

from celery_redlock import Redlock, SingletonTask, locked
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.config.options import TASK
from celery_redlock.config.task_lock import resources_of
from celery_redlock.locking.start import Start
from celery_redlock.messages.reservation import abandon, claim_for, take
from celery_redlock.protocol.rate import rate_of
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer, start_servers
from tests.support.names import Patch, Servers
from tests.support.wait import wait_until

pytestmark = pytest.mark.usefixtures("no_worker")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[LocalServer]]:
    with start_servers(3) as servers:
        yield servers


def key_of(order_id: int, **_more: Any) -> str:
    return f"made:{order_id}"


def shop(nodes: Servers, **conf: Any) -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(
        redlock_nodes=[node.url for node in nodes], redlock_restart_guard="off", redlock_ttl=20
    )
    app.conf.update(conf)

    def declare(name: str, key: Any = None, **options: Any) -> None:
        def body(order_id: int, lang: str = "en") -> None: ...

        if key is not None:
            options["lock_key"] = key
        app.task(base=SingletonTask, name=f"shop.{name}", shared=False, **options)(body)

    declare("rebuild")
    declare("charge", "order:{order_id}", lock_ttl=5)
    declare("by_name", ["order_id"])
    declare("by_function", key_of)
    declare("both", ("order:{order_id}", "lang:{lang}"))
    declare("few", "few:{order_id}", lock_limit=2)
    declare("paced", "paced:{order_id}", lock_rate="2/m")
    for policy in ("skip", "raise", "wait", "replace"):
        declare(f"on_{policy}", "order:{order_id}", lock_on_conflict=policy)
    for policy in ("existing", "raise", "skip", "replace"):
        options = {"lock_scope": "until_executed", "lock_on_duplicate": policy}
        declare(f"dup_{policy}", "order:{order_id}", **options)
    declare("unlocked_body", "order:{order_id}", lock_scope="until_executing")
    declare("run_anyway", "order:{order_id}", lock_on_unavailable="run")

    @app.task(name="shop.plain", shared=False)
    def plain(number: int) -> None: ...

    @app.task(name="shop.bound", bind=True, shared=False)
    @locked("order:<order_id>")
    def bound(self: Any, order_id: int) -> None: ...

    return app


@pytest.fixture(scope="module")
def app(nodes: Servers) -> Iterator[Celery]:
    made = shop(nodes)
    yield made
    Redlock.from_app(made).close()
    made.close()


@pytest.fixture(scope="module")
def redlock(app: Celery) -> Redlock:
    return Redlock.from_app(app)


def call(app: Celery, *arguments: str) -> Any:
    given = ["explain", *arguments, "--timeout", "10"]
    return CliRunner().invoke(group, given, obj=Site(app=app))


def told(app: Celery, *arguments: str, code: int = 0) -> dict[str, Any]:
    result = call(app, *arguments, "--json")
    assert result.exit_code == code, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_explain_accepts_a_task_that_is_a_class(nodes: Servers) -> None:
    class Pack(SingletonTask):
        name = "shop.pack"

        def run(self, order_id: int) -> None: ...

    made = shop(nodes)
    made.register_task(Pack())
    assert told(made, "shop.pack", "[17]")["resources"] == list(
        resources_of(made.tasks["shop.pack"], [17], {})
    )
    result = call(made, "shop.pack", "[]")
    assert result.exit_code == 2 and "shop.pack cannot be called so" in result.output


@pytest.mark.parametrize(
    ("name", "resources", "rule"),
    [
        ("rebuild", ["shop.rebuild(order_id=17,lang=en)"], "the task's name 'shop.rebuild' and"),
        ("charge", ["order:17"], "the template 'order:{order_id}'"),
        ("by_name", ["shop.by_name(order_id=17)"], "'shop.by_name' and its arguments order_id"),
        ("by_function", ["made:17"], "the function key_of"),
        ("both", ["lang:en", "order:17"], "the templates 'order:{order_id}', 'lang:{lang}'"),
        ("bound", ["order:17"], "the template 'order:<order_id>'"),
    ],
)
def test_explain_names_the_key_and_its_rule(
    app: Celery, name: str, resources: list[str], rule: str
) -> None:
    data = told(app, f"shop.{name}", "[17]")
    task = app.tasks[f"shop.{name}"]
    assert data["resources"] == list(resources_of(task, [17], {}))
    assert data["resources"] == resources
    assert rule in data["rule"]
    assert data["run"]["outcome"] == "run" and data["publish"]["outcome"] == "sent"


def test_explain_says_where_options_come_from(app: Celery) -> None:
    options = told(app, "shop.charge", "[1]", "--kwargs", '{"lang": "de"}')["options"]
    assert options["ttl"] == {"value": 5.0, "from": "task"}
    assert options["wait"]["from"] == "default"
    assert told(app, "shop.rebuild", "[1]")["options"]["ttl"] == {"value": 20.0, "from": "app"}


ALWAYS = {"ttl", "key", "scope", "on_unavailable"}
RETRIES = {"retry_backoff", "retry_backoff_max"}
BODY = {"max_lifetime", "on_conflict", "on_lost"}


@pytest.mark.parametrize(
    ("name", "conf", "shown"),
    [
        ("charge", {}, ALWAYS | RETRIES | BODY),  # is parked, so no `wait`; reserves nothing
        ("charge", {"redlock_parking": False}, ALWAYS | RETRIES | BODY | {"wait"}),
        (
            "charge",
            {"redlock_retry_deadline": 9},
            ALWAYS | RETRIES | BODY | {"retry_deadline", "on_deadline"},
        ),
        ("few", {}, ALWAYS | RETRIES | BODY | {"limit"}),
        ("on_wait", {}, ALWAYS | RETRIES | BODY | {"wait", "on_deadline"}),
        ("dup_skip", {}, ALWAYS | RETRIES | BODY | {"on_duplicate"}),
        ("unlocked_body", {}, ALWAYS | {"on_duplicate"}),
        ("run_anyway", {}, ALWAYS | RETRIES | BODY),
        ("rebuild", {}, (ALWAYS - {"key"}) | RETRIES | BODY),
    ],
)
def test_explain_hides_unread_options_except_from_programs(
    nodes: Servers, name: str, conf: dict[str, Any], shown: set[str]
) -> None:
    app = shop(nodes, **conf)
    table = call(app, f"shop.{name}", "[1]").output.partition("option ")[2].splitlines()[1:]
    assert {row.split()[0] for row in table} == shown
    assert told(app, f"shop.{name}", "[1]")["options"].keys() == TASK.keys()
    Redlock.from_app(app).close()


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("charge", "parked", "as that takes: shop.other t-1 holds the key"),
        ("both", "parked", "waits without a pool slot"),
        ("on_skip", "skip", "is skipped"),
        ("on_raise", "raise", "fails: the key is held"),
        ("on_wait", "wait", "for up to 20 s, then fails"),
        ("on_replace", "replace", "has the holder revoked"),
        ("unlocked_body", "run", "locks no body"),
    ],
)
def test_explain_says_what_a_call_would_do_and_who_holds_the_lock(
    app: Celery, redlock: Redlock, name: str, outcome: str, words: str
) -> None:
    owner = Owner("host", 42, task_id="t-1", task="shop.other")
    with redlock.lock("order:17", owner=owner):

        def whole() -> tuple[dict[str, Any], str] | None:
            """Return the answer once it counts all three nodes: a busy one may miss `--timeout`."""
            data = told(app, f"shop.{name}", "[17]")
            text = call(app, f"shop.{name}", "[17]").output
            held = [one["nodes"] for one in data["entries"] if one["resource"] == "order:17"]
            return (data, text) if held == [3] and "on 3 of 3 nodes, " in text else None

        data, text = wait_until(whole, 20.0, "all nodes tell")
    assert data["run"]["outcome"] == outcome
    assert words in data["run"]["text"] and data["run"]["text"] in text
    held = next(entry for entry in data["entries"] if entry["resource"] == "order:17")
    assert (held["task"], held["task_id"], held["pid"]) == ("shop.other", "t-1", 42)
    assert held["held_for"] >= 0
    assert "lock: shop.other t-1, pid 42 on host, " in text
    assert not re.search(r"^ +127\.", text, re.M)  # they all say the same


@pytest.mark.parametrize(
    ("replies", "line"),
    [
        ({"w1@h": {"holds": [{"task_id": "t-1"}, 7]}}, "  its body is at work in w1@h"),
        (
            {"w1@h": {"holds": [{"task_id": "t-1", "pid": 42, "stopped": True}]}},
            "  its body is at work in w1@h; process 42 is stopped: kill -CONT 42, or kill -9 42",
        ),
        ({"w1@h": {"holds": []}}, "  no worker that answered has this body: if its process is"),
        ({}, "body    waits without a pool slot (parked), for as long as that takes: shop.other"),
    ],
    ids=["alive", "stopped", "dead", "no worker"],
)
def test_explain_says_whether_a_worker_has_the_body_that_holds_the_key(
    app: Celery, redlock: Redlock, replies: Any, line: str, monkeypatch: Patch
) -> None:
    why = "" if replies else "no worker answered within 1 s"
    monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_: (replies, why))
    with redlock.lock("order:17", owner=Owner("host", 42, task_id="t-1", task="shop.other")):
        said = call(app, "shop.charge", "[17]").output
    assert [one for one in said.splitlines() if one.startswith(line)], said
    assert ("; but no worker answered within 1 s" in said) == (not replies)
    assert "docs/runbook.md#a-stuck-lock" in said
    said = call(app, "shop.charge", "[18]").output  # a free key
    end = "" if replies else "; but no worker answered within 1 s"
    assert f"body    runs as soon as it is delivered: the key is free{end}\n" in said


BUSY = {"slots": 2, "busy": 2, "queues": ["celery"]}


@pytest.mark.parametrize(
    ("pools", "end"),
    [
        ([BUSY], "; but no slot is free: all 2 are busy in the workers that take from its queue,"),
        ([BUSY, BUSY], "; but no slot is free: all 4 are busy in the workers that take from its"),
        ([BUSY, {**BUSY, "busy": 1}], "free"),
        ([{**BUSY, "queues": ["mail"]}], "; but no worker that answered takes from its queue, cel"),
        ([BUSY, {**BUSY, "queues": ["mail"], "busy": 0}], "; but no slot is free: all 2 are busy"),
        ([BUSY, None], "free"),  # an older release
        ([BUSY, {"slots": "2", "busy": 2, "queues": ["celery"]}], "free"),
        ([BUSY, {"slots": 2, "busy": 2, "queues": "celery"}], "free"),
    ],
)
def test_explain_says_that_no_worker_can_begin_with_a_body(
    app: Celery, pools: Any, end: str, monkeypatch: Patch
) -> None:
    replies = {f"w{number}@h": {"holds": [], "pool": pool} for number, pool in enumerate(pools)}
    monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_: (replies, ""))
    said = told(app, "shop.charge", "[18]")["run"]["text"]
    begin = "runs as soon as it is delivered: the key is free"
    assert said == begin if end == "free" else said.startswith(begin + end), said


def test_explain_does_not_promise_parking_that_is_switched_off(
    nodes: Servers, redlock: Redlock
) -> None:
    app = shop(nodes, redlock_parking=False)
    with redlock.lock("order:17"):
        assert told(app, "shop.charge", "[17]")["run"]["outcome"] == "again"


def test_explain_counts_free_slots_of_a_limit(app: Celery, redlock: Redlock) -> None:
    with redlock.lock("few:1", limit=2):
        first = told(app, "shop.few", "[1]")
        with (
            redlock.lock("other"),
            Redlock([*redlock_urls(app)], restart_guard="off").lock("few:1", limit=2),
        ):
            second = told(app, "shop.few", "[1]")
    assert (first["run"]["outcome"], second["run"]["outcome"]) == ("run", "parked")
    assert "1 of 2 slots free" in first["run"]["text"]
    assert "as that takes: 2 of 2 slots are held" in second["run"]["text"]


def test_explain_counts_starts_of_a_rate_and_when_the_next_may_start(
    app: Celery, redlock: Redlock
) -> None:
    found = []
    for _ in range(2):
        with Start(redlock, "paced:1", rate_of("2/m"), wait=0.0, owner=None):
            pass
        found.append(told(app, "shop.paced", "[1]"))
    first, second = found
    assert (first["run"]["outcome"], second["run"]["outcome"]) == ("run", "parked")
    assert "1 of 2 starts left in these 60 s" in first["run"]["text"]
    assert "2 of 2 starts in the last 60 s" in second["run"]["text"]
    assert {entry["kind"] for entry in second["entries"]} == {"start"}


def redlock_urls(app: Celery) -> list[str]:
    return list(app.conf.redlock_nodes)


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("dup_existing", "existing", "returns the result of task-9"),
        ("dup_raise", "raise", "raises DuplicateTask: task-9"),
        ("dup_skip", "skip", "Skipped"),
        ("dup_replace", "replace", "revokes task-9"),
        ("dup_skip", "sent", "without a reservation: shop.another has reserved the key"),
    ],
)
def test_explain_says_what_delay_would_return(
    app: Celery, redlock: Redlock, name: str, outcome: str, words: str
) -> None:
    kept = "reserves the key until the message expires, else for an hour, and sends"
    assert kept in told(app, f"shop.{name}", "[17]")["publish"]["text"]
    by = "shop.another" if outcome == "sent" else f"shop.{name}"
    claim = claim_for(redlock, "order:17", 30.0, "task-9", by)
    take(redlock, claim)
    try:
        data = told(app, f"shop.{name}", "[17]")
        assert f"reservation: {by} task-9" in call(app, f"shop.{name}", "[17]").output
    finally:
        abandon(redlock, claim)
    assert data["publish"]["outcome"] == outcome and words in data["publish"]["text"]
    assert data["run"]["outcome"] == ("run" if outcome in ("replace", "sent") else "none")


def test_explain_names_a_foreign_key_that_never_expires(app: Celery, nodes: Servers) -> None:
    import redis

    clients = [redis.Redis.from_url(node.url) for node in nodes]
    for client in clients:
        client.set("redlock:order:17", "mine")
    try:
        run = told(app, "shop.charge", "[17]")["run"]
    finally:
        for client in clients:
            client.delete("redlock:order:17")
            client.close()
    assert run["outcome"] == "parked" and "in its way forever; it waits" in run["text"]


def test_explain_without_a_quorum_follows_on_unavailable(nodes: Servers, app: Celery) -> None:
    gone = shop([], redlock_nodes=["redis://127.0.0.1:1/0", nodes[0].url, "redis://127.0.0.1:2/0"])
    data = told(gone, "shop.charge", "[17]", code=3)
    assert data["run"]["outcome"] == "again" and "1 of 3 nodes" in data["error"]
    assert told(gone, "shop.run_anyway", "[17]", code=3)["run"]["outcome"] == "unlocked"


def test_explain_counts_no_vote_of_nodes_just_started() -> None:
    with start_servers(3) as just_started:
        app = shop(just_started, redlock_restart_guard="uptime")
        data = told(app, "shop.charge", "[17]", code=3)
        said = call(app, "shop.charge", "[17]").output
        Redlock.from_app(app).close()
    assert data["run"]["outcome"] == "again" and "it may have forgotten locks" in data["error"]
    assert f"node 127.0.0.1:{just_started[0].port} answers, but has no vote: started " in said
    assert "does not answer" not in said


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), "it takes no writes: OOM "),
        (("ACL", "SETUSER", "default", "-set"), "its user 'default' lacks +set"),
    ],
    ids=["full", "a right"],
)
def test_explain_counts_no_vote_of_nodes_that_refuse_writes(
    refused: tuple[str, ...], why: str
) -> None:
    with start_servers(3) as servers:
        app = shop(servers)
        with Redlock.from_app(app).lock("order:17"):
            for server in servers[1:]:
                with redis.Redis(port=server.port) as client:
                    client.execute_command(*refused)
            data = told(app, "shop.charge", "[17]", code=3)
            said = call(app, "shop.charge", "[17]").output
        Redlock.from_app(app).close()
    assert data["run"]["outcome"] == "again" and "1 of 3 nodes can grant a lock" in data["error"]
    assert "is sent again until enough nodes grant locks" in data["run"]["text"]
    assert f"node 127.0.0.1:{servers[0].port} answers\n" in said
    assert f"node 127.0.0.1:{servers[2].port} answers, but has no vote: {why}" in said
    assert "lock: pid " in said  # the holder is shown all the same


def test_explain_says_that_a_task_takes_no_lock(app: Celery) -> None:
    result = call(app, "shop.plain", "[1]")
    assert result.exit_code == 0 and "takes no lock" in result.output
    assert told(app, "shop.plain", "[1]") == {"task": "shop.plain", "locked": False}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["shop.charg", "[1]"], 1, "did you mean shop.charge"),
        (["shop.charge"], 2, "missing 1 required positional argument: 'order_id'"),
        (["shop.charge", "[1, 2, 3]"], 2, "but 3 were given"),
        (["shop.charge", "1"], 2, "ARGS must be a JSON array, such as '[1, "),
        (["shop.charge", "[1"], 2, "ARGS must be JSON"),
        (["shop.charge", "[1]", "--kwargs", "[]"], 2, "--kwargs must be a JSON object"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_explain_reports_wrong_tasks_and_arguments(
    app: Celery, arguments: list[str], code: int, words: str
) -> None:
    result = call(app, *arguments)
    assert result.exit_code == code, result.output
    assert words in result.output and "Traceback" not in result.output


def test_explain_with_locks_disabled_asks_no_node(nodes: Servers) -> None:
    app = shop([], redlock_enabled=False, redlock_nodes=["redis://127.0.0.1:1/0"])
    data = told(app, "shop.charge", "[17]")
    assert data["run"]["outcome"] == "unlocked" and data["entries"] == []
    assert data["run"]["text"] == "runs without a lock: redlock_enabled is False"


def test_explain_names_the_pages_of_what_it_explains(app: Celery, redlock: Redlock) -> None:
    keys, hot, scope = "docs/keys.md", "docs/hot-keys.md", "docs/uniqueness.md"
    limits, stuck = "docs/keys.md#a-limit", "docs/runbook.md#a-stuck-lock"
    policies = "docs/policies.md#on_conflict"
    expected = {
        **{"charge": [keys, hot, stuck], "on_skip": [keys, policies], "few": [keys, limits]},
        **{"paced": [keys, "docs/rates.md"], "dup_skip": [keys, scope, hot, stuck]},
    }
    with redlock.lock("order:17"):
        for task, pages in expected.items():
            assert told(app, f"shop.{task}", "[17]")["docs"] == pages, task
    for address in {page for pages in expected.values() for page in pages}:
        name, _, anchor = address.partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text("utf-8"), re.M)
        anchors = [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]
        assert anchor in ("", *anchors), address


def test_pages_are_named_by_the_address_that_the_app_configures(nodes: Servers) -> None:
    made = shop(nodes, redlock_docs="https://docs.example.org/{page}.html")
    assert "see     https://docs.example.org/keys.html\n" in call(made, "shop.few", "[1]").stdout
    result = CliRunner().invoke(group, ["exporter", "--json"], obj=Site(app=made))
    (runbook,) = [
        one["labels"]
        for one in json.loads(result.stdout)
        if one["name"] == "celery_redlock_runbook"
    ]
    assert runbook == {"url": "https://docs.example.org/runbook.html"}
    with Redlock.from_app(made).lock("order:1"):
        result = CliRunner().invoke(group, ["release", "order:1"], obj=Site(app=made))
    assert "https://docs.example.org/runbook.html#a-stuck-lock" in result.stderr


def test_an_address_of_the_pages_without_their_name_is_refused(nodes: Servers) -> None:
    made = shop(nodes, redlock_docs="https://docs.example.org/")
    result = call(made, "shop.few", "[1]")
    assert result.exit_code == 2
    assert "redlock_docs must be an address with {page} in it" in result.output
