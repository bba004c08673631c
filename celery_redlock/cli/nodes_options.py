"""The options --nodes, --prefix and --docs: of the command group, and of each command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["nodes_options"]


def nodes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command, or a group of them, with --nodes, --prefix and --docs."""
    nodes = click.option(
        "--nodes",
        metavar="URL[,URL...]",
        help="The nodes, where there is no app. Others on this machine can see their passwords on"
        " the command line: better set REDLOCK_NODES in the environment.",
    )
    prefix = click.option(
        "--prefix", metavar="TEXT", help="What the keys on the nodes begin with, without an app."
    )
    docs = click.option(
        "--docs",
        metavar="ADDRESS",
        help="Where the pages of the documentation are, without an app:"
        " https://docs.example.org/{page}.html",
    )
    return nodes(prefix(docs(command)))
