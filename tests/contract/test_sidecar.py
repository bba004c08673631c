"""What a helper process imports: nothing that somebody has put into the working directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import redis

import celery_redlock
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
def test_a_helper_imports_nothing_from_the_working_directory(
    way: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told the passwords of the nodes."""
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
            made._process.wait(20)


def test_what_we_have_from_the_working_directory_is_found_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a project brings the package with it, there is nowhere else to find it."""
    home = Path(celery_redlock.__file__).parents[1]
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", ["", str(home), "lib", "/somewhere"])
    path = sidecar._path()
    assert path[0] == "/somewhere" and str(home) in path[1:] and not {"", "lib"} & set(path)
