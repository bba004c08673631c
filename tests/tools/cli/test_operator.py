"""The users of docs/cli.md: each has what its commands need, and nothing that it does not need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from click.testing import CliRunner
from werkzeug.test import Client

from celery_redlock import Redlock
from celery_redlock.cli import main, redlock
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from celery_redlock.survey.snapshot import look
from celery_redlock.web import make_app
from tests.support.nodes import ACL_RULE

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
RULES = dict(re.findall(r"^ACL SETUSER redlock-(\w+) (on .*)$", PAGE, re.M))
LOOKING, OPERATING = RULES["look"].split(), RULES["operator"].split()
LOOKS = {
    ("ls", "--all"): "1 lock, 1 line",
    ("show", "order:1"): "pid 1 on h",
    ("stats",): "(no task)  1      0 ",
    ("watch", "--count", "1"): "pid 1 on h",
    ("exporter", "--once"): 'celery_redlock_held{task=""} 1.0',
}
"""Commands that a user who only looks may call, and what each shows of the lock on the node."""


@pytest.fixture
def admin(acl_node: LocalServer) -> Iterator[redis.Redis]:
    """Yield a client with all rights, on a node with one lock."""
    with redis.Redis(port=acl_node.port, decode_responses=True) as client:
        client.flushall()
        client.execute_command("ACL", "LOG", "RESET")
        client.set("redlock:order:1", Owner("h", 1).token("0" * 32, 1.7e9), px=60_000)
        client.zadd("redlock:order:1#line", {"redlock:#line:ff:1": 1})
        yield client
        client.execute_command("ACL", "DELUSER", "redlock")


def call(acl_node: LocalServer, *arguments: str) -> Any:
    url = f"redis://redlock:SECRET@127.0.0.1:{acl_node.port}/0"
    result = CliRunner().invoke(main, ["--nodes", url, *arguments])
    assert "SECRET" not in result.output
    return result


def allow(admin: redis.Redis, rule: list[str]) -> None:
    admin.execute_command("ACL", "SETUSER", "redlock", *rule)
    admin.acl_log_reset()  # a former test's lock may have asked while it had no user


def test_looking_commands_work_with_the_documented_acl_rule(
    acl_node: LocalServer, admin: redis.Redis
) -> None:
    allow(admin, LOOKING)
    for arguments, said in LOOKS.items():
        result = call(acl_node, *arguments)
        assert result.exit_code == 0, result.output
        assert said in result.output, result.output
    assert admin.acl_log() == []


def test_looking_user_can_run_no_script_and_still_read_the_dashboard(
    acl_node: LocalServer, admin: redis.Redis
) -> None:
    allow(admin, LOOKING)
    url = f"redis://redlock:SECRET@127.0.0.1:{acl_node.port}/0"
    with redis.Redis.from_url(url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.eval("while true do end", 0)
    admin.acl_log_reset()
    lock = Redlock([url], restart_guard="off")
    page = make_app(redlock=lock)
    try:
        shown = Client(page).get("/lock.json?resource=order:1").get_json()
        nodes = Client(page).get("/nodes.json").get_json()["nodes"]
    finally:
        page.close()
        lock.close()
    assert [entry["host"] for entry in shown["entries"]] == ["h", None], shown
    assert nodes[0]["version"] and nodes[0]["reachable"]
    assert admin.acl_log() == []


def test_looking_command_does_not_fetch_a_value_of_any_size(
    acl_node: LocalServer, admin: redis.Redis
) -> None:
    allow(admin, LOOKING)
    admin.set("redlock:big", "x" * 2**25)
    admin.config_set("client-output-buffer-limit", "normal 1mb 1mb 0")
    try:
        assert "another program's" in call(acl_node, "show", "big").output
    finally:
        admin.config_set("client-output-buffer-limit", "normal 0 0 0")


def test_explain_works_as_the_user_of_a_worker(acl_node: LocalServer, admin: redis.Redis) -> None:
    """It reads as the app does; a worker never reads keys in the way of a user who only looks."""
    allow(admin, ACL_RULE)
    lock = Redlock([f"redis://redlock:SECRET@127.0.0.1:{acl_node.port}/0"], restart_guard="off")
    try:
        (entry,) = look(lock, "order:1", 20)  # and not the wait queue
    finally:
        lock.close()
    assert entry.owner == Owner("h", 1)


@pytest.mark.parametrize("word", [word for word in LOOKING if word.startswith("+")])
def test_each_command_of_the_looking_acl_rule_is_needed(
    acl_node: LocalServer, admin: redis.Redis, word: str
) -> None:
    allow(admin, [kept for kept in LOOKING if kept != word])
    result = call(acl_node, "ls", "--all")
    assert word[1:] in {entry["object"] for entry in admin.acl_log()}
    optional = word == "+info"
    assert result.exit_code == (0 if optional else 3), result.output
    assert ("users who only read" in result.output) is not optional


def test_looking_user_can_free_nothing(acl_node: LocalServer, admin: redis.Redis) -> None:
    allow(admin, LOOKING)
    result = call(acl_node, "release", "order:1", "--force", "--timeout", "0.5")
    assert result.exit_code == 2, result.output
    assert "no permissions to run the 'eval' command" in result.output
    assert admin.exists("redlock:order:1")


def test_operator_can_do_all_with_the_documented_acl_rule(
    acl_node: LocalServer, admin: redis.Redis
) -> None:
    allow(admin, OPERATING)
    for arguments in (*LOOKS, ("bench", "--seconds", "0.1"), ("release", "order:1", "--force")):
        result = call(acl_node, *arguments)
        assert result.exit_code == 0, result.output
    assert admin.acl_log() == []
    assert not admin.exists("redlock:order:1")


def test_acl_rule_of_an_operator_is_that_of_a_worker_and_four_words() -> None:
    assert [*ACL_RULE, "+scan", "+getrange", "+zcard", "+zrange"] == OPERATING


def test_commands_with_an_app_use_its_nodes_and_prefix(server: LocalServer) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(redlock_nodes=[server.url], redlock_prefix="shop:")
    with redis.Redis(port=server.port) as client:
        client.set("shop:order:1", Owner("h", 1).token("0" * 32, 1.7e9), px=60_000)
        client.set("redlock:order:2", Owner("h", 1).token("0" * 32, 1.7e9), px=60_000)
    result = CliRunner().invoke(redlock, ["ls"], obj=SimpleNamespace(app=app))
    assert result.exit_code == 0, result.output
    assert "order:1" in result.output and "order:2" not in result.output
    for arguments in (["bench", "--seconds", "0.1"], ["release", "shop:order:1", "--force"]):
        result = CliRunner().invoke(redlock, arguments, obj=SimpleNamespace(app=app))
        assert result.exit_code == 0, result.output
    Redlock.from_app(app).close()
