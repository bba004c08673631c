"""After an ending that Python survives, the lock is free before the process begins another task."""

from __future__ import annotations

import pytest

from tests.promises.worker.scenarios import POOLS
from tests.support.cluster import Cluster
from tests.support.worker import often as param

SURVIVED = [
    ("work", ("return",), {}), ("work", ("raise",), {}), ("work", ("retry",), {}),
    ("work", ("retry at once",), {}), ("work", ("ignore",), {}), ("late", ("reject",), {}),
    ("late", ("requeue",), {}), ("work", (), {"soft_time_limit": 0.1}),
]  # fmt: skip
"""Endings after which the process goes on: task, arguments, options of the message."""


@pytest.mark.parametrize("pool", [param(name) for name in POOLS])
def test_lock_is_free_before_the_next_task_of_the_process(
    cluster: Cluster, key: str, pool: str
) -> None:
    survived = SURVIVED if pool == "prefork" else SURVIVED[:-1]  # the others know no limits
    retried = []
    with cluster.worker("-P", pool, "-c", "1"):
        for number, (task, then, options) in enumerate(survived):
            sent = cluster.send(task, f"{key}{number}", 0.2, *then, **options)
            left = cluster.result(cluster.send("left", f"{key}{number}"))
            run = cluster.runs(f"{key}{number}", sent)[0]
            assert left["pid"] == run.pid and left["at"] > run.end
            assert left["held"] < 3, f"{task} {then}"
            retried += [sent] if then and then[0].startswith("retry") else []
        for sent in retried:  # or a message may be sent when all seems settled
            assert cluster.state(sent, 20.0) == "SUCCESS"
        cluster.settled()
