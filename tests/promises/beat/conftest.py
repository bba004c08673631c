"""Servers with a password, so that every log of every beat can be searched for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.server import LocalServer, start_servers
from tests.promises.beat.beat_world import any_flow, any_kind  # noqa: F401
from tests.support.beats import Site
from tests.support.nodes import TOKEN

PASSWORD = "canary-7f3a"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    """Five lock nodes."""
    with start_servers(5, password=PASSWORD) as five:
        yield five


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """The broker."""
    with LocalServer(password=PASSWORD) as one:
        yield one


@pytest.fixture
def site(
    servers: list[LocalServer], server: LocalServer, tmp_path: Path
) -> Iterator[Callable[..., Site]]:
    """Makes sites; at the end all beats are dead, and none has ever printed a secret."""
    made: list[Site] = []

    def make(kind: str = "persistent", **options: Any) -> Site:
        made.append(Site(kind, servers, server, tmp_path / kind, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert PASSWORD not in one.text()
        assert not TOKEN.search(one.text())
