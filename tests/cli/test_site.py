"""How a command finds its nodes, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner

from celery_redlock.cli import main, redlock
from celery_redlock.cli.context import Site, on_site, table
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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("ttl must be"), 2),
        (QuorumUnavailable("2 of 5 nodes", resource="r", votes=()), 3),
    ],
    ids=lambda given: type(given).__name__,
)
def test_an_error_is_a_sentence_and_an_exit_code(error: Exception, code: int) -> None:
    def fails(site: Site) -> None:
        raise error

    result = call(fails)
    assert result.exit_code == code
    assert str(error) in result.output and "Traceback" not in result.output
    for_programs = call(fails, "--json")
    assert for_programs.exit_code == code
    assert str(error) in json.loads(for_programs.stdout)["error"]


def test_without_nodes_it_says_how_to_name_them() -> None:
    result = call(lambda site: site.redlock and None)
    assert result.exit_code == 2
    assert "--nodes" in result.output


def test_an_app_and_nodes_are_one_too_many() -> None:
    result = CliRunner().invoke(main, ["-A", "x", "--nodes", "redis://h/0", "demo"])
    assert result.exit_code == 2
    assert "not both" in result.output


def test_an_app_that_is_none_is_said() -> None:
    result = CliRunner().invoke(main, ["-A", "no.such.app", "demo"])
    assert result.exit_code == 2
    assert "cannot load the app 'no.such.app'" in result.output


def test_json_is_for_programs() -> None:
    def speak(site: Site) -> None:
        site.say({"key": "ä"}, "a key")

    assert json.loads(call(speak, "--json").output) == {"key": "ä"}
    assert call(speak).output == "a key\n"


def test_a_table_is_plain_where_nobody_looks() -> None:
    text = table(["key", "n"], [["order:1", 3], ["evil\x1b[31m", 10]])
    head, first, _second = text.splitlines()
    assert head.split() == ["key", "n"] and first.split() == ["order:1", "3"]
    assert head.index("n") == first.index("3")
    assert "\x1b" not in text


@pytest.mark.parametrize("command", ["doctor", "explain", "exporter", "ls", "release", "show"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300", "-1", "0"])
def test_a_timeout_is_a_number_of_seconds(command: str, seconds: str) -> None:
    group = click.Context(main).command
    assert isinstance(group, click.Group)
    found = group.get_command(click.Context(main), command)
    (option,) = (it for it in found.params if it.name == "timeout") if found else ()
    with pytest.raises(click.BadParameter):
        option.type.convert(seconds, option, None)
