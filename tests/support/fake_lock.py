"""A `Redlock` over fake nodes: the real algorithm and the real holder, no socket and no thread.

Time stands still until a test moves it; extensions are made when a test asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from celery_redlock import Redlock
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round, Steps, Verb
from celery_redlock.stores.driver import Driver
from celery_redlock.testing.fakes import FakeNode
from tests.support.clock import FakeClock

T = TypeVar("T")


class FakeDriver:
    """Carries rounds to fake nodes at once. A dead node is silent."""

    def __init__(self, nodes: Sequence[FakeNode], clock: FakeClock) -> None:
        self.nodes = nodes
        self.clock = clock
        self.dead: set[int] = set()
        self.rounds: list[str] = []

    def run(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        try:
            if ahead is not None:
                self._carry(ahead(self.clock()))
            steps = operation(self.clock())
            round_ = next(steps)
            while True:
                self._carry(round_)
                round_ = steps.send(self.clock())
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def ask(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        return self.run(operation, ahead)

    def run_all(self, operations: Sequence[Callable[[float], Steps[T]]]) -> list[T]:
        return [self.run(operation) for operation in operations]

    extend: Any = Driver.extend

    def read(self) -> bool:
        return True

    def is_leaving(self) -> bool:
        return False

    def connect(self, timeout: float = 0.0) -> None:
        pass

    def _carry(self, round_: Round) -> None:
        round_.begin()
        self.rounds.append(round_.verb.word)
        for index in round_.targets:
            if index in self.dead:
                round_.silence(index, "dead")
            else:
                for claim in round_.claims if round_.verb in (Verb.ACQUIRE, Verb.EXTEND) else ():
                    claim.written |= 1 << index
                reply = self.nodes[index].execute(round_.verb, round_.claims, self.clock())
                round_.answer(index, reply, self.clock())
        round_.close("no answer")


class FakeWatchdog:
    """Knows what it should keep alive; `tend()` is its thread's next turn."""

    def __init__(self, redlock: Redlock, clock: FakeClock) -> None:
        self._redlock = redlock
        self._clock = clock
        self.watched: dict[str, tuple[Claim, Callable[[Claim], None], float | None]] = {}
        self.next_due = float("inf")

    def retry_soon(self, _after: float = 0.0) -> None:
        self._redlock.client._read()

    def watch(
        self,
        claim: Claim,
        lost: Callable[[Claim], None],
        max_lifetime: float | None = None,
        _block: object = None,
    ) -> None:
        self.watched[claim.token] = claim, lost, max_lifetime

    def drop(self, claim: Claim) -> None:
        self.watched.pop(claim.token, None)

    def tend(self) -> None:
        for claim, lost, _max_lifetime in list(self.watched.values()):
            if claim.held(self._clock()):
                self._redlock.client._extend([claim], lambda _renewed: None)
            if not claim.held(self._clock()):
                self.drop(claim)
                lost(claim)


class FakeRedlock(Redlock):
    """Five fake nodes.

    Args:
        patch: Puts the fake clock where the library looks at its own.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, ttl: float = 10.0) -> None:
        super().__init__(
            [f"redis://127.0.0.1:{port}/0" for port in range(1, 6)], ttl=ttl, node_timeout=1.0
        )
        self.clock = FakeClock()
        self.fakes = [FakeNode() for _ in range(5)]
        fake: Any = FakeDriver(self.fakes, self.clock)
        self.client.driver = self.driver = fake
        watchdog: Any = FakeWatchdog(self, self.clock)
        self.client.watchdog = self.watchdog = watchdog
        for module in (
            "locking.held",
            "locking.leases",
            "locking.client",
            "locking.prolonging",
            "locking.acquisition",
            "locking.done_mark",
            "messages.reservation",
        ):
            patch.setattr(f"celery_redlock.{module}.monotonic", self.clock)

    def check(self, ttl: float | None = None, timeout: float = 1.5) -> list[str]:
        return []

    def tokens(self, resource: str) -> set[str | None]:
        """Return the tokens of a resource on the nodes."""
        return {node.token(resource, self.clock()) for node in self.fakes}

    def free(self, resource: str, stamp: str = "") -> bool:
        """Return True if no node has a token of the resource."""
        return self.tokens(resource) == {None}
