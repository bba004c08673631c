"""Checks of an app's tasks and settings. No network is used."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from celery.schedules import crontab
from celery.schedules import schedule as every

from ..config.checks import HOUR, long_ttl_warning
from ..config.declared import given_to_all, refuse_unread
from ..config.options import TaskOptions
from ..config.settings import enabled, read_settings
from ..config.settings import unread as unread_settings
from ..config.task_lock import lock_of
from ..keys.resolver import is_own
from ..messages.broker import max_unacknowledged_s
from ..messages.policy import check_rejecting, parkable
from ..protocol.errors import ConfigurationError
from .report import Finding, broken, run, unchecked, warning, wrong

__all__ = ["examine_tasks", "ttls_of"]

REDIS_VISIBILITY_S = 3600.0
"""Seconds for which a Redis broker lets a worker keep a message, if not set (kombu's default)."""


_ARGUMENT = re.compile(r"\{[^{}<>]*\}|<[^{}<>]*>")


class _Broker(NamedTuple):
    """The kind of broker, and the seconds for which a worker may keep a message; None: any time."""

    driver: str
    visible: float | None


def examine_tasks(app: Any) -> Iterator[Finding]:
    """Check the settings of an app, and each of its locked tasks."""
    try:
        read_settings(app)
    except ConfigurationError as error:
        yield broken("settings", error)
        return
    yield from (_unread(said, "settings") for said in unread_settings(app.conf))
    broker = _broker(app)
    if broker.driver == "amqp":
        yield from run({"queues": _queues}, "queues", app)
    yield from run({"visibility": _stranded}, "broker", app, broker)
    locked: dict[str, TaskOptions] = {}
    for name, task in sorted(app.tasks.items()):
        lock = lock_of(task)
        try:
            # The values for all tasks are passed: an app that imports nothing of ours lacks them.
            unread = refuse_unread(task, given_to_all(app))
            options = lock.options(app) if lock is not None else None
        except ConfigurationError as error:
            yield broken(name, error)
            continue
        yield from (_unread(said, name) for said in unread)
        if options is not None:
            locked[name] = options
            yield from run(TASK_CHECKS, name, task, options, broker)
    yield from run({"limits": _limits}, "limit", locked)
    yield from run({"schedule": _schedule}, "beat", app, locked)


def _unread(said: str, where: str) -> Finding:
    return warning(said, "rename it, or write it where it is read", where, "configuration")


def ttls_of(app: Any) -> list[float]:
    """Return the ttls in use, in seconds: the app's and its tasks'."""
    try:
        ttls = {read_settings(app).ttl}
        locks = [lock for task in app.tasks.values() if (lock := lock_of(task)) is not None]
        options = [lock.options(app) for lock in locks]
        return sorted(ttls | {one.ttl for one in options})
    except ConfigurationError:
        return []


def _broker(app: Any) -> _Broker:
    try:
        driver = str(app.connection_for_write().transport.driver_type)
    except Exception:  # its transport is not installed, so no worker starts with it either
        return _Broker("", None)
    if driver == "amqp":
        return _Broker(driver, max_unacknowledged_s(app))
    options = app.conf.broker_transport_options or {}
    given = options.get("visibility_timeout", REDIS_VISIBILITY_S)
    limited = driver == "redis" and isinstance(given, (int, float))
    return _Broker(driver, float(given) if limited else None)


def _queues(app: Any) -> Iterator[Finding]:
    """Find quorum queues for which RabbitMQ does not delay messages."""
    for name, queue in sorted(app.amqp.queues.items()):
        quorum = (queue.queue_arguments or {}).get("x-queue-type") == "quorum"
        if quorum and queue.exchange.type == "direct":
            yield warning(
                "it is a quorum queue behind a direct exchange: workers hold the tasks that wait"
                " there, and those take the place of others in their prefetch window",
                "use a topic exchange, so that RabbitMQ holds them",
                where=name,
            )


def _stranded(app: Any, broker: _Broker) -> Iterator[Finding]:
    """Find a visibility timeout longer than the default, if tasks wait in workers."""
    visible = broker.visible or 0.0
    if broker.driver == "redis" and visible > REDIS_VISIBILITY_S and _parks(app):
        yield warning(
            f"a worker that is killed keeps what it had prefetched, and waiting tasks with a"
            f" countdown, for {visible:g} s (visibility_timeout). What it had parked comes back"
            " within three minutes",
            "set broker_transport_options = {'visibility_timeout': ...} to a little more than the"
            " longest task takes",
        )


def _limits(locked: Mapping[str, TaskOptions]) -> Iterator[Finding]:
    """Find tasks that share a template and disagree on how many may run at a time."""
    shared: dict[Any, dict[Any, str]] = {}
    shown: dict[Any, str] = {}
    read: set[Any] = set()
    for name, options in locked.items():
        key, limit = options.key, options.limit
        if key is None or callable(key) or is_own(key):
            continue
        keys = (key,) if isinstance(key, str) else key
        each = limit if isinstance(limit, tuple) else (limit,) * len(keys)
        for one, many in zip(keys, each, strict=False):
            same = _ARGUMENT.sub("<>", one), options.scope_name
            shown.setdefault(same, one)
            shared.setdefault(same, {}).setdefault(many, name)
            read |= {same} if options.shared else set()
    for same, tasks in shared.items():
        if len(tasks) == 1:
            continue
        limits = ", ".join(
            f"{'a function' if callable(limit) else limit} ({name})"
            for limit, name in sorted(tasks.items(), key=_functions_last)
        )
        where, key = ", ".join(tasks.values()), shown[same]
        if any(map(callable, tasks)):
            yield unchecked(
                f"the key {key} has several limits, and what a function returns is not known here:"
                f" {limits}",
                "make sure that they agree: otherwise the largest of them applies to all",
                where,
            )
        elif same in read:
            yield warning(
                f"the key {key} has readers (shared), and several limits: {limits}. Tasks with a"
                " limit run beside readers and writers",
                "leave the limit out, or give these tasks keys of their own",
                where,
            )
        else:
            yield warning(
                f"the key {key} has several limits: {limits}. As many bodies run at a time as the"
                " largest of them says, those of the other tasks included",
                "give these tasks the same limit, or keys of their own",
                where,
            )


def _functions_last(item: tuple[Any, str]) -> float:
    return math.inf if callable(item[0]) else item[0]


def _schedule(app: Any, locked: Mapping[str, TaskOptions]) -> Iterator[Finding]:
    """Find entries of the beat whose reservation lasts, after a success, beyond their next tick."""
    for name, entry in (app.conf.beat_schedule or {}).items():
        options = locked.get(entry.get("task", "")) if isinstance(entry, Mapping) else None
        if options is None:
            continue
        of_entry = (entry.get("options") or {}).get("lock")
        options = options.replace(**of_entry) if isinstance(of_entry, Mapping) else options
        if options.scope not in ("until_succeeded", "until_expired"):
            continue
        period, kept = _longest_pause(entry.get("schedule")), options.reserve_ttl or HOUR
        if period is None:
            yield unchecked(
                f"how often it is due is not known here; its task stays reserved for {kept:g} s",
                "make sure that this is less than the time between two ticks",
                where=name,
            )
        elif kept > 0.9 * period:
            yield warning(
                f"its task {entry['task']} stays reserved for {kept:g} s ({options.scope}), and is"
                f" due again within {period:g} s: a tick that comes before that is over is a"
                " duplicate, and is not sent",
                f"give the task a lock_reserve_ttl of less than that: {0.8 * period:g}, say",
                where=name,
            )


def _longest_pause(schedule: Any) -> float | None:
    """Return the longest time between two ticks, if there are some each day; None if not known.

    In seconds. The shortest time is no measure: several ticks in a night may be meant as retries
    of one.
    """
    at: Any = schedule  # the type stubs lack its attributes
    if type(schedule) is crontab:
        days = len(at.day_of_week), len(at.day_of_month), len(at.month_of_year)
        minutes = sorted(60 * hour + minute for hour in at.hour for minute in at.minute)
        if not minutes or days != (7, 31, 12):
            return None
        following = [*minutes[1:], minutes[0] + 24 * 60]
        return float(60 * max(b - a for a, b in zip(minutes, following, strict=True)))
    seconds = at.run_every if type(schedule) is every else schedule
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    return float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else None


def _parks(app: Any) -> bool:
    """Return True if waiting tasks of an app wait in its workers, not with the broker."""
    locks = [lock for task in app.tasks.values() if (lock := lock_of(task)) is not None]
    with contextlib.suppress(ConfigurationError):  # another check reports that
        parking = enabled(app.conf) and app.conf.get("redlock_parking", True)
        return bool(parking) and any(parkable(lock.options(app)) for lock in locks)
    return False


def _acks(task: Any, options: TaskOptions, _broker: _Broker) -> Iterator[Finding]:
    try:
        check_rejecting(task, options)
    except ConfigurationError as error:
        yield wrong(str(error), "set acks_late=True for it")


def _lifetime(task: Any, options: TaskOptions, _broker: _Broker) -> Iterator[Finding]:
    limit = _time_limit(task)
    if options.max_lifetime is not None and limit > options.max_lifetime:
        yield wrong(
            f"it may run for {limit:g} s, and its lock ends after {options.max_lifetime:g} s"
            " (max_lifetime)",
            "give it a longer max_lifetime, or a shorter time_limit",
        )


def _visibility(task: Any, options: TaskOptions, broker: _Broker) -> Iterator[Finding]:
    limit, visible = _time_limit(task), broker.visible
    if visible is None:
        return
    if broker.driver == "amqp":
        if limit > visible and task.acks_late:
            yield wrong(
                f"it may run for {limit:g} s and is acknowledged late, but RabbitMQ closes the"
                f" channel of a worker that keeps a message for {visible:g} s (consumer_timeout):"
                " that ends the worker",
                "set consumer_timeout in RabbitMQ to more than the longest time limit, and"
                " broker_transport_options = {'visibility_timeout': ...} to the same, in seconds",
            )
    elif limit > visible:
        copy = "its own message comes back while it is at work, and waits for its lock"
        queued = "messages that wait behind it in the worker are delivered a second time"
        yield (wrong if task.acks_late else warning)(
            f"it may run for {limit:g} s, and the broker delivers again after {visible:g} s:"
            f" {copy if task.acks_late else queued}",
            "set broker_transport_options = {'visibility_timeout': ...} to more than the longest"
            " time limit",
        )
    elif task.acks_late and visible < options.ttl:
        yield warning(
            f"the broker delivers again after {visible:g} s, before the lock of a worker that died"
            f" is free ({options.ttl:g} s): the copy waits",
            "set visibility_timeout to more than the ttl, or give the task a shorter ttl",
        )


def _ttl(_task: Any, options: TaskOptions, _broker: _Broker) -> Iterator[Finding]:
    if said := long_ttl_warning(options.ttl):
        yield warning(said, "give it in seconds")


TASK_CHECKS = {"ttl": _ttl, "acks": _acks, "lifetime": _lifetime, "visibility": _visibility}


def _time_limit(task: Any) -> float:
    """Return the seconds after which Celery ends a task; 0 for never."""
    conf = task.app.conf
    hard = task.time_limit or conf.task_time_limit
    soft = task.soft_time_limit or conf.task_soft_time_limit
    return float(hard or soft or 0.0)
