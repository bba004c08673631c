"""Release of all matching keys: those that were listed, and living holders only on demand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_redlock.cli import release as command
from celery_redlock.cli.release import force_release
from celery_redlock.server import LocalServer
from tests.tools.cli.clinic import TOKENS, put

Cli = Callable[..., Any]
Nodes = list[redis.Redis]


def keys(admins: Nodes) -> list[str]:
    """Return the keys of all nodes, without the prefix."""
    found = {str(key) for admin in admins for key in admin.keys("redlock:*")}
    return sorted(name.removeprefix("redlock:") for name in found if "nonce" not in name)


@pytest.fixture
def lying(admins: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Reservations, a living lock, the rest of one, a key without a ttl, and others' keys."""
    monkeypatch.setattr(command, "SETTLED_S", 0.1)
    put(admins, "redlock:order:1#reserved", TOKENS[0])
    put(admins, "redlock:order:2", TOKENS[0])
    put(admins, "redlock:order:2#reserved", TOKENS[1])  # of the task that holds it
    put(admins[:2], "redlock:order:3", TOKENS[0])
    for admin in admins:
        admin.set("redlock:order:4", TOKENS[0])
    put(admins, "redlock:order:5", "not ours")
    put(admins, "redlock:invoice:1#reserved", TOKENS[0])
    return admins


ALL = [
    *("invoice:1#reserved", "order:1#reserved", "order:2", "order:2#reserved", "order:3"),
    *("order:4", "order:5"),
]
LIVING = ["invoice:1#reserved", "order:2", "order:2#reserved", "order:5"]


def test_release_match_with_dry_run_lists_and_frees_nothing(cli: Cli, lying: Nodes) -> None:
    result = cli("release", "--match", "order:*", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "order:1 (reservation)" in result.stdout and "invoice" not in result.stdout
    assert "3 keys of 6 to be freed; nothing was done" in result.stdout
    assert "left alone, a quorum holds it: --force frees it" in result.stdout
    assert keys(lying) == ALL


def test_release_match_with_yes_frees_only_keys_without_a_living_holder(
    cli: Cli, lying: Nodes
) -> None:
    result = cli("release", "--match", "redlock:order:*", "--yes")
    assert result.exit_code == 4, result.output
    assert "order:4: freed on 5 nodes" in result.stdout and "3 keys freed, 3 left" in result.stdout
    assert keys(lying) == LIVING


def test_release_match_with_force_frees_living_holders_too(cli: Cli, lying: Nodes) -> None:
    result = cli("release", "--match", "order:*", "--yes", "--force", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["outcome"] == "freed"
    assert {one["outcome"] for one in told["entries"]} == {"freed"}
    assert keys(lying) == ["invoice:1#reserved"]


def test_release_match_with_reservation_frees_only_reservations(cli: Cli, lying: Nodes) -> None:
    result = cli("release", "--match", "*", "--reservation", "--yes", "--json")
    told = json.loads(result.stdout)["entries"]
    assert result.exit_code == 4 and {one["kind"] for one in told} == {"reservation"}
    assert [one["lives"] for one in told] == ["", "", "its task is at work"]
    assert keys(lying) == ["order:2", "order:2#reserved", "order:3", "order:4", "order:5"]


@pytest.mark.parametrize(("answer", "left"), [("y", LIVING), ("n", ALL)])
def test_release_match_without_yes_asks(
    cli: Cli, lying: Nodes, monkeypatch: pytest.MonkeyPatch, answer: str, left: list[str]
) -> None:
    assert cli("release", "--match", "order:*").exit_code == 4  # nobody to ask
    assert keys(lying) == ALL
    monkeypatch.setattr(command, "can_ask", lambda: True)
    result = cli("release", "--match", "order:*", input=f"{answer}\n")
    assert result.exit_code == 4 and "another of the same key may then" in result.stderr
    assert keys(lying) == left


def test_release_match_leaves_a_key_that_changed_since_the_list(
    cli: Cli, lying: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(*arguments: Any, **how: Any) -> Any:
        put(lying, "redlock:order:1#reserved", TOKENS[2])
        return force_release(*arguments, **how)

    monkeypatch.setattr(command, "force_release", later)
    result = cli("release", "--match", "order:1", "--yes")
    assert result.exit_code == 4 and "or it is another's" in result.stdout
    assert lying[0].get("redlock:order:1#reserved") == TOKENS[2]


def test_release_match_leaves_a_key_that_was_just_being_taken(
    cli: Cli, lying: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node had it; by now a body is at work."""
    monkeypatch.setattr(time, "sleep", lambda _s: put(lying, "redlock:order:3", TOKENS[0]))
    result = cli("release", "--match", "order:3", "--yes")
    assert result.exit_code == 4 and "not freed: by now a quorum holds it" in result.stdout
    assert [admin.get("redlock:order:3") for admin in lying] == [TOKENS[0]] * 5


def test_release_match_leaves_a_held_key_with_a_leak_on_one_node(cli: Cli, lying: Nodes) -> None:
    lying[0].persist("redlock:order:2")
    result = cli("release", "--match", "order:2", "--yes")
    assert "left alone, a quorum holds it" in result.stdout, result.output
    assert "order:2" in keys(lying)


def test_release_match_leaves_a_key_that_silent_nodes_may_hold(
    cli: Cli, lying: Nodes, servers: list[LocalServer]
) -> None:
    for server in servers[3:]:
        server.kill()
    try:
        result = cli("release", "--match", "order:3", "--dry-run", "--timeout", "1")
    finally:
        for server in servers[3:]:
            server.start()
    assert "left alone, a quorum may hold it: nodes do not answer" in result.stdout


def test_release_match_frees_nothing_without_a_quorum(
    cli: Cli, lying: Nodes, servers: list[LocalServer]
) -> None:
    for server in servers[:3]:
        server.kill()
    result = cli("release", "--match", "order:*", "--yes", "--timeout", "1")
    assert result.exit_code == 3 and "2 of 5 nodes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "name one KEY, or give --match"),
        (["order:1", "--match", "order:*"], 2, "not both"),
        (["order:1", "--yes"], 2, "go with --match"),
        (["--match", "*", "--yes", "--dry-run"], 2, "give one of them"),
        (["--match", "*", "--slot", "2"], 2, "--slot and --digest go with one KEY"),
        (["--match", "order:[1"], 2, "closes each '['"),
        (["--match", "order:\\"], 2, "does not end in a backslash"),
        (["--match", ""], 2, "has 1 to 512 characters"),
        (["--match", "nothing:*", "--yes"], 1, "nothing that fits"),
    ],
)
def test_release_refuses_contradictory_options(
    cli: Cli, lying: Nodes, arguments: list[str], code: int, said: str
) -> None:
    result = cli("release", *arguments)
    assert result.exit_code == code and said in result.output, result.output
    assert keys(lying) == ALL
