"""Background refresh of data that pages show, so that no page waits long for it.

A page must not wait for a node that hangs, and ten open pages must not ask ten times. So one thread
refreshes the data, when a reader needs it, and now and then without a reader. Every reader gets the
latest data, with its time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Refresher", "Seen"]

logger = logging.getLogger("celery_redlock.web")
T = TypeVar("T")

IDLE_SHARE = 10
"""Without a reader, at most one part in this many of the time is spent on refreshing."""


@dataclass(frozen=True)
class Seen(Generic[T]):
    """The latest data, and the outcome of the last refresh.

    Attributes:
        what: The data of the last successful refresh; None before the first.
        at: Time of that refresh, in seconds since 1970; 0.0 before the first.
        error: The error of the last refresh; None if it succeeded, or before the first.
    """

    what: T | None = None
    at: float = 0.0
    error: Exception | None = None


class Refresher(Generic[T]):
    """Data that a thread of its own refreshes; the thread starts with the first reader.

    Args:
        look: Function that returns the data; its exceptions are passed to the readers.
        every: Minimum seconds between two refreshes.
        idle: Seconds between two refreshes without a reader; None: none then.
        rest: Seconds without a reader after which refreshing stops; None: never.
    """

    def __init__(
        self,
        look: Callable[[], T],
        *,
        every: float = 1.0,
        idle: float | None = None,
        rest: float | None = None,
    ) -> None:
        self._look, self._every, self._idle, self._rest = look, every, idle, rest
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._seen: Seen[T] = Seen()
        # Begin and end of the last refresh; while one is under way, `_began` is the later one.
        self._began = self._ended = float("-inf")
        self._asked = time.monotonic()
        self._wanted = self._closed = False

    def get(self, patience: float) -> Seen[T]:
        """Return fresh data; or, if that takes longer than `patience` seconds, the data before."""
        if self._pid != os.getpid():
            self._reset()  # the server forked after loading us: threads do not survive that
        with self._changed:
            self._asked = time.monotonic()
            before, busy = self._seen, self._began > self._ended
            if not busy:
                if self._closed or self._asked < self._began + self._every:
                    return before
                self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="redlock-web", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._seen is not before or self._closed, patience)
            return self._seen

    def close(self, timeout: float = 5.0) -> None:
        """Stop refreshing; wait for a refresh under way, for at most `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout)

    def _due(self) -> float:
        """Return the seconds until the next refresh."""
        now = time.monotonic()
        took = max(0.0, self._ended - self._began)
        if self._wanted:
            return max(self._began + self._every, self._ended + took) - now
        if self._idle is None or (self._rest is not None and now > self._asked + self._rest):
            return float("inf")
        return self._ended + max(self._idle, IDLE_SHARE * took) - now

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (due := self._due()) > 0:
                    self._changed.wait(None if due == float("inf") else due)
                if self._closed:
                    return
                self._wanted = False
                self._began = time.monotonic()
            try:
                seen = Seen(self._look(), time.time())
            except Exception as error:
                logger.debug("a look in the background failed", exc_info=True)
                seen = Seen(self._seen.what, self._seen.at, error)
            with self._changed:
                self._ended = time.monotonic()
                self._seen = seen
                self._changed.notify_all()
