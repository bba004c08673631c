"""Call a function whenever it is due, from a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from .event import SafeEvent

__all__ = ["Timer"]


class Timer:
    """A daemon thread that takes turns.

    Args:
        turn: Function that takes one turn; it returns the seconds until the next turn, or None
            after the last.

    Attributes:
        caught: Exceptions that must not end the turns, because nobody else can catch them.
    """

    caught: ClassVar[type[BaseException]] = BaseException

    def __init__(self, turn: Callable[[], float | None]) -> None:
        self._turn = turn
        self._changed = SafeEvent()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, if it does not run."""
        # Check is_alive(): an interrupted start() leaves a thread that never runs.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="celery_redlock watchdog", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                if error.__context__ is None:
                    raise
                # A time limit has struck while `threading` waited, and its RuntimeError hides that.
                raise error.__context__ from None

    def wake(self) -> None:
        """Take the next turn now."""
        self._changed.set()

    def _run(self) -> None:
        while (left := self._turn()) is not None:
            self._changed.wait(left)
