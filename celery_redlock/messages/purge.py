"""Purge a queue, and release the reservations of its messages.

This serves our own command, and runs ahead of `app.control.purge()` and `celery purge`. It handles
one message at a time: the message is fetched, its reservation is released by compare-and-delete,
and only then it is acknowledged. If that is interrupted, the message is delivered again, without
its reservation. So there may be a duplicate in the queue, but never a key that stays reserved for a
message that is gone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, NamedTuple

from celery.states import SUCCESS
from kombu import Queue

from ..config.settings import enabled
from ..config.task_lock import lock_of
from ..locking.redlock import Redlock
from ..protocol import outcome, quorum
from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.restart_guard import Doubt
from ..protocol.texts import event, printable
from ..protocol.values import Query, Vote
from .headers import RESERVATION, header_of, is_redelivered, short_id
from .replaced import note_begun
from .reservation import Reservation, claim_of, free, free_by_id
from .results import stored_end

__all__ = ["Purged", "count", "purge", "purge_first", "silent_nodes_warning", "wrap_command"]

logger = logging.getLogger("celery_redlock.task")


UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""The errors of kombu for JSON that is not a message: not a mapping, or without required items."""


class Purged(NamedTuple):
    """A message that was deleted.

    Attributes:
        task: Its task's name, from the message.
        task_id: Its id, from the message.
        resource: The resource that it had reserved; empty if none.
        freed: True if its reservation was released. If not, the reservation belonged to another by
            then, or the body is running or may have succeeded.
    """

    task: str
    task_id: str
    resource: str
    freed: bool


def count(app: Any, queue: str) -> int:
    """Return the number of messages in a queue; 0 if there is no such queue.

    Messages that a worker has fetched do not count, also if they wait there for their ETA.
    """
    with app.connection_for_read() as connection:
        there = Queue(queue, channel=connection.default_channel)
        try:
            declared: Any = there.queue_declare(passive=True)
        except connection.channel_errors as error:
            if str(getattr(error, "reply_code", "")) == "404":  # it is a text with kombu's Redis
                return 0
            raise
        return int(declared.message_count)


def purge(app: Any, queue: str, most: int) -> Iterator[Purged]:
    """Delete at most `most` messages of a queue; yield each when it is deleted.

    Raises:
        QuorumUnavailable: Too few nodes answered to release a reservation; its message is back in
            the queue.
    """
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for _ in range(most):
            try:
                # Not `Queue.get`: for a message that it cannot decompress it raises, and so returns
                # the message to the queue.
                message = channel.basic_get(queue=queue, no_ack=False)
                if message is not None:
                    message = channel.message_to_python(message)
            except UNREADABLE as error:  # raised by kombu's Redis, which has popped the message
                line = "%s: a message that is not from Celery was purged: %s"
                logger.warning(
                    line,
                    printable(queue),
                    printable(repr(error)),
                    extra=event("message_unreadable"),
                )
                yield Purged("", "", "", False)
                continue
            if message is None:
                return
            try:
                gone = _release_reservation(app, message)
            except BaseException:
                message.requeue()
                raise
            message.ack()
            yield gone


def silent_nodes_warning(redlock: Redlock) -> str:
    """Return a text on the nodes that may still have keys of just released reservations, or "".

    A node answers in order, so a node that answers now has executed all earlier releases.
    """
    asked = Query(("celery_redlock",), len(redlock.nodes))
    patience = redlock.node_timeout
    ballot = redlock.client.driver.run(lambda now: quorum.peek([asked], now, patience))
    answers = zip(redlock.nodes, ballot.votes, ballot.details, strict=True)
    away = [
        node
        for node, vote, detail in answers
        if vote is not Vote.YES and not isinstance(detail, Doubt)
    ]
    if not away:
        return ""
    return (
        f"{', '.join(away)} did not answer: the keys stay there until their ttl is over, an hour by"
        " default. That does no harm while the other nodes work. When it is back,"
        " `celery -A APP redlock ls` shows them, and"
        " `celery -A APP redlock release KEY --reservation` frees one"
    )


