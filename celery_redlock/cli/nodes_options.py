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
        help="The nodes, if there is no app. Others on this machine can see their passwords on the"
        " command line: it is better to set REDLOCK_NODES in the environment.",
    )
    prefix = click.option(
        "--prefix", metavar="TEXT", help="Prefix of the keys on the nodes, if there is no app."
    )
    docs = click.option(
        "--docs",
        metavar="ADDRESS",
        help="Address of the documentation's pages, if there is no app:"
        " https://docs.example.org/{page}.html",
    )
    return nodes(prefix(docs(command)))
