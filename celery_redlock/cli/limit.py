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
    "--for", "seconds", type=Duration(), required=True, help="Duration: 90s, 30m, 1h30m; up to 7d."
)
@click.option("--reason", default="", help="Reason; shown wherever the limit is.")
@yes_option
@on_site
def command(site: Site, pattern: str, limit: int, *, seconds: float, reason: str, yes: bool) -> int:
    """Let LIMIT bodies at a time hold each key that matches PATTERN.

    PATTERN is a glob: 'tenant:acme', 'tenant:*'.

    The limit takes the place of the declared one, and may be higher or lower. Running bodies go on;
    if they are more than LIMIT, the next begins when fewer are left. Exclusive keys stay exclusive,
    and readers (shared) stay unlimited. Every worker applies it within two seconds; it ends by
    itself, or with resume. If the pattern is limited already, the limit, the time and the reason
    are replaced.

    It lists the keys that match now, and asks if there are none and no task has such keys.

    Exit code 2: the pattern or the time is not allowed; 3: too few nodes answered, nothing has
    changed; 4: the answer was no, or the maximum number of pauses and limits is in force.
    """
    return started(site, pattern, seconds, reason, yes=yes, limit=limit)
