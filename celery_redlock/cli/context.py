"""What a command works on: an app's nodes, or those that were named; and how it says what it found.

Exit codes, of all commands:

- 0: done; nothing is wrong.
- 1: it found something wrong, or did not find what it was asked for.
- 2: it was called wrongly, or the configuration cannot work.
- 3: too few nodes answered to tell.
- 4: refused: what was to be done would not have been what was asked for.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ..locking.redlock import Redlock
from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.values import printable
from ..stores.redis.address import parse_nodes
from .formatting import lines, without_quorum

__all__ = ["BOTH", "NO_QUORUM", "PROBLEM", "REFUSED", "Site", "as_json", "load_app"]
__all__ += ["nodes_options", "on_site", "table"]

PROBLEM, USAGE, NO_QUORUM, REFUSED = 1, 2, 3, 4
"""Exit codes; see above."""
BOTH = "give --app or --nodes, not both: an app names its own nodes"


@dataclass
class Site:
    """What a command works on.

    Attributes:
        app: The Celery app; None where only nodes were named.
        nodes: Their URLs, where there is no app.
        prefix: Of the keys, where there is no app.
        as_json: Whether a program reads what is said.
    """

    app: Any = None
    nodes: Sequence[str] | None = None
    prefix: str | None = None
    as_json: bool = False
    _redlock: Redlock | None = field(default=None, repr=False)

    @property
    def redlock(self) -> Redlock:
        """The lock over its nodes. A look at them needs no restart guard.

        Raises:
            click.UsageError: No nodes are known.
            ConfigurationError: They cannot be nodes.
        """
        if self._redlock is None:
            if self.nodes:
                given: dict[str, Any] = {} if self.prefix is None else {"prefix": self.prefix}
                self._redlock = Redlock(self.nodes, restart_guard="off", **given)
            elif self.app is not None:
                self._redlock = Redlock.from_app(self.app)
            else:
                raise click.UsageError(
                    "which nodes? Name an app (celery -A APP redlock ..., celery-redlock -A APP"
                    " ...) or the nodes (celery-redlock --nodes redis://host:6379/0,...)"
                )
        return self._redlock

    def take_nodes(self, nodes: str | None, prefix: str | None) -> None:
        """Take the nodes, and the prefix of the keys, from the command line.

        Args:
            nodes: Their URLs, with commas between; None for those that are known already.
            prefix: The prefix; None for that which is known already.

        Raises:
            click.UsageError: An app is known, or a URL cannot be understood.
        """
        if nodes is not None and self.app is not None:
            raise click.UsageError(BOTH)
        if nodes is not None:
            self.nodes = [url.strip() for url in nodes.split(",") if url.strip()]
            _check(self.nodes)
        self.prefix = self.prefix if prefix is None else prefix

    def say(self, data: Any, text: str) -> None:
        """Print what was found: `data` as JSON for a program, else `text`."""
        click.echo(as_json(data, indent=2) if self.as_json else text)

    def fail_without_quorum(self, error: QuorumUnavailable) -> int:
        """Print which nodes do not answer, a line each; return the exit code."""
        if self.as_json:
            return self.fail(str(error), NO_QUORUM)
        click.echo(lines(*without_quorum(error)), err=True)
        return NO_QUORUM

    def fail(self, message: str, code: int, **data: Any) -> int:
        """Print why nothing was found, for programs as JSON; return the exit code."""
        if self.as_json:
            click.echo(as_json({"error": printable(message), **data}))
        else:
            click.echo(printable(message), err=True)
        return code


def on_site(command: Callable[..., int | None]) -> Callable[..., None]:
    """Decorate the function of a command: it is given a `Site`, and has the option --json.

    It returns its exit code, or None for 0. Errors that a user can do something about are said in a
    sentence, without a traceback; with --json as `{"error": ...}` on stdout.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    @nodes_options
    @click.pass_obj
    @functools.wraps(command)
    def run(
        site: Site, /, as_json: bool, nodes: str | None, prefix: str | None, **given: Any
    ) -> None:
        site.as_json = as_json
        site.take_nodes(nodes, prefix)
        try:
            code = command(site, **given)
        except ConfigurationError as error:
            code = site.fail(f"cannot work: {error}", USAGE)
        except QuorumUnavailable as error:
            code = site.fail_without_quorum(error)
        if code:
            sys.exit(code)

    return run


def nodes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command, or a group of them, with --nodes and --prefix."""
    nodes = click.option(
        "--nodes",
        metavar="URL[,URL...]",
        help="The nodes, where there is no app. Others on this machine can see their passwords on"
        " the command line: better set REDLOCK_NODES in the environment.",
    )
    prefix = click.option(
        "--prefix", metavar="TEXT", help="What the keys on the nodes begin with, without an app."
    )
    return nodes(prefix(command))


def load_app(name: str) -> Any:
    """Return the Celery app that `-A` names.

    Raises:
        click.UsageError: It cannot be loaded; the text says why.
    """
    from celery.app.utils import find_app

    sys.path.insert(0, "")  # as `celery -A` does
    try:
        return find_app(name)
    except Exception as error:
        raise click.UsageError(
            f"cannot load the app {name!r}: {type(error).__name__}: {error}"
        ) from None


def _check(nodes: Sequence[str]) -> None:
    """Check each URL by itself, so that all that are wrong are said at once, a line each.

    Raises:
        click.UsageError: One of them cannot be understood.
    """
    wrong = []
    for number, url in enumerate(nodes, 1):
        try:
            parse_nodes([url])
        except ConfigurationError as error:
            wrong.append(f"node {number} of --nodes: {str(error).partition(': ')[2]}")
    if wrong:
        raise click.UsageError("\n".join(wrong))


def as_json(data: Any, indent: int | None = None) -> str:
    """Return JSON of foreign text, in ASCII and without control characters."""
    return json.dumps(data, indent=indent).replace("\x7f", r"\u007f")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for people: fitted to a terminal by rich, else plain text."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        try:
            from rich.console import Console

            from .live import rich_table
        except ImportError:
            pass
        else:
            console = Console()
            with console.capture() as captured:
                console.print(rich_table(columns, cells))
            return captured.get().rstrip("\n")
    lines = [columns, *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)
