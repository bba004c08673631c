"""What is looked up again and again in the background, so that no page waits for it for long.

A page must not wait for a node that hangs, nor ten open pages ask ten times. So one thread looks,
when somebody wants to know, and once in a while when nobody does; and everybody is given what it
saw last, with the time at which it saw it.
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

SHARE = 10
"""With nobody looking, of the time one part in so many is spent on looking, at most."""


@dataclass(frozen=True)
class Seen(Generic[T]):
    """What was seen last, and what became of the last look.

    Attributes:
        what: What the last look that went well has seen; None if there was none yet.
        at: When that was, in seconds since 1970; 0.0 if there was none yet.
        error: Why the last look saw nothing; None if it went well, or there was none yet.
        looks: How many looks there were.
    """

    what: T | None = None
    at: float = 0.0
    error: Exception | None = None
    looks: int = 0


class Fresh(Generic[T]):
    """Looks with `look`, in a thread of its own, which starts with the first who wants to know.

    Args:
        look: Sees what there is to see; what it raises is given to who wants to know.
        every: Seconds between two looks at least.
        idle: Seconds between two looks while nobody wants to know; None: there are none then.
        rest: Seconds without anybody who wants to know, after which it stops looking; None: never.
        then: Called in that thread after each look, with what was seen.
    """

    def __init__(
        self,
        look: Callable[[], T],
        *,
        every: float = 1.0,
        idle: float | None = None,
        rest: float | None = None,
        then: Callable[[Seen[T]], None] | None = None,
    ) -> None:
        self._look, self._every, self._idle, self._rest = look, every, idle, rest
        self._then = then
        self._new()

    def _new(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._seen: Seen[T] = Seen()
        self._began = self._ended = float("-inf")
        self._asked = time.monotonic()
        self._wanted = self._busy = self._closed = False

    def get(self, patience: float) -> Seen[T]:
        """What is seen now; or, if that takes longer than `patience`, in seconds: what was last."""
        if self._pid != os.getpid():
            self._new()  # a web server that forks after it has loaded us; threads do not come along
        until = time.monotonic() + patience
        with self._changed:
            self._asked = time.monotonic()
            recent = self._seen.looks > 0 and self._asked < self._began + self._every
            if self._closed or (recent and not self._busy):
                return self._seen
            self._wanted = self._wanted or not self._busy
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="redlock-web", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            looks = self._seen.looks
            while self._seen.looks == looks and not self._closed:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._seen

    def close(self, timeout: float = 5.0) -> None:
        """Look no more; waits for a look that is under way, for `timeout` seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and self._pid == os.getpid():
            thread.join(timeout)

    def _due(self) -> float:
        """Seconds until the next look."""
        now = time.monotonic()
        took = max(0.0, self._ended - self._began)
        if self._wanted:
            return max(self._began + self._every, self._ended + took) - now
        if self._idle is None or (self._rest is not None and now > self._asked + self._rest):
            return float("inf")
        return self._ended + max(self._idle, SHARE * took) - now

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (due := self._due()) > 0:
                    self._changed.wait(None if due == float("inf") else due)
                if self._closed:
                    return
                self._wanted, self._busy = False, True
                self._began = time.monotonic()
            seen = self._once()
            if self._then is not None:
                try:
                    self._then(seen)
                except Exception:
                    logger.exception("what was seen could not be kept")
            with self._changed:
                self._ended = time.monotonic()
                self._seen, self._busy = seen, False
                self._changed.notify_all()

    def _once(self) -> Seen[T]:
        last = self._seen
        try:
            return Seen(self._look(), time.time(), None, last.looks + 1)
        except Exception as error:
            logger.debug("looked in vain", exc_info=True)
            return Seen(last.what, last.at, error, last.looks + 1)
