"""A generator of rounds while it runs, and what may strike it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_redlock.protocol.round import Round, Steps

if TYPE_CHECKING:
    from tests.protocol.sim.world.process import Process


class Struck(BaseException):
    """Stands for a time limit in the code it interrupts."""


class Operation:
    """A generator of rounds that is being run. Mirrors `Driver.run`.

    Attributes:
        strike: An exception strikes at the so-manieth point from here on at which one can: before
            a round is asked of a node, between queueing and writing the request, and where the
            generator is resumed. 0: none does.
    """

    __slots__ = ("done", "over", "process", "round", "steps", "strike", "struck")

    round: Round

    def __init__(
        self,
        process: Process,
        steps: Steps[Any],
        done: Callable[[Any], None],
        struck: Callable[[], None] | None = None,
        strike: int = 0,
    ) -> None:
        self.process = process
        self.steps = steps
        self.done = done
        self.struck = struck
        self.strike = strike
        self.over = False

    def start(self, _argument: Any = None) -> None:
        """Write its first round."""
        if not hasattr(self, "round"):
            self._advance(lambda: next(self.steps))
        else:
            self._carry()

    def finish(self) -> None:
        """Go on after a round that is decided or overdue."""
        process, round_ = self.process, self.round
        round_.close("no answer")
        now = process.clock()
        process.world.audit.closed(process, round_, now)
        if not self.over:
            self._advance(lambda: self._resume(now))

    def point(self) -> None:
        """Raise if an exception is to interrupt the operation here."""
        if self.strike:
            self.strike -= 1
            if not self.strike:
                raise Struck

    def interrupt(self, _argument: Any = None) -> None:
        """An exception strikes in the middle of it."""
        if self.over:
            return
        self.over = True
        self.process.waiting.pop(self.round, None)
        self.steps.close()
        self.process.world.note(f"struck in {self.round.verb.word}")
        if self.struck is not None:
            self.struck()

    def _resume(self, now: float) -> Round:
        try:
            self.point()
        except Struck as strike:
            return self.steps.throw(strike)
        return self.steps.send(now)

    def _advance(self, step: Callable[[], Round]) -> None:
        try:
            self.round = step()
        except StopIteration as stop:
            self.over = True
            self.done(stop.value)
        except Struck:
            self.interrupt()
        else:
            self._carry()

    def _carry(self) -> None:
        try:
            self.process.carry(self)
        except Struck:
            self.interrupt()
