"""Frees what dead pool children held, within moments of their death and never before it.

Celery's main process hears of a child's death 0.1 to 5 seconds late, and of some deaths by no
signal at all; of a hard time limit and a terminating revocation it hears while the child is still
alive. So neither is believed: a thread of the main process watches the pids themselves. When a
child is gone, and with it the body, its delivery's lock is freed by the stamp that the main
process gave it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable

__all__ = ["Reaper"]

logger = logging.getLogger("celery_redlock.reaper")

PERIOD = 0.1
"""Seconds between looks at the children, where the system cannot tell of a death by itself."""


class Reaper:
    """Calls what was asked for when a child dies. One thread, started by the first child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_words: dict[int, tuple[str, Callable[[], object]]] = {}
        self._pids: dict[str, int] = {}
        self._pidfds: dict[int, int] = {}
        self._epoll = select.epoll() if hasattr(os, "pidfd_open") else None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def watch(self, pid: int, name: str, then: Callable[[], object]) -> None:
        """Call `then` in the reaper's thread once `pid`, a child of ours, is dead.

        It replaces what was to be called for that pid before: a child runs one task at a time.

        Args:
            pid: The child.
            name: What it does, for `forget`.
            then: What to do when it is dead.
        """
        if self._pid != os.getpid():
            raise RuntimeError("a reaper belongs to the process that made it")
        with self._lock:
            known = pid in self._pidfds.values()
            self._last_words[pid] = (name, then)
            self._pids[name] = pid
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="celery_redlock reaper", daemon=True
                )
                self._thread.start()
            if known or self._epoll is None:
                return
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                pidfd = None
            if pidfd is not None:
                self._pidfds[pidfd] = pid
                self._epoll.register(pidfd, select.EPOLLIN)
        if pidfd is None:
            self._died(pid)  # before we could look: gone, and reaped by its pool

    def forget(self, name: str) -> None:
        """What the child did is done: its death is nothing to us any more."""
        with self._lock:
            pid = self._pids.pop(name, 0)
            if pid in self._last_words and self._last_words[pid][0] == name:
                del self._last_words[pid]

    def _run(self) -> None:
        while True:
            for pid in self._dead():
                self._died(pid)

    def _dead(self) -> list[int]:
        if self._epoll is None:
            threading.Event().wait(PERIOD)
            with self._lock:
                return [pid for pid in self._last_words if _is_dead(pid)]
        pids = []
        for pidfd, _event in self._epoll.poll():
            with self._lock:
                pids.append(self._pidfds.pop(pidfd))
            self._epoll.unregister(pidfd)
            os.close(pidfd)
        return pids

    def _died(self, pid: int) -> None:
        with self._lock:
            name, then = self._last_words.pop(pid, ("", None))
            self._pids.pop(name, None)
        if then is not None:
            try:
                then()
            except BaseException:
                # The next child's lock must be freed all the same; this one's ttl will do it.
                logger.exception("could not free what child %d held", pid)


def _is_dead(pid: int) -> bool:
    """Whether a child has ended; does not reap it, that is its pool's business."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True
