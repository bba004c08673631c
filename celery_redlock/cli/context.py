"""The target of a command, the options shared by several commands, and their output.

Exit codes of all commands:

- 0: done; nothing is wrong.
- 1: it found something wrong, or did not find what it was asked for.
- 2: wrong usage, or a configuration that cannot work.
- 3: too few nodes answered.
- 4: refused, because the effect would have differed from what was asked for.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

import click

from ..config.options import check_option
from ..config.settings import page_address
from ..locking.redlock import Redlock
from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.names import matching
from ..protocol.texts import printable
from ..stores.kinds import listed, parse_nodes
from ..survey.models import KINDS, Survey
from ..survey.snapshot import survey
from ..survey.waiting import at_once, count_parked
from .formatting import cells, lines, padded, without_quorum
from .nodes_options import nodes_options

__all__ = ["BOTH", "NO_QUORUM", "PROBLEM", "REFUSED", "USUAL_KINDS", "WORKERS_TIMEOUT_S"]
__all__ += ["Site", "as_json", "can_ask", "choosing", "listen_option", "load_app", "on_site"]
__all__ += ["table", "timeout_option"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PROBLEM, USAGE, NO_QUORUM, REFUSED = 1, 2, 3, 4
"""Exit codes; see above."""
USUAL_KINDS = ("lock", "start", "reservation", "foreign")
"""Key kinds shown by default."""
WORKERS_TIMEOUT_S = 1.0
"""Seconds to wait for workers. It is always spent whole: the number of workers is not known."""
BOTH = "give --app or --nodes, not both: an app names its own nodes"


@dataclass
class Site:
    """The target of a command: an app, or nodes given by URL."""

    app: Any = None
    nodes: Sequence[str] | None = None
    prefix: str | None = None  # of the keys, if there is no app
    docs: str | None = None  # where the pages of the documentation are, if there is no app
    as_json: bool = False  # True if the output is for a program
    chosen: str = ""  # the options that select entries, as they were given

    @functools.cached_property
    def redlock(self) -> Redlock:
        """The lock over its nodes. Without a restart guard: a survey needs none.

        Raises:
            click.UsageError: No nodes are given.
            ConfigurationError: The nodes given are invalid.
        """
        if self.nodes:
            given: dict[str, Any] = {} if self.prefix is None else {"prefix": self.prefix}
            return Redlock(self.nodes, restart_guard="off", **given)
        if self.app is not None:
            return Redlock.from_app(self.app)
        raise click.UsageError(
            "which nodes? Name an app (celery -A APP redlock ..., celery-redlock -A APP ...) or the"
            " nodes (celery-redlock --nodes redis://host:6379/0,...)"
        )

    def set_nodes(self, nodes: str | None, prefix: str | None, docs: str | None) -> None:
        """Set the nodes, from comma-separated URLs, and the other options, where given.

        Raises:
            click.UsageError: There is an app as well, or a URL is invalid.
        """
        if nodes is not None and self.app is not None:
            raise click.UsageError(BOTH)
        try:
            if nodes is not None:
                self.nodes = listed(nodes)
                parse_nodes(self.nodes, "--nodes")
            self.docs = self.docs if docs is None else check_option("docs", docs, "--docs")
        except ConfigurationError as error:
            raise click.UsageError(str(error).replace("; --nodes[", "\n--nodes[")) from None
        self.prefix = self.prefix if prefix is None else prefix

    def page(self, name: str, anchor: str = "") -> str:
        """Return the address of a page of the documentation."""
        return page_address(self.app, name, anchor, self.docs)

    def command(self, *words: str) -> str:
        """Return the command line of another command for the same nodes, for a hint."""
        where = "celery -A APP redlock"
        if self.nodes:  # their URLs may hold passwords
            where = "celery-redlock --nodes URL,..."
            where += f" --prefix {quote(self.prefix)}" if self.prefix is not None else ""
        return f"{where} {' '.join(map(quote, words))}"

    def choose(self, *options: tuple[str, str | None]) -> None:
        """Store the options that select entries, with their values (None if not given)."""
        self.chosen = " ".join(f"{name} {quote(value)}" for name, value in options if value)

    @property
    def nothing(self) -> str:
        """Return the sentence for an empty result; it repeats the filter, which may be misspelt."""
        if self.chosen:
            return f"nothing that is held fits {printable(self.chosen)}"
        return "nothing is held"

    def say(self, data: Any, text: str) -> None:
        """Print the result: `data` as JSON for a program, `text` for people."""
        # Without indentation in a pipe: Python's fast encoder cannot indent.
        indent = 2 if sys.stdout.isatty() else None
        click.echo(as_json(data, indent) if self.as_json else text)

    def fail(self, message: str, code: int, text: str = "") -> int:
        """Print why there is no result, for people as `text` if given; return the exit code."""
        if self.as_json:
            click.echo(as_json({"error": printable(message)}))
        else:
            click.echo(text or printable(message), err=True)
        return code

    def with_parked(self, look: Callable[[], Survey]) -> tuple[Survey, str]:
        """Return the survey made by `look`, with parked tasks counted as waiting, and a reason.

        The reason says why parked tasks are missing; it is empty if they are not. The workers are
        asked at the same time as the nodes. Without an app there are no workers to ask.

        Raises:
            QuorumUnavailable: `look` raised it.
        """
        from ..doctor.workers import waiting

        workers: tuple[Any, Any, str]
        seen, workers = at_once(look, lambda: waiting(self.app, WORKERS_TIMEOUT_S))
        return count_parked(seen, workers[1]), workers[2]


def on_site(command: Callable[..., int | None]) -> Callable[..., None]:
    """Decorate the function of a command: pass it a `Site`, and add the option --json.

    The function returns its exit code, or None for 0. Errors that a user can correct are printed as
    one sentence without a traceback; with --json as `{"error": ...}` on stdout.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    @nodes_options
    @click.pass_obj
    @functools.wraps(command)
    def run(
        site: Site,
        /,
        as_json: bool,
        nodes: str | None,
        prefix: str | None,
        docs: str | None,
        **given: Any,
    ) -> None:
        site.as_json = as_json
        try:
            site.set_nodes(nodes, prefix, docs)
            code = command(site, **given)
        except click.UsageError as error:
            if not as_json:
                raise
            code = site.fail(error.format_message(), USAGE)
        except ConfigurationError as error:
            code = site.fail(f"cannot work: {error}", USAGE)
        except QuorumUnavailable as error:
            code = site.fail(str(error), NO_QUORUM, lines(*without_quorum(error)))
        if code:
            sys.exit(code)

    return run


