"""What the workers of an app answer to `celery inspect redlock`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..protocol.errors import ConfigurationError
from ..protocol.values import printable
from ..worker.remote_control import NAME, settings_of, tasks_of
from .report import MANY, Finding

__all__ = ["ask", "examine_workers", "waiting_for"]

VITAL = ("nodes", "prefix", "enabled")
"""Settings that decide whether two programs exclude each other at all."""


def ask(app: Any, timeout: float) -> tuple[dict[str, dict[str, Any]], str]:
    """What each worker answers, by its name; and why none was asked, if the broker is away.

    Args:
        app: The Celery app.
        timeout: Seconds to wait for the broker, and again for the workers: all of them, as nobody
            knows how many there are.
    """
    connection = None
    try:
        connection = app.connection_for_write(
            connect_timeout=timeout,
            transport_options={
                **(app.conf.broker_transport_options or {}),
                "socket_timeout": 2 * timeout + 1,
                "socket_connect_timeout": timeout,
            },
        )
        with connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=timeout)
            inspect = app.control.inspect(timeout=timeout, connection=connection)
            replies = inspect._request(NAME) or {}
    except Exception as error:  # of whichever transport it is; one that is not known, among them
        where = printable(connection.as_uri()) if connection is not None else "the broker"
        return {}, f"no worker was asked: no answer from {where} ({type(error).__name__})"
    good = {name: reply for name, reply in replies.items() if isinstance(reply, Mapping)}
    return {name: dict(reply) for name, reply in good.items()}, ""


def waiting_for(
    app: Any, resources: Collection[str], timeout: float
) -> tuple[list[dict[str, Any]], str]:
    """Who waits in the workers for one of some resources; and why that is not known."""
    replies, unasked = ask(app, timeout)
    if not replies and not unasked:
        unasked = f"who waits in workers is not known: none answered within {timeout:g} s"
    found = [
        {**wait, "worker": worker}
        for worker, reply in replies.items()
        for wait in _waits(reply.get("waits"))
        if wait.get("resource") in resources
    ]
    return sorted(found, key=lambda wait: -float(wait["waited"])), unasked


def _waits(told: Any) -> Iterator[Mapping[str, Any]]:
    """Those that make sense: whoever reaches the broker can answer."""
    for wait in told if isinstance(told, list) else ():
        if isinstance(wait, Mapping):
            waited = wait.get("waited")
            if isinstance(waited, (int, float)) and 0 <= waited < 1e12:
                yield wait


def examine_workers(app: Any, timeout: float) -> Iterator[Finding]:
    """Compare what all workers have set with each other, and with what is set here."""
    replies, unasked = ask(app, timeout)
    if unasked or not replies:
        yield Finding(
            "unchecked",
            "workers",
            "workers",
            unasked or f"none answered within {timeout:g} s",
            "look again when they run; those of the pool solo answer between two tasks",
        )
        return
    try:
        settings, tasks = settings_of(app), tasks_of(app)
    except ConfigurationError:
        return  # that is a finding of its own
    for worker, reply in sorted(replies.items()):
        theirs = reply.get("settings")
        if not isinstance(theirs, Mapping):
            said = str(reply.get("error") or "nothing that makes sense")[:200]
            yield Finding(
                "warning",
                "workers",
                worker,
                f"it does not tell its settings: {said}",
                "run the same release of celery_redlock, and the same app, in all workers",
            )
            continue
        yield from _differences(worker, settings, theirs)
        told = reply.get("tasks")
        told = told if isinstance(told, Mapping) else {}
        other = sorted(name for name in set(tasks) & set(told) if tasks[name] != told[name])
        if other:
            yield Finding(
                "warning",
                "workers",
                worker,
                f"{', '.join(other[:MANY])} {'is' if len(other) == 1 else 'are'} locked otherwise"
                " there than in the app that is looked at: another key, or other options",
                "deploy one release of your code to all workers, and restart them",
            )


def _differences(
    worker: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[Finding]:
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name), theirs.get(name)
        if name == "nodes":  # in whichever order
            here, there = sorted(here or ()), sorted(map(str, _listed(there)))
        if here != there:
            yield Finding(
                "wrong" if name in VITAL else "warning",
                "workers",
                worker,
                f"redlock_{name} is {_shown(there)} there, and {_shown(here)} in the app that is"
                " looked at" + (": its locks are others" if name in VITAL else ""),
                "give all programs the same settings, and restart them",
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)
