"""Options that several commands have."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import click

from ..locking.redlock import Redlock
from ..survey.models import KINDS, Survey
from ..survey.snapshot import survey

__all__ = ["USUAL_KINDS", "Choice", "choosing", "listen_option", "timeout_option"]

USUAL_KINDS = ("lock", "reservation", "foreign")


class _Seconds(click.FloatRange):
    """Seconds to wait: a number that is one, and that a socket takes."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        given: float = super().convert(value, param, ctx)
        if given != given:
            self.fail("nan is no number of seconds", param, ctx)
        return given


SECONDS = _Seconds(min=0.01, max=3600.0)


def timeout_option(
    default: float = 3.0, help: str = "Seconds without an answer after which a node counts as away."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with --timeout SECONDS."""
    return click.option(
        "--timeout", type=SECONDS, default=default, show_default=True, metavar="SECONDS", help=help
    )


def listen_option(port: int, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command that serves with --listen HOST:PORT, by default on loopback."""
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


@dataclass(frozen=True)
class Choice:
    """Which entries a user wants to see: what `choosing` makes of the options."""

    match: str
    task: str | None
    kinds: tuple[str, ...]
    everything: bool
    timeout: float

    def survey(self, redlock: Redlock) -> Survey:
        """Return these entries of the nodes.

        Raises:
            QuorumUnavailable: Fewer than a quorum of nodes told all they have.
        """
        kinds = KINDS if self.everything else self.kinds or USUAL_KINDS
        found = survey(redlock, self.match, kinds=kinds, timeout=self.timeout)
        if self.task is None:
            return found
        owned = ((entry, entry.owner.task) for entry in found.entries if entry.owner is not None)
        fits = tuple(entry for entry, task in owned if fnmatchcase(task, self.task))
        return replace(found, entries=fits)


def choosing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with --match, --task, --kind, --all and --timeout; it gets a `Choice`."""

    @click.option(
        "--match",
        default="*",
        metavar="GLOB",
        help="Show only resources whose whole name fits, without the prefix: 'order:*'.",
    )
    @click.option(
        "--task", metavar="GLOB", help="Show only what tasks of this name hold: 'shop.*'."
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
    def chosen(**given: Any) -> Any:
        choice = Choice(*(given.pop(field.name) for field in fields(Choice)))
        return command(choice=choice, **given)

    return chosen
