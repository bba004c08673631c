"""Time until a Redis broker gives a dead worker's messages to others, as the runbook promises."""

from __future__ import annotations

import os
import signal
import time

import pytest
from kombu.transport.redis import Channel

from tests.support.cluster import Cluster

pytestmark = pytest.mark.skipif(
    not hasattr(Channel, "unacked_restore_interval"),
    reason="this kombu looks every 100 s, whatever it is told",
)


def test_kombu_looks_for_overdue_messages_every_100_s() -> None:
    assert Channel.unacked_restore_interval * Channel.unacked_restore_throttle == 100


@pytest.mark.slow
def test_two_transport_options_make_kombu_look_every_second(cluster: Cluster, key: str) -> None:
    options = {
        "visibility_timeout": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    conf = {"broker_transport_options": options, "redlock_ttl": 1.0}
    with cluster.worker("-c", "1", **conf) as one:
        cluster.send("late", key, 60.0)
        cluster.entered(key)
        with cluster.worker("-c", "1", **conf) as other:
            # It looks once when it connects; only then does the message become overdue.
            time.sleep(0.5)
            os.kill(one.process.pid, signal.SIGKILL)
            killed = time.monotonic()
            cluster.entered(key, 2)
            assert time.monotonic() - killed < 10.0
            assert other.process.poll() is None
