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
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import click

from ..locking.redlock import Redlock
from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.values import printable

__all__ = [
    *("NO_QUORUM", "PROBLEM", "REFUSED", "SECONDS", "USAGE"),
    *("Site", "as_json", "listen_option", "load_app", "on_site", "table"),
]

_UNFIT = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters that JSON lets pass, those that turn a line round, and half characters."""
PROBLEM, USAGE, NO_QUORUM, REFUSED = 1, 2, 3, 4
"""Exit codes; see above."""


class _Seconds(click.FloatRange):
    """Seconds to wait: a number that is one, and that a socket takes."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        given: float = super().convert(value, param, ctx)
        if given != given:
            self.fail("nan is no number of seconds", param, ctx)
        return given


SECONDS = _Seconds(min=0.01, max=3600.0)


def listen_option(port: int, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command that serves: --listen HOST:PORT, on loopback unless told otherwise."""
    usual = f"127.0.0.1:{port}"

    def parsed(_ctx: Any, _parameter: Any, given: str) -> tuple[str, int]:
        host, colon, number = given.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not re.fullmatch("[0-9]{1,5}", number) or int(number) > 65535:
            raise click.BadParameter(f"it must be HOST:PORT, as {usual}; it is {given!r}")
        return host, int(number)

    return click.option(
        "--listen",
        default=usual,
        show_default=True,
        metavar="HOST:PORT",
        callback=parsed,
        help=help,
    )


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

    def need_app(self, what: str) -> Any:
        """The app.

        Raises:
            click.UsageError: There is none.
        """
        if self.app is None:
            raise click.UsageError(f"{what} needs an app, not only nodes: -A APP")
        return self.app

    def say(self, data: Any, text: str | Callable[[], str]) -> None:
        """What was found: `data` as JSON for a program, else `text`."""
        if self.as_json:
            click.echo(as_json(data, indent=2))
        else:
            click.echo(text if isinstance(text, str) else text())


def as_json(data: Any, indent: int | None = None) -> str:
    """JSON of foreign text: what terminals obey, or no UTF-8 can have, stands there escaped."""
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    return _UNFIT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def on_site(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function of a command: it is given a `Site`, and has the option --json.

    It returns its exit code, or None for 0. Errors that a user can do something about are said in a
    sentence, without a traceback; with --json as `{"error": ...}` on stdout.
    """

    @click.option("--json", "as_json", is_flag=True, help="For programs: JSON on stdout.")
    @click.pass_obj
    @functools.wraps(command)
    def run(site: Site, /, as_json: bool, **given: Any) -> None:
        site.as_json = as_json
        try:
            code = command(site, **given)
        except ConfigurationError as error:
            _fail(site, f"cannot work: {error}", USAGE)
        except QuorumUnavailable as error:
            _fail(site, str(error), NO_QUORUM)
        if code:
            sys.exit(code)

    return run


def _fail(site: Site, message: str, code: int) -> NoReturn:
    if site.as_json:
        click.echo(as_json({"error": printable(message)}))
    else:
        click.echo(printable(message), err=True)
    sys.exit(code)


def load_app(name: str) -> Any:
    """The Celery app that `-A` names.

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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for people: in colour and fitted to a terminal with rich, else in plain text."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        try:
            return _rich(columns, cells)
        except ImportError:
            pass
    lines = [list(columns), *cells]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")  # whole, to be copied
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    console = Console()
    with console.capture() as capture:
        console.print(made)
    return capture.get().rstrip("\n")
