"""Endings of bodies in a prefork worker, with their locks in ZooKeeper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import Redlock
from celery_redlock.server import LocalServer
from tests.support.wait import wait_until
from tests.support.zookeeper import LocalZooKeeper, require

TTL = 6.0
"""Seconds. A dead child's session lasts twice as long, unless somebody frees its locks."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("kazoo")
    require()
    path = tmp_path_factory.mktemp("zookeeper")
    with (
        LocalZooKeeper(1, TTL) as server,
        LocalServer() as broker,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("ZOOKEEPER_APP_BROKER", broker.url)
        m.setenv("ZOOKEEPER_APP_NODES", server.url)
        module = "tests.support.zookeeper_app"
        log = (path / "worker.log").open("wb")
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", module, "worker", "-P", "prefork", "-c", "2"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        from tests.support import zookeeper_app

        app = zookeeper_app.app
        app.conf.update(
            broker_url=broker.url, result_backend=broker.url, redlock_nodes=[server.url]
        )
        redlock = Redlock([server.url])
        try:
            wait_until(lambda: app.control.ping(timeout=1.0), 60.0, "the worker is there")
            yield zookeeper_app.work, redlock, path
        finally:
            redlock.close()
            worker.terminate()
            try:
                worker.wait(20.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            log.close()
            app.close()


def started(path: Path, count: int = 1) -> int:
    """Wait until so many bodies have begun; return the pid of the last."""
    wait_until(
        lambda: path.exists() and path.read_text().count("\n") >= count, 30.0, "the body runs"
    )
    return int(path.read_text().split()[-1])


@pytest.mark.parametrize("how", ["return", "raise", "revoke", "kill"])
def test_zookeeper_lock_is_free_after_each_ending_in_prefork(site: Any, how: str) -> None:
    work, redlock, path = site
    begun, end = path / f"begun-{how}", path / f"end-{how}"
    sent = work.delay(how, str(begun), str(end), how)
    pid = started(begun)
    assert redlock.try_acquire(how) is None
    since = time.monotonic()
    if how == "revoke":
        sent.revoke(terminate=True)
    elif how == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        end.touch()
    if how == "kill":  # the message comes back, and its body takes the lock from the dead child
        assert started(begun, 2) != pid
        assert time.monotonic() - since < 2 * TTL, "the session of the dead child has not ended yet"
        end.touch()
        assert sent.get(timeout=30.0)
        since = time.monotonic()
    wait_until(lambda: redlock.try_acquire(how) is not None, TTL, "it is free")
    assert time.monotonic() - since < TTL
