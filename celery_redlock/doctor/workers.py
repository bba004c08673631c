"""Queries to the workers of an app, by `celery inspect redlock`, and checks of their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..protocol.errors import ConfigurationError
from ..protocol.texts import of_nodes, printable
from ..protocol.values import quorum_of
from ..survey.waiting import Parked, valid_waits
from ..worker.remote_control import NAME, settings_of, tasks_of
from .report import Finding, some, unchecked, warning, wrong

__all__ = ["AtWork", "Pool", "ask", "connection_of", "examine_workers", "waiting"]

VITAL = ("nodes", "prefix", "enabled")
"""Settings that decide whether two programs exclude each other at all."""
NO_APP = "tasks that wait parked in workers are not seen without their app: -A APP"
MAX_ERROR_CHARS = 200
"""Characters of an error from a worker: anyone with access to the broker can send any amount."""


def connection_of(app: Any, timeout: float) -> Any:
    """Return a connection to the broker that does not hang; `timeout` is in seconds."""
    return app.connection_for_write(
        connect_timeout=timeout,
        transport_options={
            **(app.conf.broker_transport_options or {}),
            "socket_timeout": 2 * timeout + 1,
            "socket_connect_timeout": timeout,
        },
    )


def ask(app: Any, timeout: float) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the answers of the workers, by their names; and the reason, if none was asked.

    Args:
        app: The Celery app.
        timeout: Seconds to wait for the broker, and again for the workers. That wait is always
            spent whole, because the number of workers is not known.
    """
    connection = None
    try:
        connection = connection_of(app, timeout)
        with connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=timeout)
            inspect = app.control.inspect(timeout=timeout, connection=connection)
            replies = inspect._request(NAME) or {}
    except Exception as error:  # the error's type depends on the transport
        where = printable(connection.as_uri()) if connection is not None else "the broker"
        return {}, f"no worker was asked: no answer from {where} ({type(error).__name__})"
    good = {name: reply for name, reply in replies.items() if isinstance(reply, Mapping)}
    return {name: dict(reply) for name, reply in good.items()}, ""


class Pool(NamedTuple):
    """The report of a worker about its pool: slots, those that are busy, and queues that it serves.

    A worker of an older release reports none of them: it serves no queue.
    """

    slots: int = 0
    busy: int = 0
    queues: frozenset[str] = frozenset()

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> Pool:
        """Read the reply of a worker; invalid parts are those of an older release."""
        said = reply.get("pool")
        said = said if isinstance(said, Mapping) else {}
        slots, busy, queues = (said.get(name) for name in ("slots", "busy", "queues"))
        if isinstance(slots, int) and isinstance(busy, int) and isinstance(queues, list):
            return cls(slots, busy, frozenset([name for name in queues if isinstance(name, str)]))
        return cls()


class AtWork(NamedTuple):
    """The reports of an app's workers about locks.

    Attributes:
        waits: The tasks that wait, the longest first.
        parked: The parked ones among them.
        unasked: The reason if they are not known; empty if they are.
        holds: The worker whose body holds a lock, by the task's id; and what stops that body.
        pools: The pool of each worker that answered.
    """

    waits: list[dict[str, Any]]
    parked: Parked
    unasked: str
    holds: Mapping[str, str] = {}
    pools: Sequence[Pool] = ()


def waiting(app: Any, timeout: float) -> AtWork:
    """Return which tasks wait in an app's workers, and which hold a lock there."""
    if app is None:
        return AtWork([], Parked(), NO_APP)
    replies, unasked = ask(app, timeout)
    if not replies and not unasked:
        unasked = f"no worker answered within {timeout:g} s: parked tasks are not counted"
    waits = [
        {**wait, "worker": worker}
        for worker, reply in replies.items()
        for wait in valid_waits(reply)
    ]
    waits.sort(key=lambda wait: -float(wait["waited"]))
    holds: dict[str, str] = {}
    for worker, reply in replies.items():
        said = reply.get("holds")
        for hold in said if isinstance(said, list) else ():
            if isinstance(hold, Mapping) and isinstance(hold.get("task_id"), str):
                pid = hold["pid"] if isinstance(hold.get("pid"), int) else 0
                asleep = f"; process {pid} is stopped: kill -CONT {pid}, or kill -9 {pid}, there"
                holds[hold["task_id"]] = worker + (asleep if hold.get("stopped") is True else "")
    pools = [Pool.of(reply) for reply in replies.values()]
    return AtWork(waits, Parked.of(replies.values()), unasked, holds, pools)


def examine_workers(app: Any, timeout: float) -> Iterator[Finding]:
    """Compare the settings of all workers with those of this app."""
    replies, unasked = ask(app, timeout)
    if not replies:
        why = unasked or f"none answered within {timeout:g} s"
        fix = "start one, or look again: those of the pool solo answer between two tasks"
        yield unchecked(why, fix, "workers", "workers")
        return
    try:
        settings, tasks = settings_of(app), tasks_of(app)
    except ConfigurationError:
        return  # another check reports that
    for worker, reply in sorted(replies.items()):
        if isinstance(reply.get("settings"), Mapping):
            yield from _settings(worker, settings, reply["settings"])
            yield from _tasks(worker, tasks, reply.get("tasks"))
            yield from _nodes(worker, settings["nodes"], reply.get("unusable"))
        else:
            said = str(reply.get("error") or "its reply makes no sense")[:MAX_ERROR_CHARS]
            fix = "run the same release of celery_redlock, and the same app, in all workers"
            yield warning(f"it does not report its settings: {said}", fix, worker, "workers")


def _nodes(worker: str, nodes: Sequence[str], reported: Any) -> Iterator[Finding]:
    """Report the nodes that a worker cannot use: its passwords, or its host, may be at fault."""
    unusable = reported if isinstance(reported, Mapping) else {}
    if not unusable:
        return
    count, usable = len(nodes), len(nodes) - len(unusable)
    whys = "; ".join(f"{name} ({why})" for name, why in sorted(unusable.items()))
    few = usable < quorum_of(count)
    what = f"it can use {of_nodes(max(0, usable), count)}{' and lock nothing' if few else ''}"
    yield (wrong if few else warning)(
        f"{what}, not {whys}"[: 2 * MAX_ERROR_CHARS],
        "compare its user, password and host with those of this program, and mend what differs;"
        " if nothing does, mend the node",
        where=worker,
        check="workers",
    )


def _tasks(worker: str, ours: Mapping[str, Any], reported: Any) -> Iterator[Finding]:
    theirs = reported if isinstance(reported, Mapping) else {}
    other = sorted(name for name in set(ours) & set(theirs) if ours[name] != theirs[name])
    if other:
        yield warning(
            f"{some(other)} {'is' if len(other) == 1 else 'are'} locked differently there than in"
            " this app: with another key, or other options",
            "deploy one release of your code to all workers, and restart them",
            where=worker,
            check="workers",
        )


def _settings(worker: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Finding]:
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if name == "nodes":  # their order does not matter
            there = there if isinstance(there, list) else [there]
            here, there = sorted(here or ()), sorted(map(str, there))
        if here != there:
            vital = name in VITAL
            yield (wrong if vital else warning)(
                f"redlock_{name} is {_shown(there)} there, and {_shown(here)} in this"
                f" app{', so they do not share locks' if vital else ''}",
                "give all programs the same settings, and restart them",
                where=worker,
                check="workers",
            )


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)
