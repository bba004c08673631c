"""Watch for pauses in a worker's main process, so that no task has to: see `locking/pauses.py`.

One thread asks the nodes every second for all pauses in one request, and more often while there
are any. It records the result where the pool's children read it, and passes it to the parking of
deliveries. There is no subscription: it would cost every worker a connection and a thread for each
node, and the request would still be needed, because notifications get lost.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from ..locking.pauses import Pause, in_force
from ..locking.redlock import Redlock
from ..protocol.texts import event, printable

__all__ = ["PauseWatch"]

logger = logging.getLogger("celery_redlock.worker")

LOOK_S = (0.8, 1.2)
"""Seconds, at random, between two looks: a pause reaches every worker within two seconds."""
PAUSED_LOOK_S = (0.2, 0.3)
"""The same while there are pauses: waiting tasks go on within a second after the end of one."""

JITTER = random.SystemRandom()


class PauseWatch:
    """The thread that watches for pauses; there is one per worker.

    Args:
        redlock: The lock whose nodes are asked.
        report: Called after a look that has found a pause, or that the last pause has ended.
    """

    def __init__(self, redlock: Redlock, report: Callable[[tuple[Pause, ...]], None]) -> None:
        self._redlock = redlock
        self._report = report
        self._known: tuple[Pause, ...] = ()
        self._over = threading.Event()

    def stop(self, **_signal: object) -> None:
        """Stop it together with its worker, which may not be the end of the process, in a test."""
        self._over.set()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="celery_redlock pauses", daemon=True).start()

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            try:
                self._look()
            except Exception:
                logger.exception(
                    "the pauses could not be read; trying again in a second",
                    extra=event("pauses_unread"),
                )
            pause = JITTER.uniform(*(PAUSED_LOOK_S if self._known else LOOK_S))

    def _log_limits(self, before: tuple[Pause, ...], now: tuple[Pause, ...]) -> None:
        """Log limits that have begun or ended; pauses are logged by the tasks that wait."""
        known = {one.token for one in before}
        for limit in now:
            if limit.limit and limit.token not in known:
                logger.warning(
                    "%s; further tasks that declare a limit wait",
                    limit,
                    extra=event("key_limited"),
                )
        there = {one.pattern for one in now if one.limit}
        for limit in before:
            if limit.limit and limit.pattern not in there:
                logger.info(
                    "the operator's limit for %s has ended; declared limits apply",
                    printable(limit.pattern),
                    extra=event("key_unlimited"),
                )

    def _look(self) -> None:
        before, (found, sure) = self._known, in_force(self._redlock)
        if not sure:  # without a quorum, a known pause counts until its planned end
            there = {pause.token for pause in found}
            found += tuple(p for p in before if p.token not in there and p.ends_in > 0)
        self._known = found
        self._log_limits(before, found)
        if (table := self._redlock.client.registry.table) is not None:
            table.paused = bool(found)
        if found or before:
            self._report(found)
