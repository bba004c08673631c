"""Claims without nodes, and running an operation of the pure protocol to its end."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round

T = TypeVar("T")


NOW, PATIENCE, TTL = 1000.0, 0.1, 10.0


def claim(nodes: int = 5, token: str = "mine", *, granted: bool = False) -> Claim:
    new = Claim("r", token, TTL, nodes)
    if granted:
        for node in range(nodes):
            new.acknowledged(node, NOW, NOW)
        assert new.grant(NOW)
    return new


def ended(steps: Generator[Round, float, T], now: float = NOW + 0.01) -> T:
    """Resume an operation that must be over."""
    try:
        steps.send(now)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("it asks for another round")
