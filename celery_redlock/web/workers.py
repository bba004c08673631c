"""Data from the workers: holds and waits, on request; waits and losses, from their events.

Both need an app with a broker, and both are incomplete: a worker that is busy, or on the other side
of a partition, does not answer in time, and events are sent only where they are enabled. So the
page names the workers that answered, and the time since which it receives events.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Any

from ..protocol.texts import printable
from .formatting import holder

__all__ = ["EVENTS", "EventReceiver", "ask"]

logger = logging.getLogger("celery_redlock.web")

EVENTS = ("task-lock-waiting", "task-lock-lost")
MAX_EVENTS = 500
"""Events kept: the last ones, ten pages full."""
MAX_TEXT_CHARS = 1_000
"""Characters kept of a worker's text: anyone with access to the broker can send any amount."""
RETRY_DELAY_S = (1.0, 30.0)
"""Seconds until the next attempt to receive events: at first, and at most."""
MAX_NUMBER = 1e18
"""Limit for numbers: infinite and absurd ones, which JSON allows, cannot be shown."""
HOLDS = ("resource", "task", "task_id", "pid", "held_for", "remaining", "fencing_token")
WAITS = ("resource", "task", "task_id", "waited", "holder", "where", "next_in")
NUMBERS = ("held_for", "remaining", "waited", "next_in", "timestamp", "pid", "fencing_token")


def ask(app: Any, timeout: float = 1.0) -> list[dict[str, Any]]:
    """Return each worker's report of its holds and waits; takes `timeout` seconds.

    Names are as the nodes have them, not escaped: they may contain any character.
    """
    replies = app.control.broadcast("redlock", reply=True, timeout=timeout) or []
    reported = [
        _answer(name, said)
        for reply in replies
        if isinstance(reply, dict)
        for name, said in reply.items()
    ]
    return sorted(reported, key=lambda one: str(one["worker"]))


def _answer(name: Any, said: Any) -> dict[str, Any]:
    error = None
    if not isinstance(said, dict):
        error = "it answered what cannot be read"
    elif "error" in said:
        error = _text(said["error"])
    return {
        "worker": _text(name),
        "error": error,
        "holds": [] if error else _rows(said.get("holds"), HOLDS),
        "waits": [] if error else _waits(said.get("waits")),
        "queued": [] if error else _names(said.get("queued")),
    }


def _rows(rows: Any, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [{name: _plain(name, row.get(name)) for name in fields} for row in found]


def _waits(rows: Any) -> list[dict[str, Any]]:
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    pairs = zip(_rows(found, WAITS), found, strict=True)
    return [{**row, "resources": _names(given.get("resources"))} for row, given in pairs]


def _names(names: Any) -> list[str]:
    found = names if isinstance(names, list) else []
    return [_text(name) for name in found if isinstance(name, str)]


def _plain(name: str, value: Any) -> Any:
    """Return a value from a worker in a form that the page can show: a text, or a sane number."""
    if value is None:
        return None
    if name not in NUMBERS:
        return _text(value)
    return value if isinstance(value, (int, float)) and abs(value) < MAX_NUMBER else None


def _holder(reported: Any) -> str:
    """Return the holder named in an event, for people."""
    if not isinstance(reported, dict):
        return ""
    names = ("task", "task_id", "pid", "host")
    return _text(holder(*(_text(reported.get(name) or "") for name in names)))


def _text(value: Any) -> str:
    return str(value)[:MAX_TEXT_CHARS]


class EventReceiver:
    """Receiver of lock events, in a thread of its own, from `start` until `close`.

    Attributes:
        since: Time since which it receives without a break, in seconds since 1970; None: not now.
        error: Why it does not receive, if it has tried.
        count: Number of events received.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._receiver: Any = None
        self.since: float | None = None
        self.error = ""
        self.count = 0

    def start(self) -> None:
        """Start receiving, unless it has started."""
        if self._pid != os.getpid():
            self._reset()  # the web server has forked after loading us
        with self._lock:
            if self._thread is None and not self._over.is_set():
                run = threading.Thread(target=self._run, name="redlock-web-events", daemon=True)
                self._thread = run
                run.start()

    def close(self, timeout: float = 5.0) -> None:
        """Stop receiving; wait for the thread for at most `timeout` seconds."""
        self._over.set()
        if self._receiver is not None:
            self._receiver.should_stop = True
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout)

    def received(self, resource: str | None = None) -> list[dict[str, Any]]:
        """Return the events received, the last one first; of one resource, or of all."""
        with self._lock:
            kept = list(self._events)[::-1]
        name = None if resource is None else printable(resource)  # names in events are printable
        return [one for one in kept if name is None or one["resource"] == name]

    def _run(self) -> None:
        delay = RETRY_DELAY_S[0]
        while not self._over.is_set():
            try:
                self._listen()
                delay = RETRY_DELAY_S[0]
            except Exception as error:
                # Only the type: the text of a broker's error may quote its URL, with the password.
                self.since, self.error = None, type(error).__name__
                logger.debug("cannot listen for events", exc_info=True)
            self._over.wait(delay)
            delay = min(2 * delay, RETRY_DELAY_S[1])

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            handlers = dict.fromkeys(EVENTS, self._receive)
            # All task events, not just the keys of these two: a worker batches some task events.
            receiver = self._app.events.Receiver(connection, handlers, routing_key="task.#")
            ready = receiver.on_consume_ready

            def listening(*args: Any, **kwargs: Any) -> None:
                ready(*args, **kwargs)
                self.since, self.error = time.time(), ""
                if self._over.is_set():  # close() came before `_receiver` was set
                    receiver.should_stop = True

            receiver.on_consume_ready = listening
            self._receiver = receiver
            receiver.capture(limit=None, timeout=None, wakeup=False)

    def _receive(self, event: dict[str, Any]) -> None:
        it = {
            "at": _plain("timestamp", event.get("timestamp")) or time.time(),
            "what": "lost" if event.get("type") == "task-lock-lost" else "waiting",
            "resource": _text(event.get("resource", "")),
            "task": _text(event.get("name") or ""),
            "task_id": _text(event.get("uuid") or ""),
            "worker": _text(event.get("hostname") or ""),
            "holder": _holder(event.get("holder")),
            "reason": _text(event.get("reason") or ""),
            "seconds": _plain("waited", event.get("held_for", event.get("waited"))),
        }
        with self._lock:
            self._events.append(it)
            self.count += 1
