"""What is wrong with an app's tasks and settings. Nothing is asked over a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config.declared import given_to_all, refuse_unread
from ..config.options import TaskOptions
from ..config.settings import read_settings
from ..config.task_lock import lock_of
from ..messages.broker import unacknowledged_for
from ..messages.policy import check_rejecting
from ..protocol.errors import ConfigurationError
from .report import Finding

__all__ = ["examine_tasks", "ttls_of"]

VISIBLE = 3600.0
"""Seconds for which a Redis broker lets a worker keep a message, where nothing else is set."""


def examine_tasks(app: Any) -> Iterator[Finding]:
    """Look at the settings of an app, and at each of its locked tasks."""
    try:
        read_settings(app)
    except ConfigurationError as error:
        yield _broken("settings", error)
        return
    driver = _driver(app)
    visible = _visible(app, driver)
    if driver == "amqp":
        yield from _queues(app)
    for name, task in sorted(app.tasks.items()):
        lock = lock_of(task)
        try:
            # An app that imports nothing of ours has not been told.
            refuse_unread(task, given_to_all(app))
            if lock is None:
                continue
            options = lock.options(app)
        except ConfigurationError as error:
            yield _broken(name, error)
            continue
        yield from _task(name, task, options, visible, driver)


def ttls_of(app: Any) -> list[float]:
    """The ttls in use, in seconds: the app's, its tasks', and how long locks are kept for."""
    try:
        ttls = {read_settings(app).ttl}
        locks = [lock for task in app.tasks.values() if (lock := lock_of(task)) is not None]
        options = [lock.options(app) for lock in locks]
        kept = {one.hold_for for one in options if one.hold_for > one.ttl}
        return sorted(ttls | {one.ttl for one in options} | kept)
    except ConfigurationError:
        return []


def _broken(where: str, error: ConfigurationError) -> Finding:
    return Finding("wrong", "configuration", where, str(error), "change what it names")


def _driver(app: Any) -> str:
    """The kind of broker; empty if its transport is not installed: no worker starts with it."""
    try:
        return str(app.connection_for_write().transport.driver_type)
    except Exception:
        return ""


def _queues(app: Any) -> Iterator[Finding]:
    """Quorum queues that RabbitMQ does not delay messages for."""
    for name, queue in sorted(app.amqp.queues.items()):
        quorum = (queue.queue_arguments or {}).get("x-queue-type") == "quorum"
        if quorum and queue.exchange.type == "direct":
            yield Finding(
                "warning",
                "queues",
                name,
                "it is a quorum queue behind a direct exchange: workers hold the tasks that wait"
                " there, and those take the place of others in their prefetch window",
                "use a topic exchange, so that RabbitMQ holds them",
            )


def _visible(app: Any, driver: str) -> float | None:
    """For how many seconds a worker may keep a message; None if that is not limited here."""
    if driver == "amqp":
        return unacknowledged_for(app)
    if driver != "redis":
        return None
    given = (app.conf.broker_transport_options or {}).get("visibility_timeout", VISIBLE)
    return float(given) if isinstance(given, (int, float)) else None


def _task(
    name: str, task: Any, options: TaskOptions, visible: float | None, driver: str
) -> Iterator[Finding]:
    try:
        check_rejecting(task, options)
    except ConfigurationError as error:
        yield Finding("wrong", "acks", name, str(error), "set acks_late=True for it")
    limit = _limit(task)
    if limit and options.max_lifetime is not None and limit > options.max_lifetime:
        yield Finding(
            "wrong",
            "lifetime",
            name,
            f"it may run for {limit:g} s, and its lock ends after {options.max_lifetime:g} s"
            " (max_lifetime)",
            "give it a longer max_lifetime, or a shorter time_limit",
        )
    if visible is None:
        return
    if driver == "amqp":
        if limit > visible and task.acks_late:
            yield Finding(
                "wrong",
                "visibility",
                name,
                f"it may run for {limit:g} s and is acknowledged late, but RabbitMQ closes the"
                f" channel of a worker that keeps a message for {visible:g} s (consumer_timeout):"
                " that ends the worker",
                "set consumer_timeout in RabbitMQ to more than the longest time limit, and"
                " broker_transport_options = {'visibility_timeout': ...} to the same, in seconds",
            )
        return
    if limit and limit > visible:
        copy = "its own message comes back while it is at work, and waits for its lock"
        queued = "what waits in the worker behind it is delivered a second time"
        yield Finding(
            "wrong" if task.acks_late else "warning",
            "visibility",
            name,
            f"it may run for {limit:g} s, and the broker delivers again after {visible:g} s:"
            f" {copy if task.acks_late else queued}",
            "set broker_transport_options = {'visibility_timeout': ...} to more than the longest"
            " time limit",
        )
    elif task.acks_late and visible < options.ttl:
        yield Finding(
            "warning",
            "visibility",
            name,
            f"the broker delivers again after {visible:g} s, before the lock of a worker that died"
            f" is free ({options.ttl:g} s): the copy waits",
            "set visibility_timeout to more than the ttl, or give the task a shorter ttl",
        )


def _limit(task: Any) -> float:
    """Seconds after which Celery ends it; 0 for never."""
    conf = task.app.conf
    hard = task.time_limit or conf.task_time_limit
    soft = task.soft_time_limit or conf.task_soft_time_limit
    return float(hard or soft or 0.0)
