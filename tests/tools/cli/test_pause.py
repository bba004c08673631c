"""Pausing keys from a shell, and seeing everywhere that they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from celery_redlock import Redlock, locked
from celery_redlock.cli import pause as pause_command
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.locking import pauses
from celery_redlock.server import LocalServer
from celery_redlock.survey.exporter import exposition, make_registry
from tests.tools.cli.clinic import shop

Cli = Callable[..., Any]


def test_key_can_be_paused_shown_and_resumed(cli: Cli, redlock: Redlock) -> None:
    result = cli(
        "pause", "--yes", "redlock:order:*", "--for", "1h30m", "--reason", "a \x1b[31mbad release"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("order:* is paused by ") and "\x1b" not in result.stdout
    ((pause,), _) = pauses.in_force(redlock)
    assert 5390 < pause.ends_in <= 5400 and "@" in pause.who
    for command in (["ls"], ["show", "order:7"], ["watch", "--count", "1"]):
        said = cli(*command).stdout
        assert "order:* is paused by" in said and "\\x1b[31mbad release" in said, said
    told = json.loads(cli("show", "order:7", "--json").stdout)["pauses"]
    assert told[0]["pattern"] == "order:*" and told[0]["by"] == pause.who
    assert cli("show", "mail:7").exit_code == 1
    result = cli("resume", "order:7")
    assert result.exit_code == 1 and "order:7: no such pause" in result.stdout
    assert "still paused: order:* is paused by" in result.stdout
    result = cli("resume", "order:*")
    assert (result.exit_code, result.stdout) == (0, f"order:*: resumed; paused by {pause.who}\n")
    assert "paused" not in cli("ls").stdout and "#pause" not in cli("ls", "--all").stdout


def test_explain_says_that_a_paused_body_waits(cli: Cli, servers: list[LocalServer]) -> None:
    cli("pause", "--yes", "order:*", "--for", "60s", "--reason", "stop")
    app = shop([server.url for server in servers])
    site = Site(app=app)
    result = CliRunner().invoke(group, ["explain", "shop.charge", "[7]", "--json"], obj=site)
    told = json.loads(result.stdout)
    assert told["run"]["outcome"] == "paused" and told["pauses"][0]["reason"] == "stop"
    assert told["publish"]["outcome"] != "paused"
    site.redlock.close()


def test_limit_can_be_set_shown_and_ended(cli: Cli, redlock: Redlock) -> None:
    result = cli("limit", "--yes", "redlock:order:*", "5", "--for", "2h", "--reason", "a slow API")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("order:* is limited to 5 at a time by ")
    assert "exclusive keys stay so, and readers (shared) unlimited" in result.stdout
    for command in (["ls"], ["show", "order:7"], ["watch", "--count", "1"]):
        said = cli(*command).stdout
        assert "order:* is limited to 5 at a time by" in said and "a slow API" in said, said
    told = json.loads(cli("show", "order:7", "--json").stdout)["pauses"]
    assert (told[0]["limit"], told[0]["pattern"]) == (5, "order:*")
    assert "pause_ends_in_seconds{" not in exposition(make_registry(redlock, timeout=30.0))
    result = cli("resume", "order:*")
    assert result.stdout.startswith("order:*: no longer limited; limited by ")
    assert "limited" not in cli("ls").stdout


def test_explain_counts_with_the_limit_in_force(
    cli: Cli, redlock: Redlock, servers: list[LocalServer]
) -> None:
    app = shop([server.url for server in servers])

    @app.task(name="shop.export", shared=False)
    @locked("tenant:<tenant>", "all", limit=(3, 20))
    def export(tenant: str) -> None: ...

    def explained() -> tuple[str, Any]:
        site = Site(app=app)
        arguments = ["explain", "shop.export", '["acme"]']
        said = CliRunner().invoke(group, arguments, obj=site).stdout
        told = CliRunner().invoke(group, [*arguments, "--json"], obj=site).stdout
        site.redlock.close()
        return said, json.loads(told)

    with redlock.lock(["tenant:acme", "all"], limit=[3, 20]):
        said, told = explained()
        assert told["limits"] == [20, 3] and told["run"]["outcome"] == "run"
        assert "19 of 20 slots of all free, 2 of 3 slots of tenant:acme free" in said
        assert "tenant:acme, 3 at a time" in said
        cli("limit", "--yes", "tenant:acme", "1", "--for", "60s")
        said, told = explained()
        assert told["limits"] == [20, 1] and told["run"]["outcome"] == "again"
        assert "tenant:acme is limited to 1 at a time by" in said


@pytest.mark.parametrize("number", ["0", "101", "-1", "x"])
def test_invalid_number_for_a_limit_is_refused(cli: Cli, redlock: Redlock, number: str) -> None:
    result = cli("limit", "--for", "1h", "--", "order:*", number)
    assert result.exit_code == 2, result.output
    assert pauses.in_force(redlock) == ((), True)


def test_exporter_shows_when_a_pause_ends(cli: Cli, redlock: Redlock) -> None:
    name = "celery_redlock_pause_ends_in_seconds"
    assert f"{name}{{" not in exposition(make_registry(redlock, timeout=30.0))
    cli("pause", "--yes", "order:*", "--for", "60s")
    text = exposition(make_registry(redlock, timeout=30.0))
    assert f'{name}{{pattern="order:*"}} 5' in text or f'{name}{{pattern="order:*"}} 6' in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["order:*"], "Missing option '--for'"),
        (["order:*", "--for", "60"], "give a number and a unit"),
        (["order:*", "--for", "1h x"], "give a number and a unit"),
        (["order:*", "--for", "0s"], "lasts 1 second to 7 days"),
        (["order:*", "--for", "8d"], "lasts 1 second to 7 days"),
        (["order:[", "--for", "1h"], "closes each '['"),
        (["", "--for", "1h"], "1 to 512 characters"),
        (["order:*", "--for", "1h", "--reason", "x" * 201], "at most 200 characters"),
    ],
)
def test_invalid_pause_command_is_refused(
    cli: Cli, redlock: Redlock, arguments: list[str], said: str
) -> None:
    result = cli("pause", *arguments)
    assert result.exit_code == 2 and said in result.output, result.output
    assert pauses.in_force(redlock) == ((), True)


def test_pause_limit_and_resume_fail_without_a_quorum(cli: Cli, servers: list[LocalServer]) -> None:
    for server in servers[:3]:
        server.kill()
    for command, so in {
        ("pause", "order:*", "--for", "1h"): "nothing has changed",
        ("limit", "order:*", "3", "--for", "1h"): "nothing has changed",
        ("resume", "order:*"): "it may go on",
    }.items():
        result = cli(*command)
        assert result.exit_code == 3
        assert result.stderr.startswith(f"order:*: {so}: 3 of 5 nodes did not vote; 3 are needed")


def test_pause_beyond_the_maximum_is_refused(cli: Cli, redlock: Redlock) -> None:
    for number in range(16):
        pauses.begin(redlock, f"order:{number}", 60.0, "alice")
    result = cli("pause", "--yes", "order:*", "--for", "1h")
    assert result.exit_code == 4 and "16 pauses are in force" in result.stderr


COMMANDS = (["pause", "{}", "--for", "60s"], ["limit", "{}", "5", "--for", "60s"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_the_keys_that_a_pattern_fits_now_are_named(
    cli: Cli, redlock: Redlock, admins: list[Any], command: list[str]
) -> None:
    def said(pattern: str, *more: str) -> str:
        result = cli(*(word.format(pattern) for word in command), *more)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    def ends(pattern: str) -> str:
        return f"celery-redlock --nodes URL,... resume '{pattern}'\n"

    with redlock.lock("order:7"), redlock.lock("mail:1"):
        for admin in admins:
            admin.zadd("redlock:order:7#line", {"p:1": 1.0, "p:2": 2.0})
        assert "it fits 1 key now: order:7 (held, 2 waiting)\n" in said("order:*")
        assert json.loads(said("order:*", "--json"))["keys"] == {"order:7": "held, 2 waiting"}
        assert "it fits 2 keys now: mail:1 (held); order:7 (held, 2 waiting)\n" in said("*")
        with redlock.lock([f"export:{number:02}" for number in range(12)]):
            assert said("export:*").endswith(
                "export:09 (held); 2 more\nto end it before that: " + ends("export:*")
            )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_pattern_that_fits_no_key_is_asked_about(
    cli: Cli,
    redlock: Redlock,
    servers: list[LocalServer],
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = shop([server.url for server in servers])

    def run(pattern: str, *more: str, site: Site | None = None, **how: Any) -> Any:
        arguments = [word.format(pattern) for word in command]
        if site is None:
            return cli(*arguments, *more, **how)
        return CliRunner().invoke(group, [*arguments, *more], obj=site, **how)

    def set_now() -> set[str]:
        return {one.pattern for one in pauses.in_force(redlock)[0]}

    nothing = "is held or waited for, and no task of the app has such keys"
    site = Site(app=app)
    with redlock.lock("mail:7"):
        assert nothing not in run("mail:*").output
        for fits in ("order:*", "order:7", "ord*", "*", "mail:?", "[o]rder:*", "redlock:order:1"):
            result = run(fits, site=site)
            assert result.exit_code == 0 and nothing not in result.output, fits
        assert result.output.endswith("celery -A APP redlock resume order:1\n")
        before = set_now()
        for fits_not in ("ordr:*", "ordr:7", "mails:*", "shop.charge:*"):
            result = run(fits_not, site=site)
            assert result.exit_code == 4, fits_not
            assert f"no key that fits {fits_not} {nothing}" in result.stderr, fits_not
            assert "give --yes" in result.stderr
        assert run("other:*").exit_code == 4, "without an app only the nodes are asked"
        monkeypatch.setattr(pause_command, "can_ask", lambda: True)
        assert run("other:*", input="n\n").exit_code == 4 and set_now() == before
        assert run("other:*", input="y\n").exit_code == 0
        result = run("ordr:*", "--yes", "--json", site=site)
        assert json.loads(result.stdout)["fits"] is False
        assert set_now() == {*before, "other:*", "ordr:*"}
    site.redlock.close()
