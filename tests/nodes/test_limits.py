"""A thousand conflicts and more leave nothing behind: no memory, thread, descriptor or connection.

The long campaign: `python -m tests.nodes.limits --seconds 60`, or LIMITS_SECONDS=60 here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.limits import MANY, THREADS, WARM

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("LIMITS_SECONDS", 3))


@pytest.fixture(scope="module")
def campaign() -> Any:
    """Run the campaign in a process of its own, to measure nothing that pytest keeps."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.nodes.limits", "--json", "--seconds", str(SECONDS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS + 180,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_campaign_of_conflicts_has_many_conflicts_and_no_error(campaign: Any) -> None:
    assert campaign["errors"] == []
    assert campaign["warm"]["conflicts"] >= MANY * WARM
    assert campaign["end"]["conflicts"] >= MANY


def test_memory_does_not_grow_with_conflicts(campaign: Any) -> None:
    warm, end = campaign["warm"], campaign["end"]
    more = end["conflicts"] - warm["conflicts"]
    # The least that could be left of a conflict, an entry in a dict, is more than 100 bytes. It is
    # 0.6 in 25 s; on a slow machine, with few conflicts, what is made once and late weighs more.
    assert end["memory"] - warm["memory"] < 100 * more, (warm, end)
    assert end["resident"] - warm["resident"] < 10 * 2**20


def test_threads_do_not_grow_with_conflicts_or_callers(campaign: Any) -> None:
    # A little time has passed since each node was connected to. One of ours may look for nodes that
    # were lost just as a waiter left their queues.
    for then in ("warm", "end"):
        more = campaign[then]["threads"] - campaign["before"]["threads"]
        assert THREADS <= more <= THREADS + 1, then


def test_a_process_has_two_connections_to_a_node_however_many_threads(campaign: Any) -> None:
    """The holder has one more: it does not listen."""
    assert campaign["before"]["connections"] == [1] * 5
    assert campaign["warm"]["connections"] == campaign["end"]["connections"] == [3] * 5


def test_closed_redlock_leaves_no_thread_descriptor_or_connection(campaign: Any) -> None:
    before, closed = campaign["before"], campaign["closed"]
    for what in ("threads", "descriptors", "connections"):
        assert closed[what] == before[what], what
