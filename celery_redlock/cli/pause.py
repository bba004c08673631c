"""`redlock pause`: have no body of some keys begin for a while."""

from __future__ import annotations

import getpass
import re
from typing import Any

import click

from ..locking.pauses import begin
from ..protocol.errors import ConfigurationError, NotAcquired, RedlockError
from ..protocol.texts import printable
from .context import REFUSED, Site, on_site

__all__ = ["Duration", "command", "operator", "started"]

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class Duration(click.ParamType[float]):
    """A time with its unit: 90s, 30m, 1h30m, 2d."""

    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(s|min|m|h|d)", value)
        if not parts or "".join(map("".join, parts)) != value:
            self.fail(f"it is {value!r}: give a number and a unit, as 90s, 30m, 1h30m or 2d")
        return float(sum(float(number) * UNITS[unit] for number, unit in parts))


def operator(redlock: Any) -> str:
    """Return who works here: the user, and the host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container, the user may have no name
        user = "somebody"
    return f"{user}@{redlock.client.owner.host}"


def started(site: Site, pattern: str, seconds: float, reason: str, limit: int = 0) -> int:
    """Begin a pause, or a limit, and say so; return the exit code."""
    redlock = site.redlock
    pattern = pattern.removeprefix(redlock.prefix)
    try:
        pause = begin(redlock, pattern, seconds, operator(redlock), reason, limit)
    except (ConfigurationError, NotAcquired):
        raise
    except RedlockError as error:
        return site.fail(str(error), REFUSED)
    said = f"{pause}; every worker knows within 2 s"
    if limit:
        said += (
            ". It is for tasks that declare a limit: exclusive keys stay so, and readers (shared)"
            " unlimited"
        )
    site.say(pause.data(), printable(said))
    return 0


@click.command("pause")
@click.argument("pattern")
@click.option(
    "--for",
    "seconds",
    type=Duration(),
    required=True,
    help="How long: 90s, 30m, 1h30m; 7d most.",
)
@click.option("--reason", default="", help="Why; it is shown wherever a task waits because of it.")
@on_site
def command(site: Site, pattern: str, *, seconds: float, reason: str) -> int:
    """Pause all keys that fit PATTERN, a glob: 'order:*'.

    Bodies that run end, and no new one begins; tasks of these keys wait in their queue or in a
    worker, and go on within a second after the end of the pause, or after resume. Publishing goes
    on. Every worker knows of it within two seconds. Of a pattern that is paused already, the time
    and the reason are replaced.

    Exit code 2: the pattern or the time cannot be; 3: too few nodes answered, nothing is paused;
    4: there are as many pauses as there can be.
    """
    return started(site, pattern, seconds, reason)
