"""Nodes under one contract, and locks with the restart guard on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_redlock import Redlock
from tests.support.nodes import GUARDED_TTL
from tests.support.subjects import (
    Fake,
    Real,
    Subject,
    _real,
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Real]:
    yield from _real(None)


@pytest.fixture(scope="module")
def debian() -> Iterator[Real]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on PATH: this row needs Debian's Redis 7.0")
    yield from _real(binary)


@pytest.fixture(params=["fake", "valkey", "debian"])
def node(request: pytest.FixtureRequest) -> Subject:
    """A node that is empty."""
    if request.param == "fake":
        return Fake()
    subject: Real = request.getfixturevalue(request.param)
    subject.flush()
    return subject


@pytest.fixture
def lock() -> Iterator[Callable[..., Redlock]]:
    """Makes locks with the guard on, and closes them."""
    made: list[Redlock] = []

    def make(nodes: list[Any], **options: Any) -> Redlock:
        urls = [node if isinstance(node, str) else node.url for node in nodes]
        made.append(Redlock(urls, **{"ttl": GUARDED_TTL, "restart_guard": "uptime", **options}))
        return made[-1]

    yield make
    for redlock in made:
        redlock.close()
