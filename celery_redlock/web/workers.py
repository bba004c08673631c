"""What the workers tell: what they hold and wait for, when asked; who waits and loses, unasked.

Both need an app with a broker, and neither is whole: a worker that is busy, or on the other side of
a partition, does not answer in time, and events are sent only where that is switched on. So what is
shown says who answered, and since when was listened.
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

__all__ = ["EVENTS", "Hearing", "ask"]

logger = logging.getLogger("celery_redlock.web")

EVENTS = ("task-lock-waiting", "task-lock-lost")
MAX_EVENTS = 500
"""Events that are kept: the last ones, ten pages full."""
MAX_TEXT_CHARS = 1_000
"""Kept of what a worker says: anybody who reaches the broker can send any amount."""
RETRY_DELAY_S = (1.0, 30.0)
"""Until it is tried again to listen, at first and at most."""
MAX_NUMBER = 1e18
"""No number here is as large, nor infinite; some numbers of JSON are none that can be shown."""
HOLDS = ("resource", "task", "task_id", "pid", "held_for", "remaining", "fencing_token")
WAITS = ("resource", "task", "task_id", "waited", "holder", "where", "next_in")
NUMBERS = ("held_for", "remaining", "waited", "next_in", "timestamp", "pid", "fencing_token")


def ask(app: Any, timeout: float = 1.0) -> list[dict[str, Any]]:
    """Return what each worker says that it holds and waits for; takes `timeout` seconds.

    Names are as the nodes have them, not escaped: any character may be in them.
    """
    replies = app.control.broadcast("redlock", reply=True, timeout=timeout) or []
    told = [
        _answer(name, said)
        for reply in replies
        if isinstance(reply, dict)
        for name, said in reply.items()
    ]
    return sorted(told, key=lambda one: str(one["worker"]))


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
    """Return a value from a worker, as the page can show it: a text, or a number that is one."""
    if value is None:
        return None
    if name not in NUMBERS:
        return _text(value)
    return value if isinstance(value, (int, float)) and abs(value) < MAX_NUMBER else None


def _holder(told: Any) -> str:
    """Return the holder in an event, for people."""
    if not isinstance(told, dict):
        return ""
    names = ("task", "task_id", "pid", "host")
    return _text(holder(*(_text(told.get(name) or "") for name in names)))


def _text(value: Any) -> str:
    return str(value)[:MAX_TEXT_CHARS]


class Hearing:
    """Listens for events of locks, in its own thread, from `start` on until it is closed.

    Attributes:
        since: Since when it listens without a break, in seconds since 1970; None: it does not.
        error: Why it does not, if it was tried.
        count: How many events it has heard.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._heard: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._receiver: Any = None
        self.since: float | None = None
        self.error = ""
        self.count = 0

    def start(self) -> None:
        """Listen, if it does not yet."""
        if self._pid != os.getpid():
            self._reset()  # a web server that forks after it has loaded us
        with self._lock:
            if self._thread is None and not self._over.is_set():
                run = threading.Thread(target=self._run, name="redlock-web-events", daemon=True)
                self._thread = run
                run.start()

    def close(self, timeout: float = 5.0) -> None:
        """Listen no more; wait for the thread for `timeout` seconds at most."""
        self._over.set()
        if self._receiver is not None:
            self._receiver.should_stop = True
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout)

    def heard(self, resource: str | None = None) -> list[dict[str, Any]]:
        """Return what was heard, the last first; of one resource, or of all."""
        with self._lock:
            kept = list(self._heard)[::-1]
        name = None if resource is None else printable(resource)  # as events have it
        return [one for one in kept if name is None or one["resource"] == name]

    def _run(self) -> None:
        delay = RETRY_DELAY_S[0]
        while not self._over.is_set():
            try:
                self._listen()
                delay = RETRY_DELAY_S[0]
            except Exception as error:
                # Not its text: a broker's error may quote its URL.
                self.since, self.error = None, type(error).__name__
                logger.debug("cannot listen for events", exc_info=True)
            self._over.wait(delay)
            delay = min(2 * delay, RETRY_DELAY_S[1])

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            handlers = dict.fromkeys(EVENTS, self._hear)
            # Not the key of these events alone: a worker sends some of a task's together.
            receiver = self._app.events.Receiver(connection, handlers, routing_key="task.#")
            ready = receiver.on_consume_ready

            def listening(*args: Any, **kwargs: Any) -> None:
                ready(*args, **kwargs)
                self.since, self.error = time.time(), ""
                if self._over.is_set():  # closed before there was a receiver to tell
                    receiver.should_stop = True

            receiver.on_consume_ready = listening
            self._receiver = receiver
            receiver.capture(limit=None, timeout=None, wakeup=False)

    def _hear(self, event: dict[str, Any]) -> None:
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
            self._heard.append(it)
            self.count += 1
