"""Distribution of the test files over pytest-xdist's processes, where it has several.

A lane is a process of pytest. Most tests wait for most of their time: for a body to end, a ttl to
be over, a worker to start. So there are more lanes than cores. Tests that compute are in
one lane, one after the other, and first: two of these on two cores would delay all others.
The unit tests are in small pieces, and last: they fill up what the others leave.
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
    "tests/faults/test_campaign",  # a dozen processes, for half a minute
    "tests/beat/test_campaign",
    "tests/publishing/test_campaign",
    "tests/contract/test_limits",
    "tests/sim/",
    "tests/spin/",
    "benchmarks/",
    "tests/packaging/",
)
"""Beginnings of the names of files that run one after the other, in this order."""

RABBITMQ = (
    "tests/canvas/",
    "tests/worker/test_brokers.py",
    "tests/worker/test_purge.py",
    "tests/worker/test_sent_again.py",
    "tests/examples/test_recipes_rabbitmq.py",
)
"""The same, for the files that share one: it takes seconds to start, and two cores are its own."""

BROWSER = ("tests/web/test_browser.py", "tests/web/test_docs_pages.py")
"""The same, for the files that share a Chromium."""

LONGEST = (
    "tests/beat/test_ticks.py", "tests/worker/test_shutdown.py", "tests/worker/test_start.py",
    "tests/examples/", "tests/worker/test_parking.py", "tests/worker/test_holding.py",
    "tests/worker/test_sidecar.py", "tests/worker/test_hostile.py", "tests/worker/test_green.py",
    "tests/worker/test_endings.py", "tests/beat/", "tests/worker/", "tests/peers/", "tests/web/",
    "tests/contract/",
)  # fmt: skip
"""Files that take long and so must not begin last. In this order, and all others behind."""

FILLING = ("tests/publishing/test_oracle", "tests/unit/")
"""Begun last."""

SPLIT = ("tests/worker/test_shutdown.py",)
"""Files whose tests of one pool are a lane's, and those of another perhaps another's."""

MORE = (
    "tests/faults/test_campaign.py::test_short_campaign_over_one_authority",
    "tests/faults/test_zookeeper.py",
    "tests/beat/test_campaign.py::test_each_tick_is_sent_once_over", "tests/beat/test_ticks.py",
    "tests/canvas/",
    "tests/contract/test_postgresql", "tests/contract/test_etcd", "tests/contract/test_zookeeper",
    "tests/contract/test_limits",
    "tests/contract/test_local_postgresql", "tests/contract/test_hostile_tls.py",
    "tests/contract/test_rolling_restart.py",
    "tests/contract/test_grafana.py", "tests/contract/test_survey.py",
    "tests/contract/test_sentinel",
    "tests/contract/test_sidecar.py", "tests/worker/test_sidecar.py",
    "tests/unit/test_docs.py::test_code_in_docs_runs_as_far_as_it_goes_without_servers",
    "tests/unit/test_etcd_fuzz.py", "tests/unit/test_etcd_hostile.py",
    "tests/unit/test_beat_ticks_clocks.py", "tests/worker/test_green.py",
    "tests/cli/", "tests/web/", "tests/examples/", "tests/setups/",
    "tests/worker/test_brokers.py", "tests/worker/test_inspect.py", "tests/worker/test_loading.py",
    "tests/worker/test_operator_postgresql.py", "tests/worker/test_spawn.py",
    "tests/worker/test_parking_bounds.py::test_1200",
    "tests/worker/test_start.py", "tests/worker/test_zookeeper.py",
    "tests/compat/", "tests/peers/", "tests/packaging/", "tests/spin/", "benchmarks/",
)  # fmt: skip
"""Beginnings of the names with the mark `more`: `make test` leaves them to `make test-more`.

What locks promise is tested by both: here over Redis, with processes and threads. There follow the
other stores and brokers, gevent, canvases, Sentinels, a keeper in a process of its own, the
commands and what else operators see, the code in docs/ and examples/, other libraries.
"""
ELSEWHERE = ("[rabbitmq", "[classic", "[postgresql", "[etcd", "[gevent")
"""Parts of the names of further tests with that mark."""

WORKERS = (
    "tests/worker/", "tests/compat/", "tests/peers/", "tests/setups/", "tests/beat/test_campaign",
    "tests/beat/test_running", "tests/beat/test_ticks", "tests/examples/test_beat_example",
    "tests/examples/test_demo.py", "tests/examples/test_examples", "tests/examples/test_recipes",
    "tests/examples/test_postgresql_examples", "tests/examples/test_start_page",
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
