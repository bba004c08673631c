"""`redlock resume`: end a pause or a limit."""

from __future__ import annotations

import click

from ..locking.pauses import in_force, resume
from .context import PROBLEM, Site, on_site
from .formatting import lines

__all__ = ["command"]


@click.command("resume")
@click.argument("pattern")
@on_site
def command(site: Site, pattern: str) -> int:
    """End the pause of PATTERN, and its limit.

    PATTERN must be the one that was paused, as ls shows it. Waiting tasks go on within a second,
    unless another pause covers their key.

    Exit code 1: it is neither paused nor limited; 3: too few nodes answered, it may go on.
    """
    redlock = site.redlock
    pattern = pattern.removeprefix(redlock.prefix)
    ended, silent = resume(redlock, pattern)
    others, _sure = in_force(redlock)
    done = {True: "no longer limited; limited by", False: "resumed; paused by"}
    said = [f"{one.pattern}: {done[one.limit > 0]} {one.who}" for one in ended]
    said = said or [f"{pattern}: no such pause"]
    said += [f"still {'limited' if one.limit else 'paused'}: {one}" for one in others]
    if silent and ended:
        away = ", ".join(silent)
        said.append(f"{away} did not answer: repeat it once all do, or it may count again there")
    data = {"ended": [one.data() for one in ended], "silent": silent}
    site.say({**data, "pauses": [one.data() for one in others]}, lines(*said))
    return 0 if ended else PROBLEM
