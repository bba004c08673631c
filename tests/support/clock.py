"""A clock without time."""

from __future__ import annotations


class FakeClock:
    """A clock that moves when the test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Let time pass; the new time in seconds."""
        self.now += seconds
        return self.now
