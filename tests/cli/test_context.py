"""How a command finds its nodes, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
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
def test_what_cannot_be_meant_is_said(arguments: str, words: str) -> None:
    result = CliRunner().invoke(main, arguments.split())
    assert result.exit_code == 2 and words in result.output, result.output
