"""A worker has loaded all that its tasks need before the first of them comes."""

from __future__ import annotations

import json
import os

import pytest

from tests.support import forked
from tests.support.cluster import ROOT, Cluster
from tests.support.wait import wait_until

APP = "tests.promises.worker.importing"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("parking", [False, True])
def test_first_task_of_a_worker_loads_no_more_modules(
    cluster: Cluster, key: str, pool: str, parking: bool
) -> None:
    """Otherwise each child of a pool would load them while its first task waits."""
    conf = {**cluster.conf, "redlock_parking": parking, "task_default_queue": f"loading-{key}"}
    env = {**os.environ, "TEST_CONF": json.dumps(conf), "PYTHONPATH": str(ROOT)}
    command = forked.celery(APP, "worker", *forked.QUIET, "-P", pool, "-c", "1")
    path = cluster.path / f"loading-{key}.log"
    lease = cluster.redlock.acquire(f"k:{key}")
    with path.open("wb") as output:
        process = forked.start_anew(command, cwd=ROOT, env=env, output=output)
    try:
        sent = cluster.app.send_task(f"{APP}.tells", (key,), queue=f"loading-{key}")
        word = "waits (held" if not parking else "ready."
        wait_until(lambda: word in path.read_text(), 20.0, "it has met the lock")
        cluster.redlock.release(lease)
        assert cluster.result(sent, 20.0) == []
    finally:
        process.terminate()
        process.wait(60.0)
    assert "raised" not in path.read_text()
