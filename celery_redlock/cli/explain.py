"""`celery redlock explain TASK [ARGS]`: show a call's key, its holder, and the call's verdict."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..protocol.errors import QuorumUnavailable
from ..protocol.texts import are_needed, of_nodes
from ..protocol.values import NodeVote, Owner, Vote, quorum_of
from .context import NO_QUORUM, PROBLEM, Site, on_site, table, timeout_option
from .formatting import entry_lines, lines, start_lines, wait_lines, without_quorum

if TYPE_CHECKING:
    from ..config.options import TaskOptions
    from ..config.task_lock import TaskLock
    from ..doctor.workers import Pool
    from ..locking.pauses import Pause
    from ..survey.models import Survey
    from .verdict import Verdict

__all__ = ["command"]

WITH_A_WORKER = ("run", "parked", "again", "wait", "unlocked")
"""Outcomes that need a worker, which may not be there."""
AT_ONCE = ("run", "unlocked")
"""Outcomes of a body that begins when a worker has a slot for it."""
MAX_TASKS = 10
"""Most task names to list if none resembles the name asked for."""


@click.command("explain")
@click.argument("task")
@click.argument("args", default="[]", metavar="[ARGS]")
@click.option("--kwargs", default="{}", metavar="JSON", help="Keyword arguments, as a JSON object.")
@timeout_option(1.0, "Seconds to wait for nodes and workers.")
@on_site
def command(site: Site, task: str, args: str, kwargs: str, timeout: float) -> int | None:
    """Explain what a call of TASK would do now.

    It shows the key, its holder, and whether the call would wait, run, fail or be skipped.

    ARGS is a JSON array: explain shop.charge '[17, 250]'. It sends nothing and locks nothing.
    It writes keys with random names on the nodes, which expire within ten seconds.
    """
    from ..config.task_lock import lock_of

    app = site.app
    if app is None:
        raise click.UsageError("explain needs an app, not only nodes: -A APP")
    given = _json(args, "ARGS", '[1, "en"]')
    named = _json(kwargs, "--kwargs", '{"lang": "en"}')
    app.loader.import_default_modules()
    found = app.tasks.get(task)
    if found is None:
        click.echo(lines(_unknown_task(task, app.tasks)), err=True)
        return PROBLEM
    # In the words of `apply_async`; of the class's call, where the task is a class.
    check = getattr(found, "__header__", None) or inspect.signature(found.run).bind
    try:
        check(*given, **named)
    except TypeError as error:
        raise click.UsageError(f"{task} cannot be called so: {error}") from None
    lock = lock_of(found)
    if lock is None:
        site.say({"task": task, "locked": False}, f"{task} takes no lock: it runs whenever it can.")
        return None
    return _explain(site, found, lock, given, named, timeout=timeout)


def _json(text: str, what: str, example: str) -> Any:
    """Return a JSON array or object, of the same type as the example."""
    kind = type(json.loads(example))
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{what} must be JSON, such as '{example}': {error}") from None
    if not isinstance(value, kind):
        name = "array" if kind is list else "object"
        raise click.UsageError(f"{what} must be a JSON {name}, such as '{example}'")
    return value


def _unknown_task(task: str, tasks: Any) -> str:
    """Return the error for an unknown task, with similar or other names."""
    names = sorted(name for name in tasks if not name.startswith("celery."))
    if near := difflib.get_close_matches(task, tasks, n=3):
        return f"{task} is no task of this app; did you mean {', '.join(near)}?"
    more = f", and {len(names) - MAX_TASKS} more" if len(names) > MAX_TASKS else ""
    return f"{task} is no task of this app; there are {', '.join(names[:MAX_TASKS])}{more}"


def _explain(
    site: Site, task: Any, lock: TaskLock, args: Sequence[Any], kwargs: Any, *, timeout: float
) -> int | None:
    from ..config.settings import enabled
    from ..doctor.probe import probe
    from ..doctor.quorum import votes_of
    from ..doctor.workers import waiting
    from ..locking.pauses import covering, limited
    from ..protocol import outcome
    from ..protocol.names import of_each
    from ..runtime.blocking import blocking
    from ..survey.snapshot import look_at
    from ..survey.waiting import at_once, count_parked, waited_for
    from . import verdict

    how = lock.options(site.app)
    resources = lock.resources(task, task.run, args, kwargs)
    limit = lock.limit(how, task, task.run, args, kwargs)
    rule, options = verdict.rule_of(task.name, how), verdict.options_of(lock, site.app)
    surveys: list[Survey] = []
    waits: list[dict[str, Any]] = []
    refusal: QuorumUnavailable | None = None
    answering: list[str] = []
    holds: Mapping[str, str] = {}
    pools: Sequence[Pool] = ()
    is_free, unasked = True, ""
    if enabled(site.app.conf):
        try:
            surveys = [look_at(site.redlock, name, timeout) for name in resources]
            # An answer is not a vote: a node that was just started may have forgotten locks.
            for name in resources:
                seen = site.redlock.client.peek((name,), timeout=timeout, shared=how.shared)
                is_free = outcome.free(blocking(seen))[0]
        except QuorumUnavailable as error:
            refusal = error
        # Nor is it one if the node refuses to write; only a trial shows that.
        addresses, prefix = site.redlock.client.addresses, site.redlock.prefix
        (waits, parked, unasked, holds, pools), probes = at_once(
            lambda: waiting(site.app, timeout), lambda: probe(addresses, prefix, timeout)
        )
        answering = [one.name for one in probes if one.look.reachable]
        answered = {look.name for survey in surveys for look in survey.looks if look.reachable}
        # A node that was too slow only for the trial counts: it has just answered.
        votes = [
            NodeVote(vote.node, Vote.YES) if vote.node in answered.difference(answering) else vote
            for vote in votes_of(probes, prefix)
        ]
        refusal = refusal or _too_few(votes, resources)
        waits = [wait for wait in waits if not set(resources).isdisjoint(waited_for(wait))]
        surveys = [count_parked(survey, parked) for survey in surveys]
    entries = [entry for survey in surveys for entry in survey.entries]
    pauses = {pause.token: pause for survey in surveys for pause in survey.pauses}.values()
    none = "; this call has no limit for it to change" if limit == 1 else ""
    limit = limited([*pauses], resources, limit)
    limits = dict(zip(resources, of_each(resources, limit), strict=True))
    kept_out = how.shared and not is_free
    published, run = verdict.verdicts(task, how, limits, entries, refusal, kept_out)
    if (pause := covering([*pauses], resources)) is not None:
        run = verdict.Verdict("paused", f"waits until that is over: {pause}")
    elif unasked and run.outcome in WITH_A_WORKER:
        run = run._replace(text=f"{run.text}; but {unasked.partition(':')[0]}")
    elif run.outcome in AT_ONCE and (why := verdict.without_slot(task, args, kwargs, pools)):
        run = run._replace(text=f"{run.text}; but {why}")
    keys = [site.redlock.prefix + name for name in resources]
    pages = [site.page(*page) for page in _pages(how, limits, pauses, refusal, run)]
    data = {
        "task": task.name,
        "locked": True,
        "resources": resources,
        "keys": keys,
        "limits": list(limits.values()),
        "rule": rule,
        "options": {name: {"value": value, "from": source} for name, value, source in options},
        "entries": [entry.data() for entry in entries],
        "nodes": [look.data() for look in (surveys[0].looks if surveys else ())],
        "pauses": [pause.data() for pause in pauses],
        "waits": waits,
        "unasked": unasked,
        "publish": published._asdict(),
        "run": run._asdict(),
        "error": str(refusal) if refusal else "",
        "docs": pages,
    }
    said = [
        f"task  {task.name}",
        *_keys(keys, limits.values()),
        *(f"{pause}{none if pause.limit else ''}" for pause in pauses),
        f"made  {rule}",
        "",
    ]
    pace = how.pace
    said += without_quorum(refusal, answering) if refusal is not None else []
    said += _state(surveys, refusal, None if unasked else holds)
    said += start_lines(entries, pace.starts, pace.text) if pace is not None else []
    said += [*wait_lines(waits, unasked), "", f"delay() {published.text}", f"body    {run.text}"]
    said += [f"see     {page}" for page in pages]
    read = verdict.read_by(how, options, verdict.parks(site.app.conf, how))
    site.say(data, lines(*said, "") + "\n" + table(("option", "value", "from"), read))
    return NO_QUORUM if refusal else None


def _pages(
    how: TaskOptions,
    limits: Mapping[str, int],
    pauses: Collection[Pause],
    refusal: QuorumUnavailable | None,
    run: Verdict,
) -> list[tuple[str, str]]:
    """Return the pages of the documentation about what is explained, each with an anchor."""
    decided = run.outcome not in ("run", "parked", "paused", "none")
    held = refusal is None and run.outcome in ("parked", "again", "wait") and how.rate is None
    found = {
        ("runbook", "no-quorum"): refusal is not None,
        ("pausing", ""): bool(pauses),
        ("keys", ""): True,
        ("keys", "a-limit"): max(limits.values()) > 1,
        ("shared", ""): how.shared,
        ("rates", ""): how.rate is not None,
        ("uniqueness", ""): how.scope != "while_executing",
        ("hot-keys", ""): run.outcome == "parked",
        ("runbook", "a-stuck-lock"): held,
        ("policies", "on_unavailable"): decided and refusal is not None,
        ("policies", "on_conflict"): decided and refusal is None,
    }
    return [page for page, is_so in found.items() if is_so]


def _keys(keys: Iterable[str], limits: Iterable[int]) -> Iterator[str]:
    for key, limit in zip(keys, limits, strict=True):
        yield f"key   {key}" + (f", {limit} at a time" if limit > 1 else "")


def _too_few(votes: Sequence[NodeVote], resources: Sequence[str]) -> QuorumUnavailable | None:
    """Return the error of a call if too few nodes grant a lock that is free; None if enough do."""
    granting = sum(vote.vote is Vote.YES for vote in votes)
    if granting >= (needed := quorum_of(len(votes))):
        return None
    said = f"{' + '.join(resources)}: {of_nodes(granting, len(votes))} can grant a lock"
    return QuorumUnavailable(
        f"{said}; {are_needed(needed)}: {', '.join(map(str, votes))}",
        resource=" + ".join(resources),
        votes=votes,
    )


def _state(
    surveys: Sequence[Survey], refusal: QuorumUnavailable | None, holds: Mapping[str, str] | None
) -> list[str]:
    """Return lines about holders; `holds` has the worker of each that holds, None if not known."""
    said = []
    for survey in surveys:
        for entry in survey.entries:
            if entry.kind in ("lock", "reservation", "foreign"):
                said += entry_lines(entry, survey)
                if holds is not None and entry.kind == "lock" and entry.owner:
                    said += _at_work(entry.owner, holds)
                if entry.waiting:
                    said.append(f"  waiting for it: {entry.waiting}")
    counted = any(entry.kind == "start" for survey in surveys for entry in survey.entries)
    return said or ([] if counted or refusal else ["free: nobody holds or reserves it"])


def _at_work(owner: Owner, holds: Mapping[str, str]) -> list[str]:
    """Return a line on whether a worker is executing the body of a task that holds a lock."""
    if not owner.task_id:
        return []
    if worker := holds.get(owner.task_id):
        return [f"  its body is at work in {worker}"]
    return ["  no worker that answered has this body: if its process is dead, the lock expires"]
