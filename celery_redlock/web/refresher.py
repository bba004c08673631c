"""What is looked up again and again in the background, so that no page waits for it for long.

A page must not wait for a node that hangs, nor ten open pages ask ten times. So one thread looks,
when a reader wants to know, and once in a while when there is none; and every reader is given what
it saw last, with the time at which it saw it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Fresh", "Seen"]

logger = logging.getLogger("celery_redlock.web")
T = TypeVar("T")

IDLE_SHARE = 10
"""Without a reader, at most one part in so many of the time is spent on looking."""


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was seen last, and what became of the last look.

    Attributes:
        what: What the last look that went well has seen; None if there was none yet.
        at: When that was, in seconds since 1970; 0.0 if there was none yet.
        error: Why the last look saw nothing; None if it went well, or there was none yet.
    """

    what: T | None = None
    at: float = 0.0
    error: Exception | None = None


class Fresh(Generic[T]):
    """Looks in its own thread, which starts with the first reader.

    Args:
        look: Sees what there is to see; what it raises is given to the readers.
        every: Seconds between two looks at least.
        idle: Seconds between two looks without a reader; None: there are none then.
        rest: Seconds without a reader after which it stops looking; None: never.
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
        # When the last look began and ended; while one is under way, the former is later.
        self._began = self._ended = float("-inf")
        self._asked = time.monotonic()
        self._wanted = self._closed = False

    def get(self, patience: float) -> Seen[T]:
        """Return what is seen now; or, if it takes more than `patience` seconds, what was last."""
        if self._pid != os.getpid():
            self._reset()  # a web server that forks after it has loaded us: threads do not follow
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
        """Look no more; wait for a look that is under way, for `timeout` seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout)

    def _due(self) -> float:
        """Seconds until the next look."""
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
