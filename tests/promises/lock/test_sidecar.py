"""Start of an extender process: its imports, and forks of other threads meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

import celery_redlock
from celery_redlock import Redlock
from celery_redlock.keepalive import sidecar
from celery_redlock.keepalive.shared_table import SharedLeaseTable
from celery_redlock.keepalive.sidecar import Sidecar
from celery_redlock.server import LocalServer
from tests.support.wait import wait_until

PLANTED = ("redis", "tenacity", "json", "linecache", "sitecustomize", "celery_redlock")
THIEF = """
import pathlib, sys
pathlib.Path({found!r}).write_text(__name__ + sys.stdin.readline())
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that anybody may write to, as /tmp is."""
    here = tmp_path / "here"
    here.mkdir()
    for name in PLANTED:
        (here / f"{name}.py").write_text(THIEF.format(found=str(tmp_path / "stolen")))
    monkeypatch.chdir(here)
    return here


def clients(server: LocalServer) -> int:
    with redis.Redis(port=server.port, password="SECRET") as client:
        return len(client.client_list()) - 1


@pytest.mark.parametrize("way", ["", ".", "here", "PYTHONPATH"])
def test_sidecar_imports_nothing_from_the_working_directory(
    way: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper receives the passwords of the nodes."""
    if way == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(here))
    else:
        monkeypatch.syspath_prepend(str(here) if way == "here" else way)
    table = SharedLeaseTable(1)
    with LocalServer(password="SECRET") as server:
        made = Sidecar(table, {"nodes": [server.url], "prefix": "redlock:", "node_timeout": 0.25})
        try:
            stolen = tmp_path / "stolen"
            wait_until(lambda: stolen.exists() or clients(server), 20, "it has begun its work")
            assert not stolen.exists(), stolen.read_text()
        finally:
            made.close()
            made._process.wait(60.0)


def test_package_in_the_working_directory_is_imported_last_by_the_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project that contains the package has it nowhere else."""
    home = Path(celery_redlock.__file__).parents[1]
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", ["", str(home), "lib", "/somewhere"])
    path = sidecar._path()
    assert path[0] == "/somewhere" and str(home) in path[1:] and not {"", "lib"} & set(path)


def test_sidecar_waits_as_long_for_an_answer_as_its_client() -> None:
    """A member of etcd that hangs is left after a second; only then the next one is asked."""
    lock = Redlock(["etcd://127.0.0.1:1,127.0.0.1:2"], keeper="process", node_timeout=0.25)
    config = lock.client.registry._config
    assert config is not None and config["node_timeout"] == lock.node_timeout > 1.0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # there are threads: so be it
def test_fork_waits_until_a_sidecar_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child would keep the pipe that reports the start open for as long as it lives."""
    starting, go, forked = threading.Event(), threading.Event(), threading.Event()
    popen = subprocess.Popen

    def slowly(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        starting.set()
        assert go.wait(20)
        return popen(*args, **options)

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        forked.set()
        os.waitpid(child, 0)

    monkeypatch.setattr(subprocess, "Popen", slowly)
    made: list[Sidecar] = []
    config = {"nodes": ["redis://127.0.0.1:1"], "prefix": "redlock:", "node_timeout": 0.25}
    start = threading.Thread(target=lambda: made.append(Sidecar(SharedLeaseTable(1), config)))
    start.start()
    assert starting.wait(20)
    other = threading.Thread(target=fork)
    other.start()
    assert not forked.wait(0.3)  # a fork takes a millisecond
    go.set()
    other.join(20)
    start.join(20)
    assert forked.is_set()
    made[0].close()
    made[0]._process.wait(60.0)
