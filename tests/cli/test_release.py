"""Freeing by hand: what was shown and nothing else, and only for who means it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner

from celery_redlock import Redlock
from celery_redlock.cli import main
from celery_redlock.cli import release as command
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from celery_redlock.survey.force_release import force_release
from celery_redlock.survey.snapshot import look
from tests.support import TOKEN, all_connected, wait_until

OWNER = Owner("web-1", 4242, "0123-abcd", task="shop.charge")
TOKENS = [OWNER.token(f"{number:032x}", 1.7e9) for number in range(3)]
KEY = "redlock:order:1"

Cli = Callable[..., Any]


@pytest.fixture
def redlock(servers: list[LocalServer]) -> Iterator[Redlock]:
    lock = Redlock([server.url for server in servers], ttl=20)
    yield all_connected(lock)
    lock.close()


@pytest.fixture
def cli(servers: list[LocalServer]) -> Cli:
    nodes = ",".join(server.url for server in servers)

    def call(*arguments: str, **how: Any) -> Any:
        return CliRunner().invoke(main, ["--nodes", nodes, "release", *arguments], **how)

    return call


def put(servers: list[LocalServer], value: str, key: str = KEY) -> None:
    for server in servers:
        with redis.Redis(port=server.port) as client:
            client.set(key, value, px=60_000)


def there(servers: list[LocalServer], key: str = KEY) -> list[str | None]:
    values = []
    for server in servers:
        with redis.Redis(port=server.port, decode_responses=True) as client:
            values.append(client.get(key))
    return values


def test_who_says_force_frees_it_on_all_nodes(cli: Cli, servers: list[LocalServer]) -> None:
    put(servers, TOKENS[0])
    put(servers, TOKENS[0], "redlock:order:1#reserved")
    result = cli("order:1", "--force")
    assert (result.exit_code, result.stdout) == (0, "order:1: freed on 5 nodes\n")
    assert there(servers) == [None] * 5
    assert there(servers, "redlock:order:1#reserved") == [TOKENS[0]] * 5
    result = cli(KEY, "--reservation", "--force", "--json")
    assert json.loads(result.stdout)["outcome"] == "freed"
    assert there(servers, "redlock:order:1#reserved") == [None] * 5


def test_without_a_terminal_and_without_force_it_refuses(
    cli: Cli, servers: list[LocalServer]
) -> None:
    put(servers, TOKENS[0])
    result = cli("order:1", input="y\n")
    assert result.exit_code == 4
    assert "give --force" in result.stderr
    assert json.loads(cli("order:1", "--json").stdout)["outcome"] == "refused"
    assert there(servers) == [TOKENS[0]] * 5


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 4), ("", 4)])
def test_on_a_terminal_it_shows_the_holder_and_the_danger_and_asks(
    cli: Cli,
    servers: list[LocalServer],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
) -> None:
    monkeypatch.setattr(command, "_can_ask", lambda: True)
    put(servers, TOKENS[0])
    result = cli("order:1", input=f"{answer}\n")
    assert result.exit_code == code, result.output
    for part in ("shop.charge 0123-abcd", "pid 4242 on web-1", "s left", "another may run"):
        assert part in result.stderr
    assert not TOKEN.search(result.output)
    assert there(servers) == [TOKENS[0] if code else None] * 5


@pytest.mark.parametrize(
    ("meanwhile", "code", "said", "left"),
    [
        (TOKENS[1], 4, "another's", TOKENS[1]),
        ("", 0, "was free already", None),
    ],
    ids=["another's", "gone"],
)
def test_what_changed_while_it_asked_is_left_alone(
    cli: Cli,
    servers: list[LocalServer],
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
    code: int,
    said: str,
    left: str | None,
) -> None:
    def confirm(*_question: Any, **_how: Any) -> bool:
        for server in servers:
            with redis.Redis(port=server.port) as client:
                client.delete(KEY)
        if meanwhile:
            put(servers, meanwhile)
        return True

    monkeypatch.setattr(command, "_can_ask", lambda: True)
    monkeypatch.setattr(click, "confirm", confirm)
    put(servers, TOKENS[0])
    result = cli("order:1")
    assert result.exit_code == code
    assert said in result.output
    assert there(servers) == [left] * 5


def test_what_follows_between_look_and_delete_is_left_alone(
    redlock: Redlock, servers: list[LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(servers, TOKENS[0])
    (entry,) = look(redlock, "order:1")
    run = redlock.client.driver.run

    def late(*operations: Any) -> Any:
        put(servers, TOKENS[1])
        return run(*operations)

    monkeypatch.setattr(redlock.client.driver, "run", late)
    assert force_release(redlock, entry, 20).outcome == "changed"
    assert there(servers) == [TOKENS[1]] * 5


def test_rivals_of_what_was_shown_stay(redlock: Redlock, servers: list[LocalServer]) -> None:
    put(servers[:2], TOKENS[0])
    put(servers[2:3], TOKENS[1])
    (entry,) = look(redlock, "order:1")
    freed = force_release(redlock, entry, 20)
    assert (freed.outcome, freed.nodes) == ("freed", 2)
    assert there(servers) == [None, None, TOKENS[1], None, None]


def test_the_first_in_line_is_called(cli: Cli, servers: list[LocalServer]) -> None:
    put(servers, TOKENS[0])
    clients = [redis.Redis(port=server.port) for server in servers]
    ears = [client.pubsub(ignore_subscribe_messages=True) for client in clients]
    for client, ear in zip(clients, ears, strict=True):
        client.zadd("redlock:order:1#line", {"redlock:#line:ff:7": 1})
        ear.subscribe("redlock:#line:ff")
        ear.get_message(timeout=20)  # that it listens
    assert cli("order:1", "--force").exit_code == 0
    for client, ear in zip(clients, ears, strict=True):
        message = ear.get_message(timeout=20)
        assert message is not None and message["data"] == b"7"
        assert not client.exists("redlock:order:1#line")
        ear.close()
        client.close()


def test_a_holder_that_lives_takes_it_back_if_nobody_else_does(servers: list[LocalServer]) -> None:
    holding = Redlock([server.url for server in servers], ttl=3)
    with holding.lock("order:1") as lease:
        (entry, *_) = look(holding, "order:1")
        assert force_release(holding, entry, 20).outcome == "freed"
        wait_until(lambda: None not in there(servers), 20, "it is back on all nodes")
        assert not lease.lost and look(holding, "order:1")[0].digest == entry.digest
    assert there(servers) == [None] * 5
    holding.close()


def test_a_holder_that_lives_learns_that_another_has_it(
    redlock: Redlock, servers: list[LocalServer]
) -> None:
    holding = Redlock([server.url for server in servers], ttl=3)
    with holding.lock("order:1", on_lost=lambda lease: None) as lease:
        (entry, *_) = look(redlock, "order:1")
        assert force_release(redlock, entry, 20).outcome == "freed"
        other = redlock.acquire("order:1")
        wait_until(lambda: lease.lost, 20, "its extension is refused")
        assert redlock.release(other)
    holding.close()


def test_one_of_several_holders_is_named_by_its_slot(cli: Cli, servers: list[LocalServer]) -> None:
    put(servers, TOKENS[0])
    put(servers, TOKENS[1], KEY + "#slot2")
    result = cli("order:1", "--force")
    assert result.exit_code == 2 and "--slot: 1, 2" in result.output
    assert cli("order:1", "--force", "--slot", "2").exit_code == 0
    assert there(servers) == [TOKENS[0]] * 5
    assert there(servers, KEY + "#slot2") == [None] * 5


def test_a_foreign_value_is_freed_by_its_very_value(cli: Cli, servers: list[LocalServer]) -> None:
    put(servers, "not ours")
    assert cli("order:1", "--force").exit_code == 0
    assert there(servers) == [None] * 5


def test_what_cannot_be_compared_is_left_to_the_operators_hand(
    cli: Cli, servers: list[LocalServer]
) -> None:
    for server in servers:
        with redis.Redis(port=server.port) as client:
            client.hset(KEY, "a", "b")
    result = cli("order:1", "--force")
    assert result.exit_code == 4 and "by hand" in result.stderr


def test_nothing_to_free_is_exit_code_1(cli: Cli) -> None:
    result = cli("order:1", "--force")
    assert result.exit_code == 1 and "no node has a lock of it" in result.stderr


def test_nodes_that_are_away_are_said(cli: Cli, servers: list[LocalServer]) -> None:
    put(servers, TOKENS[0])
    servers[0].kill()
    result = cli("order:1", "--force", "--timeout", "2")
    assert result.exit_code == 0
    assert f"freed on 4 nodes; 127.0.0.1:{servers[0].port} did not answer" in result.stdout
    put(servers[1:], TOKENS[0])
    for server in servers[1:3]:
        server.kill()
    assert cli("order:1", "--force").exit_code == 3
    assert there(servers[3:]) == [TOKENS[0]] * 2


@pytest.mark.parametrize(
    ("task_id", "words"),
    [
        ("0123-abcd", ["0123-abcd"]),
        ("x; touch /tmp/owned #", ["x; touch /tmp/owned #"]),
        ("$(id)`id`'\"$'", ["$(id)`id`'\"$'"]),
        ("--destination=nobody", None),
    ],
)
def test_the_command_that_stops_a_task_takes_its_id_for_one_word(
    cli: Cli,
    servers: list[LocalServer],
    monkeypatch: pytest.MonkeyPatch,
    task_id: str,
    words: list[str] | None,
) -> None:
    """Whoever may write to the nodes says what the id is, and an operator copies the line."""
    put(servers, Owner("web-1", 4242, task_id, task="shop.charge").token("0" * 32, 1.7e9))
    monkeypatch.setattr(command, "_can_ask", lambda: True)
    said = cli("order:1", input="n\n").output
    found = [line.partition("celery -A")[2] for line in said.splitlines() if "terminate" in line]
    assert [shlex.split(line)[4:] for line in found] == ([words] if words else [])
