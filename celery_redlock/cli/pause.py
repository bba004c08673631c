"""`redlock pause`: stop new bodies of some keys from starting, for a while."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterator
from typing import Any

import click

from ..config.task_lock import TaskLock, lock_of
from ..keys.resolver import is_own
from ..locking.pauses import begin
from ..protocol.errors import ConfigurationError, NotAcquired, RedlockError
from ..protocol.texts import printable
from ..survey.models import KINDS
from ..survey.snapshot import survey
from .context import REFUSED, Site, on_site

__all__ = ["Duration", "command", "operator", "started"]

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


class Duration(click.ParamType[float]):
    """A duration with units: 90s, 30m, 1h30m, 2d."""

    name = "TIME"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(s|min|m|h|d)", value)
        if not parts or "".join(map("".join, parts)) != value:
            self.fail(f"it is {value!r}: give a number and a unit, as 90s, 30m, 1h30m or 2d")
        return float(sum(float(number) * UNITS[unit] for number, unit in parts))


def operator(redlock: Any) -> str:
    """Return the name of the operator: user and host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container the user id may have no name
        user = "somebody"
    return f"{user}@{redlock.client.owner.host}"


def started(site: Site, pattern: str, seconds: float, reason: str, limit: int = 0) -> int:
    """Begin a pause, or a limit, and report it; return the exit code."""
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
    fits = _may_fit(site, pattern)
    if not fits:
        said += (
            f". But {'no task of the app has a key, and ' if site.app is not None else ''}no key is"
            " held or reserved that fits it: is it spelt as `ls` and `explain` show keys?"
        )
    site.say({**pause.data(), "fits": fits}, printable(said))
    return 0


def _may_fit(site: Site, pattern: str) -> bool:
    """Return False if a pattern fits no key that the app's tasks can have, nor one on the nodes."""
    if site.app is not None:
        site.app.loader.import_default_modules()
        begins = _begin(re.split(r"[*?\[\\]", pattern)[0])
        locks = ((task, lock_of(task)) for task in site.app.tasks.values())
        for head in (head for task, lock in locks if lock for head in _heads(task, lock)):
            if head.startswith(begins) or begins.startswith(head):
                return True
    try:
        return bool(survey(site.redlock, pattern, kinds=KINDS).entries)
    except NotAcquired:
        return True  # unknown, so give no warning


def _heads(task: Any, lock: TaskLock) -> Iterator[str]:
    """Return the beginnings of a task's keys, as far as its declaration shows them."""
    key, scope = lock.own.get("key"), lock.own.get("scope_name")
    before = "" if scope is None else f"{scope}:"
    if callable(key):
        yield _begin(before)
    elif key is None or is_own(key):
        yield _begin(task.name if scope is None else scope)
    else:
        for template in (key,) if isinstance(key, str) else key:
            yield _begin(before + re.split("[{<]", template)[0])


def _begin(text: str) -> str:
    """Return the longest beginning of a text that appears unchanged (unescaped) in keys."""
    return re.match(r"[\w.:/-]*", text, re.ASCII)[0]  # type: ignore[index]


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
