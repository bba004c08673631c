"""Servers and the environment of a program of examples/."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_redlock.server import LocalServer, start_servers
from tests.support.example import EXAMPLES
from tests.support.nodes import make_known


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    """Nodes that are made to vote: the examples leave the restart guard on."""
    with start_servers(5) as five:
        yield five


@pytest.fixture
def environment(servers: list[LocalServer], server: LocalServer, tmp_path: Path) -> dict[str, str]:
    make_known(servers)  # each test begins with empty ones
    return {
        **os.environ,
        "REDLOCK_NODES": ",".join(node.url for node in servers),
        "CELERY_BROKER_URL": server.url,
        "LEDGER": str(tmp_path),
        "PYTHONPATH": str(EXAMPLES.parent),
    }
