"""Distribution of the test files over pytest-xdist's processes, where it has several.

A lane is a process of pytest. Most tests wait for most of their time: for a body to end, a ttl to
be over, a worker to start. So there are more lanes than cores. Tests that compute are in
one lane, one after the other, and first: two of these on two cores would delay all others.
The tests without a server are in small pieces, and last: they fill up what the others leave.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMPUTING = (
    "tests/campaign/worker/test_campaign",  # a dozen processes, for half a minute
    "tests/campaign/beat/test_campaign",
    "tests/campaign/publishing/test_campaign",
    "tests/nodes/test_limits",
    "tests/protocol/sim/",
    "tests/protocol/spin/",
    "benchmarks/",
    "tests/tools/packaging/",
)
"""Beginnings of the names of files that run one after the other, in this order."""

RABBITMQ = (
    "tests/promises/canvas/",
    "tests/promises/worker/test_brokers.py",
    "tests/promises/worker/test_purge.py",
    "tests/promises/worker/test_sent_again.py",
    "tests/tools/examples/test_recipes_rabbitmq.py",
)
"""The same, for the files that share one: it takes seconds to start, and two cores are its own."""

BROWSER = ("tests/tools/web/test_browser.py", "tests/tools/web/test_docs_pages.py")
"""The same, for the files that share a Chromium."""

LONGEST = (
    "tests/promises/beat/test_ticks.py", "tests/promises/worker/test_shutdown.py",
    "tests/promises/worker/test_start.py", "tests/tools/examples/",
    "tests/promises/worker/test_parking.py", "tests/promises/worker/test_holding.py",
    "tests/promises/worker/test_sidecar.py", "tests/promises/worker/test_hostile.py",
    "tests/promises/worker/test_green.py", "tests/promises/worker/test_endings.py",
    "tests/promises/beat/", "tests/promises/worker/", "tests/promises/peers/", "tests/tools/web/",
    "tests/promises/lock/", "tests/nodes/",
)  # fmt: skip
"""Files that take long and so must not begin last. In this order, and all others behind."""

FILLING = ("tests/campaign/publishing/test_oracle", "tests/protocol/test_", "tests/promises/tasks/")
"""Begun last."""

SPLIT = ("tests/promises/worker/test_shutdown.py",)
"""Files whose tests of one pool are a lane's, and those of another perhaps another's."""

MORE = (
    "tests/campaign/worker/test_campaign.py::test_short_campaign_over_one_authority",
    "tests/campaign/worker/test_zookeeper.py",
    "tests/campaign/beat/test_campaign.py::test_each_tick_is_sent_once_over",
    "tests/promises/beat/test_ticks.py", "tests/promises/canvas/", "tests/nodes/test_postgresql",
    "tests/nodes/test_etcd.py", "tests/nodes/test_zookeeper", "tests/nodes/test_limits",
    "tests/nodes/test_hostile_tls.py",
    "tests/nodes/test_rolling_restart.py", "tests/tools/test_grafana.py",
    "tests/nodes/test_survey.py", "tests/nodes/test_sentinel",
    "tests/promises/lock/test_sidecar.py", "tests/promises/worker/test_sidecar.py",
    "tests/tools/test_docs.py::test_code_in_docs_runs_as_far_as_it_goes_without_servers",
    "tests/nodes/test_etcd_fuzz.py", "tests/nodes/test_etcd_hostile.py",
    "tests/promises/beat/test_beat_ticks_clocks.py", "tests/promises/worker/test_green.py",
    "tests/tools/cli/", "tests/tools/web/", "tests/tools/examples/", "tests/promises/setups/",
    "tests/promises/worker/test_brokers.py", "tests/promises/worker/test_inspect.py",
    "tests/promises/worker/test_loading.py", "tests/promises/worker/test_operator_postgresql.py",
    "tests/promises/worker/test_spawn.py",
    "tests/promises/worker/test_parking_bounds.py::test_1200",
    "tests/promises/worker/test_start.py", "tests/promises/worker/test_zookeeper.py",
    "tests/promises/compat/", "tests/promises/peers/", "tests/tools/packaging/",
    "tests/protocol/spin/", "benchmarks/",
)  # fmt: skip
"""Beginnings of the names with the mark `more`: `make test` leaves them to `make test-more`.

What locks promise is tested by both: here over Redis, with processes and threads. There follow the
other stores and brokers, gevent, canvases, Sentinels, a keeper in a process of its own, the
commands and what else operators see, the code in docs/ and examples/, other libraries.
"""
ELSEWHERE = ("[rabbitmq", "[classic", "[postgresql", "[etcd", "[gevent")
"""Parts of the names of further tests with that mark."""

WORKERS = (
    "tests/promises/worker/", "tests/promises/compat/", "tests/promises/peers/",
    "tests/promises/setups/", "tests/campaign/beat/test_campaign",
    "tests/promises/beat/test_ticks",
    "tests/tools/examples/test_beat_example", "tests/tools/examples/test_demo.py",
    "tests/tools/examples/test_examples", "tests/tools/examples/test_recipes",
    "tests/tools/examples/test_postgresql_examples", "tests/tools/examples/test_start_page",
)  # fmt: skip
"""Beginnings of the names of files that have the mark `worker` as a whole."""

FIRST = "gw0"
"""The lane that is the first to read all tests."""


def lane_of(nodeid: str) -> str:
    """Tests of one lane are one after the other: those of a file share its servers."""
    if nodeid.startswith(COMPUTING):
        return "computing"
    if nodeid.startswith(RABBITMQ):
        return "rabbitmq"
    if nodeid.startswith(BROWSER):
        return "browser"
    pool = re.search(r"\[(\w+)", nodeid) if nodeid.startswith(SPLIT) else None
    return nodeid.split("::")[0] + (f" {pool[1]}" if pool else "")


def is_more(nodeid: str) -> bool:
    """Return True if `make test` leaves it to `make test-more`."""
    return nodeid.startswith(MORE) or any(part in nodeid for part in ELSEWHERE)


def place(nodeid: str) -> int:
    """Tests are begun in the order of their places."""
    order = (*COMPUTING, *RABBITMQ, *LONGEST)
    filling = nodeid.startswith(FILLING)
    return next(
        (at for at, name in enumerate(order) if nodeid.startswith(name)), len(order) + filling
    )


@contextlib.contextmanager
def in_turn(lane: str) -> Iterator[None]:
    """Around a lane's reading of all tests: the first compiles them, the others use what it wrote.

    Each would else spend ten seconds on the same work; not with PYTHONDONTWRITEBYTECODE.
    """
    read = Path(tempfile.gettempdir()) / "tests-were-read"
    if lane == FIRST:
        try:
            yield
        finally:
            read.touch()
        return
    deadline = time.monotonic() + 120.0  # and should it have died, then without it
    while not read.exists() and time.monotonic() < deadline and os.getppid() != 1:
        time.sleep(0.05)
    yield


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the files as above."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane_of(nodeid)

    config.option.loadscopereorder = False  # by how many tests they have: a campaign is one
    return Lanes(config, log)