def purge_first(app: Any, queue: str) -> tuple[int, bool]:
    """Purge a queue in place of Celery, so that nothing stays reserved.

    Celery deletes all messages by one request, also those that came meanwhile. It is left to do so
    only if no task has a lock, or too few nodes answer.

    Returns:
        The number of messages deleted, and True if Celery must delete the rest.
    """
    app.loader.import_default_modules()
    if not enabled(app.conf) or all(lock_of(task) is None for task in app.tasks.values()):
        return 0, True
    gone = 0
    try:
        freed = 0
        for message in purge(app, queue, count(app, queue)):
            gone += 1
            freed += message.freed
        if freed and (left := silent_nodes_warning(Redlock.from_app(app))):
            logger.warning("%s is purged; %s", printable(queue), left, extra=event("queue_purged"))
    except (QuorumUnavailable, ConfigurationError) as error:
        line = "%s is purged, but keys of its messages may stay reserved until they expire: %s"
        logger.warning(line, printable(queue), error, extra=event("queue_purged"))
        return gone, True
    return gone, False


def wrap_command() -> None:
    """Make `celery purge` release the reservations of the messages, if its command is loaded."""
    command = getattr(sys.modules.get("celery.bin.purge"), "purge", None)
    original = getattr(command, "callback", None)
    if command is None or original is None or hasattr(original, "__redlock__"):
        return

    @wraps(original)
    def callback(*args: Any, **options: Any) -> Any:
        app = sys.modules["click"].get_current_context().obj.app
        connect = app.connection_for_write

        def connection_for_write(*args: Any, **options: Any) -> Any:
            connection = connect(*args, **options)
            channel = connection.default_channel
            channel.queue_purge = partial(_purge_both, app, channel.queue_purge)
            return connection

        app.connection_for_write = connection_for_write
        try:
            return original(*args, **options)
        finally:
            app.connection_for_write = connect

    callback.__redlock__ = True  # type: ignore[attr-defined]
    command.callback = callback


def _purge_both(app: Any, rest: Callable[[str], int | None], queue: str) -> int:
    """Purge a queue with `purge_first`, then with `rest` if needed; return the number deleted."""
    gone, more = purge_first(app, queue)
    return gone + ((rest(queue) or 0) if more else 0)


def _release_reservation(app: Any, message: Any) -> Purged:
    """Release the reservation of a message.

    Raises:
        QuorumUnavailable: Too few nodes answered.
    """
    headers = message.headers if isinstance(message.headers, Mapping) else {}
    name, task_id = headers.get("task") or "", short_id(headers.get("id") or "")
    task = name if isinstance(name, str) else short_id(name)
    note = Reservation.of(header_of(dict(headers), RESERVATION), headers.get("id"))
    if note is None or not note.token:
        return Purged(task, task_id, "", False)
    redlock, again = Redlock.from_app(app), is_redelivered(message.delivery_info)
    kept = note.scope == "until_succeeded"
    if kept and (again or stored_end(app.tasks.get(task), task_id) == SUCCESS):
        # An earlier delivery may have succeeded, and then keeps the key.
        return Purged(task, task_id, note.resource, False)
    if again:
        # An earlier delivery of it may be running, and have the reservation.
        lock = lock_of(app.tasks.get(task))
        limit = 1 if lock is None else lock.options(app).limit
        done = free_by_id(redlock, note.resources, task_id, limit)
        return Purged(task, task_id, note.resource, bool(done))
    claim = claim_of(redlock, note)
    ballot = free(redlock, claim, redlock.node_timeout)
    if not ballot.quorum_answered:
        raise outcome.unavailable(note.resource, ballot, redlock.nodes)
    if ballot.denied:
        # A call that was about to replace it may fail, and restore it; see `Places`.
        note_begun(redlock, claim)
        free(redlock, claim, redlock.node_timeout)
    return Purged(task, task_id, note.resource, not ballot.denied)
