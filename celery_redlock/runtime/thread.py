"""Start threads that an exception may interrupt while they are started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Threads"]

K = TypeVar("K", bound=Hashable)


class Threads(dict[K, threading.Thread]):
    """Daemon threads, at most one for each key."""

    def begin(self, key: K, name: str, target: Callable[..., object], *args: Any) -> None:
        """Start a thread for a key, unless one runs for it."""
        running = self.get(key)
        # Check is_alive(): an interrupted start() leaves a thread that never runs.
        if running is not None and running.is_alive():
            return
        thread = self[key] = threading.Thread(target=target, args=args, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if error.__context__ is None:
                raise
            # A time limit has struck while `threading` waited, and its RuntimeError hides that.
            raise error.__context__ from None
