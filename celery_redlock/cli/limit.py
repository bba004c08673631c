"""`redlock limit`: change for a while how many bodies may hold each of some keys."""

from __future__ import annotations

import click

from ..protocol.names import MAX_SLOTS
from .context import Site, on_site
from .pause import Duration, started, yes_option

__all__ = ["command"]


@click.command("limit")
@click.argument("pattern")
@click.argument("limit", type=click.IntRange(1, MAX_SLOTS))
@click.option(
    "--for", "seconds", type=Duration(), required=True, help="How long: 90s, 30m, 1h30m; 7d most."
)
@click.option("--reason", default="", help="Why; it is shown wherever the limit is.")
@yes_option
@on_site
def command(site: Site, pattern: str, limit: int, *, seconds: float, reason: str, yes: bool) -> int:
    """Let LIMIT bodies at a time hold each key that fits PATTERN.

    PATTERN is a glob: 'tenant:acme', 'tenant:*'.

    Instead of as many as their tasks declare, more or fewer. Bodies that run go on; where they are
    more than LIMIT, the next begins when fewer are left. Keys that one body at a time may hold stay
    exclusive, and readers (shared) stay as many as there are. Every worker knows of it within two
    seconds; it ends by itself, or with resume. Of a pattern that is limited already, the limit, the
    time and the reason are replaced.

    It names the keys that fit now, and asks if the pattern fits none and no task has such keys.

    Exit code 2: the pattern or the time cannot be; 3: too few nodes answered, nothing has changed;
    4: the answer was no, or there are as many pauses and limits as there can be.
    """
    return started(site, pattern, seconds, reason, yes=yes, limit=limit)
