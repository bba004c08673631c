"""Refreshing in the background: requests return soon, and readers share the looks at nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock.web.refresher import Refresher
from tests.support.wait import wait_until


class Sight:
    """Something to look at, which may hang or fail."""

    def __init__(self) -> None:
        self.count = 0
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def __call__(self) -> int:
        self.count += 1
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return self.count


@pytest.fixture
def sight() -> Iterator[Sight]:
    made = Sight()
    yield made
    made.open.set()


def test_refresher_looks_when_first_asked_and_once_for_many(sight: Sight) -> None:
    sight.open.clear()
    looking = Refresher(sight, every=60)
    assert sight.count == 0
    seen: list[Any] = []
    asking = [threading.Thread(target=lambda: seen.append(looking.get(30))) for _ in range(20)]
    for thread in asking:
        thread.start()
    wait_until(lambda: sight.count == 1, 30, "one looks")
    sight.open.set()
    for thread in asking:
        thread.join()
    assert [one.what for one in seen] == [1] * 20 and sight.count == 1
    assert looking.get(30).what == 1 and sight.count == 1, "it is fresh enough"
    looking.close()


def test_refresher_returns_the_last_look_when_its_patience_is_over(sight: Sight) -> None:
    looking = Refresher(sight, every=0)
    assert looking.get(30).what == 1
    sight.open.clear()
    seen = looking.get(0.01)
    assert seen.what == 1 and seen.error is None
    sight.open.set()
    looking.close()


def test_failed_look_keeps_the_last_one_with_its_error(sight: Sight) -> None:
    looking = Refresher(sight, every=0)
    at = looking.get(30).at
    sight.error = OSError("gone")
    seen = looking.get(30)
    assert seen.what == 1 and seen.at == at and seen.error is sight.error
    sight.error = None
    assert looking.get(30).error is None
    looking.close()


def test_refresher_looks_while_nobody_asks_and_rests_after_a_while(sight: Sight) -> None:
    looking = Refresher(sight, idle=0.001, rest=0.2)
    looking.get(30)
    wait_until(lambda: sight.count > 3, 30, "it looks by itself")
    wait_until(lambda: looking._due() == float("inf"), 30, "it rests")
    looking.close()
