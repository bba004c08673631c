"""Manual release: it frees the listed lock and no other, and only if confirmed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import click
import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.cli import release as command
from celery_redlock.protocol.values import Owner, token_digest
from celery_redlock.survey.force_release import force_release
from celery_redlock.survey.snapshot import look
from tests.support.names import Patch, Servers
from tests.support.nodes import TOKEN
from tests.support.wait import wait_until
from tests.tools.cli.clinic import TOKENS, put

KEY = "redlock:order:1"
RUNBOOK = "docs/runbook.md#a-stuck-lock"

Cli = Callable[..., Any]
Nodes = list[redis.Redis]


@pytest.fixture(autouse=True)
def _a_terminal(monkeypatch: Patch) -> None:
    """There is one to ask on."""
    monkeypatch.setattr(command, "can_ask", lambda: True)


def there(admins: Nodes, key: str = KEY) -> list[Any]:
    return [admin.get(key) for admin in admins]


def test_release_with_force_frees_a_lock_on_all_nodes(cli: Cli, admins: Nodes) -> None:
    put(admins, KEY, TOKENS[0])
    put(admins, KEY + "#reserved", TOKENS[0])
    result = cli("release", "order:1", "--force")
    assert (result.exit_code, result.stdout) == (
        0,
        "order:1: freed on 5 nodes; shop.charge 0123-abcd, pid 4242 on web-1, token"
        f" {token_digest(TOKENS[0])} had it\n",
    )
    assert there(admins) == [None] * 5
    assert there(admins, KEY + "#reserved") == [TOKENS[0]] * 5
    hint = "celery-redlock --nodes URL,... release order:1 --reservation\n"
    assert cli("release", KEY).stderr.endswith(f"this frees its reservation: {hint}")
    result = cli("release", KEY, "--reservation", "--force", "--json")
    assert json.loads(result.stdout)["outcome"] == "freed"
    assert there(admins, KEY + "#reserved") == [None] * 5


def test_release_without_a_terminal_and_without_force_is_refused(
    cli: Cli, admins: Nodes, monkeypatch: Patch
) -> None:
    monkeypatch.undo()
    put(admins, KEY, TOKENS[0])
    result = cli("release", "order:1", input="y\n")
    look = "look with celery-redlock --nodes URL,... show order:1, then give --force"
    assert result.exit_code == 4 and look in result.stderr
    assert f"What to do first: {RUNBOOK}" in result.stderr
    assert json.loads(cli("release", "order:1", "--json").stdout)["outcome"] == "refused"
    assert there(admins) == [TOKENS[0]] * 5


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 4), ("", 4)])
def test_release_on_a_terminal_shows_the_holder_and_asks(
    cli: Cli, admins: Nodes, answer: str, code: int
) -> None:
    put(admins, KEY, TOKENS[0])
    result = cli("release", "order:1", input=f"{answer}\n")
    assert result.exit_code == code, result.output
    for part in ("shop.charge 0123-abcd", "pid 4242 on web-1", "s left", "another may run"):
        assert part in result.stderr
    assert not TOKEN.search(result.output)
    assert there(admins) == [TOKENS[0] if code else None] * 5


@pytest.mark.parametrize(
    ("meanwhile", "code", "said"),
    [(TOKENS[1], 4, "another's"), (None, 0, "was free already")],
    ids=["another's", "gone"],
)
def test_release_leaves_a_lock_alone_that_changed_while_it_asked(
    cli: Cli,
    admins: Nodes,
    monkeypatch: Patch,
    meanwhile: str | None,
    code: int,
    said: str,
) -> None:
    def confirm(*_question: Any, **_how: Any) -> bool:
        for admin in admins:
            admin.delete(KEY)
        if meanwhile:
            put(admins, KEY, meanwhile)
        return True

    monkeypatch.setattr(click, "confirm", confirm)
    put(admins, KEY, TOKENS[0])
    result = cli("release", "order:1")
    assert result.exit_code == code and said in result.output
    assert there(admins) == [meanwhile] * 5


def test_release_leaves_a_lock_alone_that_changed_before_the_delete(
    redlock: Redlock, admins: Nodes, monkeypatch: Patch
) -> None:
    put(admins, KEY, TOKENS[0])
    (entry,) = look(redlock, "order:1")
    run = redlock.client.driver.run

    def late(*operations: Any) -> Any:
        put(admins, KEY, TOKENS[1])
        return run(*operations)

    monkeypatch.setattr(redlock.client.driver, "run", late)
    assert force_release(redlock, entry, 20).outcome == "changed"
    assert there(admins) == [TOKENS[1]] * 5


def test_release_leaves_rivals_of_the_shown_token_alone(redlock: Redlock, admins: Nodes) -> None:
    put(admins[:2], KEY, TOKENS[0])
    put(admins[2:3], KEY, TOKENS[1])
    (entry,) = look(redlock, "order:1")
    freed = force_release(redlock, entry, 20)
    assert (freed.outcome, freed.nodes) == ("freed", 2)
    assert there(admins) == [None, None, TOKENS[1], None, None]


def test_release_by_hand_notifies_the_first_waiter(cli: Cli, admins: Nodes) -> None:
    put(admins, KEY, TOKENS[0])
    listeners = [admin.pubsub(ignore_subscribe_messages=True) for admin in admins]
    for admin, listener in zip(admins, listeners, strict=True):
        admin.zadd("redlock:order:1#line", {"redlock:#line:ff:7": 1})
        listener.subscribe("redlock:#line:ff")
        listener.get_message(timeout=20)  # that it listens
    assert cli("release", "order:1", "--force").exit_code == 0
    for admin, listener in zip(admins, listeners, strict=True):
        message = listener.get_message(timeout=20)
        assert message is not None and message["data"] == "7"
        assert not admin.exists("redlock:order:1#line")
        listener.close()


def test_released_lock_goes_back_to_its_living_holder_if_nobody_else_takes_it(
    servers: Servers, admins: Nodes
) -> None:
    holding = Redlock([server.url for server in servers], ttl=3)
    with holding.lock("order:1") as lease:
        (entry, *_) = look(holding, "order:1")
        assert force_release(holding, entry, 20).outcome == "freed"
        wait_until(lambda: None not in there(admins), 20, "it is back on all nodes")
        assert not lease.lost and look(holding, "order:1")[0].digest == entry.digest
    assert there(admins) == [None] * 5
    holding.close()


def test_living_holder_learns_that_its_released_lock_is_taken(
    redlock: Redlock, servers: Servers
) -> None:
    holding = Redlock([server.url for server in servers], ttl=3)
    with holding.lock("order:1", on_lost=lambda lease: None) as lease:
        (entry, *_) = look(redlock, "order:1")
        assert force_release(redlock, entry, 20).outcome == "freed"
        other = redlock.acquire("order:1")
        wait_until(lambda: lease.lost, 20, "its extension is refused")
        assert redlock.release(other)
    holding.close()


def test_release_names_one_of_several_holders_by_its_slot(cli: Cli, admins: Nodes) -> None:
    put(admins, KEY, TOKENS[0])
    put(admins, KEY + "#slot2", TOKENS[1])
    result = cli("release", "order:1", "--force")
    assert result.exit_code == 2 and "say which, by --slot or --digest" in result.output
    assert "order:1 slot 2: shop.charge 0123-abcd, pid 4242 on web-1" in result.output
    result = cli("release", "order:1", "--force", "--slot", "3")
    assert result.exit_code == 1 and "no node has a lock of it in slot 3" in result.stderr
    assert cli("release", "order:1", "--force", "--slot", "2").exit_code == 0
    assert there(admins) == [TOKENS[0]] * 5
    assert there(admins, KEY + "#slot2") == [None] * 5


def test_release_frees_a_foreign_value_by_that_value(cli: Cli, admins: Nodes) -> None:
    put(admins, KEY, "not ours")
    assert cli("release", "order:1", "--force").exit_code == 0
    assert there(admins) == [None] * 5


def test_release_reports_a_key_that_it_cannot_free(cli: Cli, admins: Nodes) -> None:
    result = cli("release", "order:1", "--force")
    assert result.exit_code == 1 and "no node has a lock of it" in result.stderr
    for admin in admins:
        admin.hset(KEY, "a", "b")
    result = cli("release", "order:1", "--force")
    assert result.exit_code == 4 and "by hand" in result.stderr


def test_release_names_nodes_that_did_not_answer(cli: Cli, servers: Servers, admins: Nodes) -> None:
    put(admins, KEY, TOKENS[0])
    servers[0].kill()
    result = cli("release", "order:1", "--force", "--timeout", "2")
    assert result.exit_code == 0
    assert "freed on 4 nodes" in result.stdout
    assert f"; 127.0.0.1:{servers[0].port} did not answer" in result.stdout
    put(admins[1:], KEY, TOKENS[0])
    for server in servers[1:3]:
        server.kill()
    assert cli("release", "order:1", "--force").exit_code == 3
    assert there(admins[3:]) == [TOKENS[0]] * 2


@pytest.mark.parametrize(
    ("task_id", "words"),
    [
        ("0123-abcd", ["0123-abcd"]),
        ("x; touch /tmp/owned #", ["x; touch /tmp/owned #"]),
        ("$(id)`id`'\"$'", ["$(id)`id`'\"$'"]),
        ("--destination=nobody", None),
    ],
)
def test_command_to_stop_a_task_quotes_its_id_as_one_word(
    cli: Cli, admins: Nodes, task_id: str, words: list[str] | None
) -> None:
    """Any writer on the nodes chooses the id, and an operator copies the line."""
    put(admins, KEY, Owner("web-1", 4242, task_id, task="shop.charge").token("0" * 32, 1.7e9))
    said = cli("release", "order:1", input="n\n").output
    found = [line.partition("celery -A")[2] for line in said.splitlines() if "terminate" in line]
    assert [shlex.split(line)[4:] for line in found] == ([words] if words else [])
