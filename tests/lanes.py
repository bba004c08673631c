"""Which files of tests run side by side with which, where pytest-xdist has several processes.

A lane is a process of pytest. Most tests wait for most of their time: for a body to end, a ttl to
be over, a worker to start. So there are more lanes than cores. But two files that compute, on two
cores, would keep the others from being on time; therefore all of those are one lane's, and first.
"""

from __future__ import annotations

from typing import Any

import pytest

COMPUTING = (
    "tests/faults/test_campaign",  # a dozen processes, for a minute
    "tests/beat/test_campaign",
    "tests/contract/test_limits",
    "tests/sim/",
    "tests/spin/",
    "tests/unit/",
    "benchmarks/",
    "tests/packaging/",
)
"""How the names begin of the files that are one after the other, in this order."""

RABBITMQ = ("tests/canvas/", "tests/worker/test_brokers.py")
"""The same, for the files that share one: it takes seconds to start, and two cores are its own."""

LONGEST = (
    "tests/worker/test_shutdown.py",
    "tests/worker/test_endings.py",
    "tests/beat/test_ticks.py",
    "tests/examples/",
    "tests/worker/test_threads.py",
    "tests/worker/test_holding.py",
    "tests/worker/test_green.py",
    "tests/worker/test_helper.py",
    "tests/peers/",
    "tests/worker/",
    "tests/beat/",
    "tests/contract/",
)
"""What takes long is not to be begun last. In this order, and all else behind."""


def lane_of(nodeid: str) -> str:
    """Tests of one lane are one after the other: those of a file share its servers."""
    if nodeid.startswith(COMPUTING):
        return "computing"
    return "rabbitmq" if nodeid.startswith(RABBITMQ) else nodeid.split("::")[0]


def place(nodeid: str) -> int:
    """Tests are begun in the order of their places."""
    order = (*COMPUTING, *RABBITMQ, *LONGEST)
    return next((at for at, name in enumerate(order) if nodeid.startswith(name)), len(order))


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out the files as above."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane_of(nodeid)

    config.option.loadscopereorder = False  # by how many tests they have: a campaign is one
    return Lanes(config, log)
