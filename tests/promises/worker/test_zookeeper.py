"""Endings of bodies in a prefork worker, with their locks in ZooKeeper."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from celery_redlock import Redlock
from celery_redlock.server import LocalServer
from tests.support.wait import wait_until
from tests.support.zookeeper import TICK_MS, LocalZooKeeper, require

TTL = 6.0
"""Seconds. A dead process's session lasts twice as long, unless somebody frees its locks."""
AT_ONCE_S = TTL / 2
"""Less than a ttl, so that it was neither the end of the lease nor that of a session."""
SESSION_S = 2 * TTL + 4 * TICK_MS / 1000


class Site(NamedTuple):
    """The task, a lock that looks at its key, and a directory."""

    work: Any
    redlock: Redlock
    path: Path

    @contextmanager
    def worker(self, queue: str = "celery") -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker of a queue, in a process group of its own."""
        command = [sys.executable, "-m", "celery", "-A", "tests.support.zookeeper_app", "worker"]
        with (self.path / "worker.log").open("ab") as log:
            worker = subprocess.Popen(
                [*command, "-P", "prefork", "-c", "2", "-Q", queue, "-n", f"{queue}@%h"],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            control = self.work.app.control
            here = [f"{queue}@{socket.gethostname()}"]
            wait_until(lambda: control.ping(here, timeout=1.0), 60.0, "the worker is there")
            yield worker
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def begin(self, how: str, **options: Any) -> tuple[Any, int, Path]:
        """Start a body; return its result, its pid, and the file that ends it."""
        begun, end = self.path / f"begun-{how}", self.path / f"end-{how}"
        sent = self.work.apply_async((how, str(begun), str(end), how), **options)
        pid = started(begun)
        assert self.redlock.try_acquire(how) is None
        return sent, pid, end

    def free_after(self, key: str, seconds: float) -> float:
        """Wait until a key is free; return the seconds that it took."""
        since = time.monotonic()
        wait_until(lambda: self.redlock.try_acquire(key) is not None, seconds, f"{key} is free")
        return time.monotonic() - since


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("kazoo")
    require()
    with (
        LocalZooKeeper(1, TTL) as server,
        LocalServer() as broker,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setenv("ZOOKEEPER_APP_BROKER", broker.url)
        m.setenv("ZOOKEEPER_APP_NODES", server.url)
        from tests.support import zookeeper_app

        app = zookeeper_app.app
        app.conf.update(
            broker_url=broker.url, result_backend=broker.url, redlock_nodes=[server.url]
        )
        redlock = Redlock([server.url])
        try:
            yield Site(zookeeper_app.work, redlock, tmp_path_factory.mktemp("zookeeper"))
        finally:
            redlock.close()
            app.close()


@pytest.fixture(scope="module")
def shared(site: Site) -> Iterator[Site]:
    """The same, with one worker for all tests that it survives."""
    with site.worker():
        yield site


def started(path: Path, count: int = 1) -> int:
    """Wait until so many bodies have begun; return the pid of the last."""
    wait_until(
        lambda: path.exists() and path.read_text().count("\n") >= count, 30.0, "the body runs"
    )
    return int(path.read_text().split()[-1])


@pytest.mark.parametrize(
    ("how", "limits"),
    [
        ("return", {}),
        ("raise", {}),
        ("revoke", {}),
        ("soft", {"soft_time_limit": 1}),
        ("hard", {"time_limit": 1}),
    ],
)
def test_zookeeper_lock_is_free_at_once_after_the_end_of_its_body(
    shared: Site, how: str, limits: dict[str, int]
) -> None:
    sent, _pid, end = shared.begin(how, **limits)
    if how == "revoke":
        sent.revoke(terminate=True)
    elif not limits:
        end.touch()
    patience = sum(limits.values()) + AT_ONCE_S
    assert shared.free_after(how, patience) < patience


def test_zookeeper_lock_of_a_killed_child_is_free_at_once_for_its_message(shared: Site) -> None:
    """The message comes back, and its body takes the lock from the dead child."""
    sent, pid, end = shared.begin("kill")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert started(shared.path / "begun-kill", 2) != pid
    assert time.monotonic() - killed < TTL, "the session of the dead child has not ended yet"
    end.touch()
    assert sent.get(timeout=30.0)
    assert shared.free_after("kill", AT_ONCE_S) < AT_ONCE_S


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT"])
def test_zookeeper_lock_is_free_at_once_after_the_end_of_its_worker(site: Site, name: str) -> None:
    """SIGTERM waits for the body; SIGQUIT ends it, and its message comes back later."""
    with site.worker(name) as worker:
        _sent, _pid, end = site.begin(name, queue=name)
        os.kill(worker.pid, getattr(signal, name))
        if name == "SIGTERM":
            time.sleep(1.0)
            assert site.redlock.try_acquire(name) is None
            end.touch()
        worker.wait(30.0)
        assert site.free_after(name, AT_ONCE_S) < AT_ONCE_S


def test_zookeeper_lock_of_a_killed_worker_is_free_when_its_session_has_ended(site: Site) -> None:
    """Nobody is left who could free it before."""
    with site.worker("SIGKILL") as worker:
        site.begin("SIGKILL", queue="SIGKILL")
        os.killpg(worker.pid, signal.SIGKILL)
        took = site.free_after("SIGKILL", SESSION_S)
        assert TTL / 2 < took < SESSION_S + AT_ONCE_S
