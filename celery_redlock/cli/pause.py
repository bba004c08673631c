"""`redlock pause`: stop new bodies of some keys from starting, for a while."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable, Iterator
from typing import Any

import click

from ..config.task_lock import TaskLock, lock_of
from ..keys.resolver import is_own
from ..locking.pauses import begin, check
from ..protocol.errors import ConfigurationError, NotAcquired, RedlockError
from ..protocol.texts import counted, printable
from ..survey.snapshot import survey
from .context import REFUSED, Site, can_ask, on_site
from .formatting import lines

__all__ = ["Duration", "command", "operator", "started", "yes_option"]

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
STATES = {"lock": "held", "start": "counted by its rate", "reservation": "reserved"}
MAX_NAMED = 10
"""Keys to name one by one."""


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


def yes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with --yes."""
    return click.option("--yes", is_flag=True, help="Do not ask if the pattern matches no key.")(
        command
    )


def started(
    site: Site, pattern: str, seconds: float, reason: str, *, yes: bool, limit: int = 0
) -> int:
    """Begin a pause, or a limit, and report it; return the exit code."""
    redlock = site.redlock
    pattern, who = pattern.removeprefix(redlock.prefix), operator(redlock)
    check(pattern, seconds, who, reason)
    keys = _held_or_waiting(site, pattern)
    fits = keys is None or bool(keys) or _is_declared(site, pattern)
    none = (
        f"no key that fits {pattern} is held or waited for"
        f"{', and no task of the app has such keys' if site.app is not None else ''}: write it as"
        " `ls` and `explain` show keys"
    )
    if not (fits or yes):
        if not can_ask():
            said = f"{none}. There is no terminal to ask on: correct it, or give --yes"
            return site.fail(said, REFUSED)
        if not click.confirm(f"{printable(none)}. Set it all the same?", err=True):
            return site.fail("left as it was", REFUSED)
    try:
        pause = begin(redlock, pattern, seconds, who, reason, limit)
    except (ConfigurationError, NotAcquired):
        raise
    except RedlockError as error:
        return site.fail(str(error), REFUSED)
    said = f"{pause}; every worker applies it within 2 s"
    if limit:
        said += (
            ". It is for tasks that declare a limit: exclusive keys stay so, and readers (shared)"
            " unlimited"
        )
    now = "; ".join(f"{key} ({state})" for key, state in list((keys or {}).items())[:MAX_NAMED])
    if keys:
        more = len(keys) - MAX_NAMED
        now = f"it fits {counted(len(keys), 'key')} now: {now}" + f"; {more} more" * (more > 0)
    elif fits:
        now = "" if keys is None else "no key that fits it is held or waited for now"
    else:
        now = f"but {none}"
    end = f"to end it before that: {site.command('resume', pattern)}"
    site.say({**pause.data(), "fits": fits, "keys": keys}, lines(said, *filter(None, [now]), end))
    return 0


def _held_or_waiting(site: Site, pattern: str) -> dict[str, str] | None:
    """Return the keys that fit a pattern now, each with its state; None if not known."""
    try:
        seen = survey(site.redlock, pattern, kinds=("lock", "start", "reservation", "line"))
    except NotAcquired:
        return None
    states: dict[str, dict[str, None]] = {}
    for entry in seen.entries:
        state = STATES[entry.kind] if entry.kind != "line" else f"{entry.waiting} waiting"
        if entry.held if entry.kind != "line" else entry.waiting:
            states.setdefault(entry.resource, {})[state] = None
    return {resource: ", ".join(of_it) for resource, of_it in states.items()}


def _is_declared(site: Site, pattern: str) -> bool:
    """Return True if a key of one of the app's tasks may fit a pattern."""
    if site.app is None:
        return False
    site.app.loader.import_default_modules()
    begins = _begin(re.split(r"[*?\[\\]", pattern)[0])
    locks = ((task, lock_of(task)) for task in site.app.tasks.values())
    heads = (head for task, lock in locks if lock for head in _heads(task, lock))
    return any(head.startswith(begins) or begins.startswith(head) for head in heads)


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
    help="Duration: 90s, 30m, 1h30m; up to 7d.",
)
@click.option("--reason", default="", help="Reason; shown wherever a task waits because of it.")
@yes_option
@on_site
def command(site: Site, pattern: str, *, seconds: float, reason: str, yes: bool) -> int:
    """Pause all keys that match PATTERN, a glob: 'order:*'.

    Running bodies go on to their end, and no new one begins; tasks of these keys wait in their
    queue or in a worker, and go on within a second after the end of the pause, or after resume.
    Publishing goes on. Every worker applies it within two seconds. If the pattern is paused
    already, the time and the reason are replaced.

    It lists the keys that match now, and asks if there are none and no task has such keys.

    Exit code 2: the pattern or the time is not allowed; 3: too few nodes answered, nothing is
    paused; 4: the answer was no, or the maximum number of pauses is in force.
    """
    return started(site, pattern, seconds, reason, yes=yes)
