"""`celery redlock explain TASK [ARGS]`: which key a call gets, who has it, what it would do."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..protocol.errors import QuorumUnavailable
from .context import NO_QUORUM, PROBLEM, Site, on_site, table
from .formatting import described, lines, waits_said, without_quorum
from .options import timeout_option

if TYPE_CHECKING:
    from ..config.task_lock import TaskLock
    from ..survey.models import Survey

__all__ = ["command"]

MAX_TASKS = 10
"""That are named where none is like the one that was asked for."""
EXAMPLES: dict[type, tuple[str, str]] = {
    list: ("array", "'[1, \"en\"]'"),
    dict: ("object", '\'{"lang": "en"}\''),
}


@click.command("explain")
@click.argument("task")
@click.argument("args", default="[]", metavar="[ARGS]")
@click.option("--kwargs", default="{}", metavar="JSON", help="Keyword arguments, as a JSON object.")
@timeout_option(1.0, "Seconds to wait for nodes and workers.")
@on_site
def command(site: Site, task: str, args: str, kwargs: str, timeout: float) -> int | None:
    """Explain what a call of TASK would do now.

    Which key it gets, who has that, and whether it would wait, run, fail or be skipped.

    ARGS is a JSON array: explain shop.charge '[17, 250]'. Nothing is sent and nothing is taken.
    """
    from ..config.task_lock import lock_of

    app = site.app
    if app is None:
        raise click.UsageError("explain needs an app, not only nodes: -A APP")
    given, named = _json(args, list, "ARGS"), _json(kwargs, dict, "--kwargs")
    app.loader.import_default_modules()
    found = app.tasks.get(task)
    if found is None:
        near = difflib.get_close_matches(task, app.tasks, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {_some(app.tasks)}"
        click.echo(lines(f"{task} is no task of this app; {hint}"), err=True)
        return PROBLEM
    _check_arguments(found, given, named)
    lock = lock_of(found)
    if lock is None:
        site.say({"task": task, "locked": False}, f"{task} takes no lock: it runs whenever it can.")
        return None
    return _explain(site, found, lock, given, named, timeout=timeout)


def _json(text: str, kind: type, what: str) -> Any:
    name, example = EXAMPLES[kind]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{what} must be JSON, such as {example}: {error}") from None
    if not isinstance(value, kind):
        raise click.UsageError(f"{what} must be a JSON {name}, such as {example}")
    return value


def _some(tasks: Any) -> str:
    names = sorted(name for name in tasks if not name.startswith("celery."))
    more = len(names) - MAX_TASKS
    return ", ".join(names[:MAX_TASKS]) + (f", and {more} more" if more > 0 else "")


def _check_arguments(task: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Check as `apply_async` does, in its words; or as the call does, where a class is the task."""
    check = getattr(task, "__header__", None) or inspect.signature(task.run).bind
    try:
        check(*args, **kwargs)
    except TypeError as error:
        raise click.UsageError(f"{task.name} cannot be called so: {error}") from None


def _explain(
    site: Site, task: Any, lock: TaskLock, args: Sequence[Any], kwargs: Any, *, timeout: float
) -> int | None:
    from ..doctor.workers import waiting_for
    from ..survey.snapshot import look_at
    from ..survey.waiting import count_parked
    from .verdict import Call

    call = Call.of(task, lock, args, kwargs)
    surveys: list[Survey] = []
    waits: list[dict[str, Any]] = []
    refusal: QuorumUnavailable | None = None
    unasked = ""
    if call.enabled:
        try:
            surveys = [look_at(site.redlock, name, timeout) for name in call.resources]
            # A node that answers need not have a vote: it may have forgotten locks.
            for name in call.resources:
                site.redlock.holder(name, timeout=timeout)
        except QuorumUnavailable as error:
            refusal = error
        waits, parked, unasked = waiting_for(site.app, call.resources, timeout)
        surveys = [count_parked(survey, parked) for survey in surveys]
    entries = [entry for survey in surveys for entry in survey.entries]
    published, run = call.verdicts(entries, refusal)
    keys = [site.redlock.prefix + name for name in call.resources]
    data = {
        "task": task.name,
        "locked": True,
        "resources": call.resources,
        "keys": keys,
        "rule": call.rule,
        "options": {name: {"value": value, "from": source} for name, value, source in call.options},
        "entries": [entry.data() for entry in entries],
        "nodes": [look.data() for look in (surveys[0].looks if surveys else ())],
        "waits": waits,
        "unasked": unasked,
        "publish": published.data(),
        "run": run.data(),
        "error": str(refusal) if refusal else "",
    }
    said = [f"task  {task.name}", *(f"key   {key}" for key in keys), f"made  {call.rule}", ""]
    said += _state(surveys) if refusal is None else without_quorum(refusal)
    said += [*waits_said(waits, unasked), "", f"delay() {published.text}", f"body    {run.text}"]
    site.say(data, lines(*said, "") + "\n" + table(("option", "value", "from"), call.options))
    return NO_QUORUM if refusal else None


def _state(surveys: Sequence[Survey]) -> list[str]:
    said = []
    for survey in surveys:
        for entry in survey.entries:
            if entry.kind in ("lock", "reservation", "foreign"):
                said += described(entry, survey)
                if entry.waiting:
                    said.append(f"  waiting for it: {entry.waiting}")
    return said or ["free: nobody holds or reserves it"]
