"""Call a function whenever it is due, from a separate thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from .event import SafeEvent
from .thread import Threads

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
        self._threads = Threads[None]()

    def begin(self) -> None:
        """Start the thread, if it does not run."""
        self._threads.begin(None, "celery_redlock watchdog", self._run)

    def wake(self) -> None:
        """Take the next turn now."""
        self._changed.set()

    def _run(self) -> None:
        while (left := self._turn()) is not None:
            self._changed.wait(left)