def load_app(name: str) -> Any:
    """Return the Celery app that `-A` names.

    Raises:
        click.UsageError: The app cannot be loaded; the text says why.
    """
    from celery.app.utils import find_app

    sys.path.insert(0, "")  # as `celery -A` does
    try:
        return find_app(name)
    except Exception as error:
        raise click.UsageError(
            f"cannot load the app {name!r}: {type(error).__name__}: {error}"
        ) from None


class _Seconds(click.FloatRange):
    """Seconds to wait: not NaN, and within the range that a socket accepts as a timeout."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        given: float = super().convert(value, param, ctx)
        if given != given:
            self.fail("nan is no number of seconds", param, ctx)
        return given


SECONDS = _Seconds(min=0.01, max=3600.0)


def timeout_option(
    default: float = 3.0, help: str = "Seconds without an answer after which a node counts as away."
) -> Decorator:
    """Decorate a command with --timeout SECONDS."""
    return click.option(
        "--timeout", type=SECONDS, default=default, show_default=True, metavar="SECONDS", help=help
    )


def listen_option(port: int, help: str) -> Decorator:
    """Decorate a command that serves HTTP with --listen HOST:PORT, by default on loopback."""
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


def choosing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command, below `on_site`, with --match, --task, --kind, --all and --timeout.

    The command is passed `look`, which surveys the selected entries and raises `QuorumUnavailable`.
    """

    @click.option(
        "--match",
        default="*",
        metavar="GLOB",
        help="Show only resources whose whole name matches, without the prefix: 'order:*'.",
    )
    @click.option(
        "--task", metavar="GLOB", help="Show only locks of tasks with this name: 'shop.*'."
    )
    @click.option(
        "--kind",
        "kinds",
        type=click.Choice(KINDS),
        multiple=True,
        help="Show only this kind; repeat it for more. Default: lock, reservation, foreign.",
    )
    @click.option("--all", "everything", is_flag=True, help="Show all kinds.")
    @timeout_option()
    @functools.wraps(command)
    def chosen(site: Site, /, match: str, task: str | None, timeout: float, **given: Any) -> Any:
        kinds, redlock = given.pop("kinds") or USUAL_KINDS, site.redlock
        kinds = KINDS if given.pop("everything") else kinds
        few = kinds if kinds not in (USUAL_KINDS, KINDS) else ()
        pattern = match if match != "*" else None
        site.choose(("--match", pattern), ("--task", task), *(("--kind", kind) for kind in few))

        def look() -> Survey:
            found = survey(redlock, match, kinds=kinds, timeout=timeout)
            if task is None:
                return found
            fits = matching(task)
            owned = (one for one in found.entries if one.owner and fits(one.owner.task))
            return replace(found, entries=tuple(owned))

        return command(site, look=look, timeout=timeout, **given)

    return chosen


def as_json(data: Any, indent: int | None = None) -> str:
    """Return JSON of untrusted text, in ASCII and without control characters."""
    return json.dumps(data, indent=indent).replace("\x7f", r"\u007f")


def can_ask() -> bool:
    """Return True if stdin is a terminal, so that a question can be answered."""
    return sys.stdin.isatty()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a text table."""
    lines = [columns, *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    return "\n".join(padded(line, widths) for line in lines)
