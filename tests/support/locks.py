"""Fixtures that make locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_redlock import Redlock
from celery_redlock.locking import acquisition
from tests.support.nodes import GUARDED_TTL


@pytest.fixture
def lock_over() -> Iterator[Callable[..., Redlock]]:
    """Makes locks over servers, proxies or addresses; closes them when the test ends."""
    with ExitStack() as stack:

        def over(nodes: Iterable[Any], **options: Any) -> Redlock:
            made = Redlock([getattr(node, "url", node) for node in nodes], **options)
            stack.callback(made.close)
            return made

        yield over


@pytest.fixture
def lock(lock_over: Callable[..., Redlock]) -> Callable[..., Redlock]:
    """The same with the guard on."""
    usual = {"ttl": GUARDED_TTL, "restart_guard": "uptime"}
    return lambda nodes, **options: lock_over(nodes, **{**usual, **options})


@pytest.fixture
def never_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep waiters from trying or looking by themselves, and from counting as dead."""
    monkeypatch.setattr("celery_redlock.stores.etcd.subscription.LISTENS_S", 60)
    monkeypatch.setattr(acquisition, "LOOK_AFTER_S", (60.0, 60.0))
    monkeypatch.setattr(acquisition, "RETRY_AFTER_S", (60.0, 60.0))
