"""Commands: how they find their nodes, and how they end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from click.testing import CliRunner

from celery_redlock.cli import main, redlock
from celery_redlock.cli.context import Site, on_site
from celery_redlock.protocol.errors import ConfigurationError, QuorumUnavailable


def call(body: Any, *arguments: str, site: Site | None = None) -> Any:
    command = click.command()(on_site(body))
    return CliRunner().invoke(command, arguments, obj=site or Site())


@pytest.mark.parametrize("group", [main, redlock], ids=lambda group: group.name)
def test_help_names_every_command(group: click.Group) -> None:
    context = click.Context(group)
    output = CliRunner().invoke(group, ["--help"]).output
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None and name in output


@pytest.mark.parametrize("group", [main, redlock], ids=lambda group: group.name)
def test_help_fits_80_columns_and_cuts_no_sentence(group: click.Group) -> None:
    texts = [["--help"], *([name, "--help"] for name in group.list_commands(click.Context(group)))]
    for arguments in texts:
        result = CliRunner().invoke(group, arguments, obj=None, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        # The metavar of --nodes alone says that there may be more.
        assert "..." not in result.output.replace("[,URL...]", "").replace("[ARGS]...", "")
        assert all(len(line) <= 80 for line in result.output.splitlines())


def test_nodes_may_stand_before_the_command_and_after_it() -> None:
    one, other = "redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0"
    nodes = ["--nodes", f"{one},{other}", "--prefix", "p:"]
    said = [CliRunner().invoke(main, arguments) for arguments in (
        [*nodes, "ls"], ["ls", *nodes], ["--nodes", "redis://127.0.0.1:3/0", "ls", *nodes],
    )]  # fmt: skip
    for result in said:
        assert result.exit_code == 3
        assert result.stderr == said[0].stderr
    both = CliRunner().invoke(redlock, ["ls", *nodes], obj=SimpleNamespace(app=Celery("shop")))
    assert both.exit_code == 2 and "not both" in both.output
    after = CliRunner().invoke(main, ["ls", *nodes], env={"REDLOCK_NODES": "redis://10.0.0.9/0"})
    assert after.stderr == said[0].stderr


def test_command_without_an_app_asks_for_one_by_its_option() -> None:
    """Celery passes its default app, if there is no -A."""
    default = SimpleNamespace(app=Celery("default", set_as_current=False))
    for words in ("ls", "doctor", "purge -Q celery", "pause x --for 1h", "show x", "stats"):
        result = CliRunner().invoke(redlock, words.split(), obj=default)
        assert result.exit_code == 2 and "celery -A APP redlock " in result.stderr, words
        assert "set_default" not in result.output
    away = ["ls", "--nodes", "redis://127.0.0.1:1"]
    assert CliRunner().invoke(redlock, away, obj=default).exit_code == 3
    default.app.conf.redlock_nodes = ["redis://127.0.0.1:4/0"]  # as in a celeryconfig.py
    assert "node 127.0.0.1:4 does" in CliRunner().invoke(redlock, ["ls"], obj=default).stderr


def test_hint_names_the_command_line_that_was_given() -> None:
    assert Site(app=Celery("shop")).command("resume", "a b") == "celery -A APP redlock resume 'a b'"
    there = Site(nodes=["redis://:SECRET@host"], prefix="p:")
    assert there.command("show", "x") == "celery-redlock --nodes URL,... --prefix p: show x"


def test_nodes_of_an_app_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.redlock_nodes = ["redis://127.0.0.1:4/0"]
    monkeypatch.setattr("celery_redlock.cli.context.load_app", lambda _name: app)
    monkeypatch.setenv("REDLOCK_NODES", "redis://127.0.0.1:1/0")
    assert "node 127.0.0.1:4 does" in CliRunner().invoke(main, ["-A", "shop", "ls"]).stderr


def test_each_wrong_or_unreachable_node_has_a_line_of_its_own() -> None:
    away = CliRunner().invoke(main, ["ls", "--nodes", "redis://127.0.0.1:1,redis://127.0.0.1:2"])
    head, first, second = away.stderr.splitlines()
    assert head == "0 of 2 nodes answered; 2 are needed"
    assert first.startswith("node 127.0.0.1:1 does not answer: ")
    assert second.startswith("node 127.0.0.1:2 does not answer: ")
    alone = CliRunner().invoke(main, ["ls", "--nodes", "redis://127.0.0.1:1"])
    assert alone.stderr.splitlines()[0] == "0 of 1 node answered; 1 is needed"
    wrong = "host:6379,redis://127.0.0.1:1,http://host,redis://user:SECRET/x@host:1/0"
    result = CliRunner().invoke(main, ["--nodes", wrong, "ls"])
    said = result.stderr.partition("Error: ")[2].splitlines()
    assert result.exit_code == 2 and "SECRET" not in result.output
    assert [line.partition(": ")[0] for line in said] == [f"--nodes[{n}]" for n in (0, 2, 3)]
    assert "write redis://host:6379" in said[0] and "'http'" in said[1]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("ttl must be"), 2),
        (QuorumUnavailable("2 of 5 nodes", resource="r", votes=()), 3),
    ],
    ids=lambda given: type(given).__name__,
)
def test_error_of_a_command_is_a_sentence_and_an_exit_code(error: Exception, code: int) -> None:
    def fails(site: Site) -> None:
        raise error

    result = call(fails)
    assert result.exit_code == code
    assert str(error) in result.output and "Traceback" not in result.output
    for_programs = call(fails, "--json")
    assert for_programs.exit_code == code
    assert str(error) in json.loads(for_programs.stdout)["error"]


TIMED = ("doctor", "explain x", "exporter", "ls", "release x", "show x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ls", "--nodes"),
        ("-A x --nodes redis://h/0 ls", "not both"),
        ("-A no.such.app ls", "cannot load the app 'no.such.app'"),
        ("--nodes redis://h/0 explain x", "explain needs an app"),
        *(
            (f"--nodes redis://h/0 exporter --listen {listen}", "it must be HOST:PORT")
            for listen in ("9467", ":9467", "host:", "host:port", "host:70000")
        ),
        *(
            (f"--nodes redis://h/0 {command} --timeout {seconds}", "Invalid value for '--timeout'")
            for command in TIMED
            for seconds in ("nan", "inf", "1e300", "-1", "0")
        ),
    ],
)
def test_contradictory_or_unusable_options_of_a_command_are_refused(
    arguments: str, words: str
) -> None:
    result = CliRunner().invoke(main, arguments.split())
    assert result.exit_code == 2 and words in result.output, result.output
