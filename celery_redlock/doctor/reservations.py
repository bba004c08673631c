"""Check for reservations whose message is gone: in no queue of a Redis broker, and in no worker."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.task_lock import lock_of
from ..messages.headers import MAX_ID_CHARS
from ..messages.results import stored_end
from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..survey.models import Entry
from ..survey.snapshot import survey
from .report import Finding, some, unchecked, warning
from .workers import connection_of

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["examine_reservations"]

MIN_AGE_S = 30.0
"""Seconds. A younger reservation is not checked: its message may be on its way."""
MAX_MESSAGES = 1000
"""A queue with more messages is not read."""
PAUSE_S = 1.0
"""Seconds between two reads, because a message may move from one place to another during one."""
ENDING = ("until_executing", "until_and_while_executing", "until_executed")
"""Scopes whose reservations end with their message."""


def examine_reservations(redlock: Redlock, app: Any, timeout: float) -> Iterator[Finding]:
    """Report reservations whose message is gone, or that it cannot be known whether it is."""
    found = _suspects(redlock, app, timeout)
    for _ in range(2):
        if not found:
            return
        there = _look(app, [_id(one) for one in found], timeout)
        if isinstance(there, Unknown):
            yield _unknown(found, there)
            return
        gone = [one for one in found if not _is_in(there, _id(one))]
        time.sleep(PAUSE_S)
        now = {(one.key, one.digest) for one in _suspects(redlock, app, timeout)}
        found = [one for one in gone if (one.key, one.digest) in now]
    found = [one for one in found if stored_end(_task(app, one), _id(one)) is None]
    if found:
        yield warning(
            f"{len(found)} reserved for messages that are in no queue of this app and in no"
            " worker: further calls of these keys are not published until the reservations end",
            "free each: celery redlock release KEY --reservation",
            where=some([one.resource for one in found]),
            check="leaks",
        )


class Unknown(NamedTuple):
    """The reason why it is not known where messages are, and what to do, as in a finding."""

    why: str
    fix: str


UNREADABLE = Unknown(
    "only the queues of a Redis broker can be read",
    "see with the broker's own tools whether the queues of these tasks have messages",
)
NO_WORKER = (
    "start a worker, or look again when one answers (those of the pool solo answer between two"
    " tasks)"
)


def _unknown(found: Sequence[Entry], unknown: Unknown) -> Finding:
    """Return the finding for reservations whose messages nobody can look for."""
    return unchecked(
        f"unknown whether {len(found)} reserved for more than {MIN_AGE_S:g} s still have a message:"
        f" {unknown.why}",
        unknown.fix,
        where=some([one.resource for one in found]),
        check="leaks",
    )


def _id(entry: Entry) -> str:
    return entry.owner.task_id if entry.owner is not None else ""


def _task(app: Any, entry: Entry) -> Any:
    return app.tasks.get(entry.owner.task) if entry.owner is not None else None


def _suspects(redlock: Redlock, app: Any, timeout: float) -> list[Entry]:
    """Return old reservations that end with their message and whose task holds no lock."""
    try:
        entries = survey(redlock, kinds=("lock", "reservation"), timeout=timeout).entries
    except QuorumUnavailable:
        return []
    at_work = {_id(one) for one in entries if one.kind == "lock"}
    found = []
    for one in entries:
        lock = lock_of(_task(app, one))
        if one.kind != "reservation" or not one.held or lock is None or _id(one) in at_work:
            continue
        if (one.held_for or 0.0) < MIN_AGE_S or not 0 < len(_id(one)) < MAX_ID_CHARS:
            continue
        with contextlib.suppress(ConfigurationError):  # another check reports that
            if lock.options(app).scope in ENDING:
                found.append(one)
    return found


def _look(app: Any, ids: list[str], timeout: float) -> list[bytes] | Unknown:
    """Return the messages of a Redis broker, and the workers' answers about the tasks `ids`.

    The reason if they cannot be read, are too many, or no worker answers.
    """
    found: list[bytes] = []
    try:
        with connection_of(app, timeout) as connection:
            if connection.transport.driver_type != "redis":
                return UNREADABLE
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=timeout)
            channel = connection.default_channel
            if not channel.ack_emulation:
                return UNREADABLE
            for queue in app.amqp.queues:
                for priority in channel.priority_steps:
                    name = channel._q_for_pri(queue, priority)
                    found += channel.client.lrange(name, 0, MAX_MESSAGES)
            found += channel.client.hvals(channel.unacked_key)
            inspect = app.control.inspect(timeout=timeout, connection=connection)
            replies = inspect.query_task(*ids)
    except Exception as error:  # the error's type depends on the transport
        return Unknown(f"no answer from the broker ({type(error).__name__})", "bring it back")
    if not replies:
        return Unknown(f"no worker answered within {timeout:g} s", NO_WORKER)
    if len(found) > MAX_MESSAGES:
        why = f"the queues have more than {MAX_MESSAGES} messages"
        return Unknown(why, "look again when they are shorter")
    return [*found, *(json.dumps(reply, default=str).encode() for reply in replies.values())]


def _is_in(messages: list[bytes], task_id: str) -> bool:
    text = json.dumps(task_id)[1:-1].encode()
    return any(text in message for message in messages)
