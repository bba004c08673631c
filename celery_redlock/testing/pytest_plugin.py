"""The pytest plugin: fixtures for a project's own tests. See docs/testing.md.

pytest loads it in every project where this package is installed. So it imports nothing until a
fixture is used, has no hook, and starts nothing that no test uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..server import LocalServer
    from .nodes import FakeNodes, LocalNodes

__all__ = ["fake_redlock", "redlock_disabled", "redlock_node_count", "redlock_nodes"]


@pytest.fixture
def redlock_node_count() -> int:
    """Number of nodes of `fake_redlock` and `redlock_nodes`. Override it for another number."""
    return 3


@pytest.fixture
def fake_redlock(redlock_node_count: int) -> Iterator[FakeNodes]:
    """Keep all locks of this process in memory; no server is needed."""
    from .nodes import fake_redlock

    with fake_redlock(redlock_node_count) as fake:
        yield fake


@pytest.fixture(scope="session")
def _redlock_servers() -> Iterator[Callable[[int], list[LocalServer]]]:
    """Servers for all tests of this session, started on first use."""
    from ..protocol.errors import ConfigurationError
    from ..server import LocalServer, find_server

    try:
        find_server()
    except ConfigurationError as error:
        pytest.skip(f"redlock_nodes: {error}")
    servers: list[LocalServer] = []

    def some(count: int) -> list[LocalServer]:
        while len(servers) < count:
            servers.append(LocalServer())
        return [server.start() for server in servers[:count]]

    yield some
    for server in servers:
        server.stop()


@pytest.fixture
def redlock_nodes(
    redlock_node_count: int, _redlock_servers: Callable[[int], list[LocalServer]]
) -> Iterator[LocalNodes]:
    """Redirect all locks of this process to real servers of this machine, empty at first."""
    from .nodes import redlock_nodes

    with redlock_nodes(servers=_redlock_servers(redlock_node_count)) as nodes:
        yield nodes


@pytest.fixture
def redlock_disabled() -> Iterator[None]:
    """Let no task of this process take a lock. For a whole class: `pytest.mark.usefixtures`."""
    from .redirect import redlock_disabled

    with redlock_disabled():
        yield
