"""`celery redlock explain TASK [ARGS]`: which key a call gets, who has it, what it would do."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..protocol.errors import QuorumUnavailable
from ..protocol.values import printable
from .context import NO_QUORUM, PROBLEM, SECONDS, Site, on_site, table
from .formatting import waits_said

if TYPE_CHECKING:
    from ..config.task_lock import TaskLock
    from ..survey.models import Survey

__all__ = ["command"]


def _json(text: str, kind: type, what: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{what} must be JSON, such as {_EXAMPLES[kind]}: {error}") from None
    if not isinstance(value, kind):
        raise click.UsageError(f"{what} must be a JSON {_NAMES[kind]}, such as {_EXAMPLES[kind]}")
    return value


_EXAMPLES: dict[type, str] = {list: "'[1, \"en\"]'", dict: '\'{"lang": "en"}\''}
_NAMES: dict[type, str] = {list: "array", dict: "object"}


@click.command("explain")
@click.argument("task")
@click.argument("args", default="[]", metavar="[ARGS]")
@click.option("--kwargs", default="{}", metavar="JSON", help="Keyword arguments, a JSON object.")
@click.option(
    "--timeout",
    type=SECONDS,
    default=1.0,
    show_default=True,
    help="Seconds to wait for nodes and workers.",
)
@on_site
def command(site: Site, task: str, args: str, kwargs: str, timeout: float) -> int | None:
    """Which key a call of TASK gets, who has it, and what the call would do now.

    ARGS is a JSON array: explain shop.charge '[17, 250]'. Nothing is sent and nothing is taken.
    """
    app = site.need_app("explain")
    given, named = _json(args, list, "ARGS"), _json(kwargs, dict, "--kwargs")
    app.loader.import_default_modules()
    found = app.tasks.get(task)
    if found is None:
        near = difflib.get_close_matches(task, app.tasks, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else f"; there are {_some(app.tasks)}"
        click.echo(printable(f"{task} is no task of this app{hint}"), err=True)
        return PROBLEM
    _check_arguments(found, given, named)
    from ..config.task_lock import lock_of

    lock = lock_of(found)
    if lock is None:
        site.say({"task": task, "locked": False}, f"{task} takes no lock: it runs whenever it can.")
        return None
    return _explain(site, found, lock, given, named, timeout)


def _some(tasks: Any) -> str:
    names = sorted(name for name in tasks if not name.startswith("celery."))
    return ", ".join(names[:10]) + (f", and {len(names) - 10} more" if len(names) > 10 else "")


def _check_arguments(task: Any, args: Sequence[Any], kwargs: Any) -> None:
    """As `apply_async` does, in its words; or as the call does, where a class is the task."""
    check = getattr(task, "__header__", None) or inspect.signature(task.run).bind
    try:
        check(*args, **kwargs)
    except TypeError as error:
        raise click.UsageError(f"{task.name} cannot be called so: {error}") from None


def _explain(
    site: Site, task: Any, lock: TaskLock, args: Sequence[Any], kwargs: Any, timeout: float
) -> int | None:
    from ..doctor.workers import waiting_for
    from .verdict import Call

    call = Call.of(task, lock, args, kwargs)
    surveys: list[Survey] = []
    refusal: QuorumUnavailable | None = None
    if call.enabled:
        from ..survey.snapshot import look_at

        try:
            surveys = [look_at(site.redlock, name, timeout) for name in call.resources]
            # A node that answers need not have a vote: it may have forgotten locks.
            for name in call.resources:
                site.redlock.holder(name, timeout=timeout)
        except QuorumUnavailable as error:
            refusal = error
    entries = [entry for survey in surveys for entry in survey.entries]
    published, run = call.verdicts(entries, refusal)
    waits, unasked = waiting_for(site.app, call.resources, timeout) if call.enabled else ([], "")
    data = {
        "task": task.name,
        "locked": True,
        "resources": list(call.resources),
        "keys": [site.redlock.prefix + name for name in call.resources],
        "rule": call.rule,
        "options": {name: {"value": value, "from": source} for name, value, source in call.options},
        "entries": [entry.data() for entry in entries],
        "nodes": [
            {"name": node.name, "reachable": node.reachable, "error": node.error}
            for node in (surveys[0].looks if surveys else ())
        ],
        "waits": waits,
        "unasked": unasked,
        "publish": published.data(),
        "run": run.data(),
        "error": str(refusal) if refusal else "",
    }

    def text() -> str:
        lines = [f"task  {task.name}"]
        lines += [f"key   {key}" for key in data["keys"]]
        lines += [f"made  {call.rule}", ""]
        lines += _state(entries, surveys, refusal)
        lines += waits_said(waits, unasked)
        lines += ["", f"delay() {published.text}", f"body    {run.text}", ""]
        lines.append(table(("option", "value", "from"), call.options))
        return "\n".join(lines)

    site.say(data, text)
    return NO_QUORUM if refusal else None


def _state(entries: Any, surveys: Sequence[Survey], refusal: Any) -> list[str]:
    if refusal is not None:
        return [printable(str(refusal))]
    lines = []
    for entry in entries:
        if entry.kind not in ("lock", "reservation", "foreign"):
            continue
        what = {"lock": "held", "reservation": "reserved"}.get(entry.kind, "another program's")
        slot = f" (slot {entry.slot})" if entry.slot > 1 else ""
        since = f", for {entry.held_for:.1f} s" if entry.held_for is not None else ""
        who = _who(entry.owner)
        lines.append(f"{what}{slot} by {who}{since}; on {entry.nodes} of {entry.total} nodes:")
        looks = surveys[0].looks
        for look, left in zip(looks, entry.ttls, strict=True):
            said = look.error if not look.reachable else _left(left)
            lines.append(f"  {look.name}  {said}")
        if entry.waiting:
            lines.append(f"  {entry.waiting} stand in line for it")
    return [printable(line) for line in lines] or ["free: nobody holds or reserves it"]


def _who(owner: Any) -> str:
    if owner is None:
        return "somebody else"
    task = f"{owner.task or 'task'} {owner.task_id}, " if owner.task_id else ""
    return f"{task}pid {owner.pid} on {owner.host}"


def _left(left: float | None) -> str:
    if left is None:
        return "does not have it"
    return "has it, without a ttl" if left == float("inf") else f"has it for another {left:.1f} s"
