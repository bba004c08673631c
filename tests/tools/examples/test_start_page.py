"""docs/start.md and three-nodes.md, done as a reader would: each block, on ports of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_redlock.server import find_server
from tests.support.machine import end_with_parent
from tests.support.nodes import make_known_to
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[3]


def read(page: str) -> tuple[dict[str, str], list[str]]:
    """Return the files of a page by name, and its commands in their order."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.M | re.S)
    files = {text.split()[1]: text for language, text in blocks if language == "python"}
    return files, [text.strip() for language, text in blocks if language == "sh"]


FILES, (INSTALL, REDIS, WORKER, PAY, SEE, TEST) = read("start.md")
MORE_FILES, (NODES, WORKER_OF_THREE, PAY_AGAIN, BREAK, BACK) = read("three-nodes.md")
GONE = "it gives no answer"
PORTS = ("7001", "7002", "7003")
LOCKS = ("redlock:order:7", "redlock:order:8")
CHARGED = "order 7: 50\norder 7: 20\norder 8: 10\n"

# The work takes ten seconds on the page, and here until the test says go.
WORK = "time.sleep(10)  # the work"
GATE = 'while not __import__("os").path.exists("go"): time.sleep(0.02)'

SERVER = f"""#!{sys.executable} -IS
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # as `end_with_parent`, without what that imports
os.execv({{binary!r}}, [{{binary!r}}, *sys.argv[1:]])
"""
CLI = f"""#!{sys.executable} -IS
import socket, sys
assert sys.argv[1] == "-p" and sys.argv[3:] == ["shutdown", "nosave"], sys.argv
with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as node:
    node.sendall(b"SHUTDOWN NOSAVE\\r\\n")
    assert node.recv(100) == b""  # it is gone
"""


class Desk:
    """A directory with the page's files, a PATH with its programs, and terminals."""

    def __init__(self, directory: Path, files: Mapping[str, str]) -> None:
        self.directory = directory
        names = ("7000", *PORTS, "6379")
        self._ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
        for name, text in files.items():
            (directory / name).write_text(self.local(text).replace(WORK, GATE), "utf-8")
        programs = directory / "bin"
        programs.mkdir()
        for name, text in (
            ("redis-server", SERVER.format(binary=find_server())),
            ("redis-cli", CLI),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = {**os.environ, "PATH": os.pathsep.join(path), "NO_COLOR": "1"}

    def local(self, text: str) -> str:
        """The same with ports that are free here."""
        return re.sub(r"\b(70\d\d|6379)\b", lambda port: self._ports[port[0]], text)

    def node(self, port: str, *command: str) -> Any:
        """Return the answer of the node at that port of the page; None if it is down."""
        client = redis.Redis(port=int(self.local(port)))
        with client, contextlib.suppress(redis.ConnectionError):
            return client.execute_command(*command)

    def both_are_charged(self) -> bool:
        """Return True if each node has a lock of each order."""
        return all(self.node(port, "exists", *LOCKS) == len(LOCKS) for port in PORTS)

    def all_have_votes(self) -> bool:
        """Give them votes as if they had been up for long; return True if all answer."""
        try:
            for port in PORTS:
                with redis.Redis(port=int(self.local(port)), decode_responses=True) as client:
                    make_known_to(client)
        except redis.ConnectionError:
            return False
        return True

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", self.local(command)],
            cwd=self.directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    @contextlib.contextmanager
    def terminal(self, command: str, log: str) -> Iterator[Path]:
        path = self.directory / log
        with open(path, "wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", self.local(command)],
                cwd=self.directory,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            yield path
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60.0)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, FILES)


@pytest.fixture
def desk_of_three(tmp_path: Path) -> Desk:
    return Desk(tmp_path, {**FILES, **MORE_FILES})


def test_package_and_extra_of_the_start_page_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (extra,) = re.findall(r'"celery-redlock\[(\w+)\]"', INSTALL)
    assert f"\n{extra} = [" in project and 'name = "celery-redlock"' in project


def listed(desk: Desk, charged: Path) -> None:
    """See the locks as the page does, while both orders are charged."""
    with ThreadPoolExecutor() as side_by_side:
        every, one = side_by_side.map(desk.run, SEE.splitlines())
    assert every.returncode == 0 and "shop.charge" in every.stdout, every
    assert "order:7" in every.stdout and "order:8" in every.stdout
    assert one.returncode == 0 and "shop.charge" in one.stdout, one
    (desk.directory / "go").touch()
    wait_until(lambda: charged.read_text() == CHARGED, 40, "all to be charged")


def test_every_step_of_the_start_page_does_what_it_says(desk: Desk) -> None:
    with desk.terminal(REDIS, "redis.log"), contextlib.ExitStack() as then:
        wait_until(lambda: desk.node("6379", "ping"), 40, "the Redis")
        log = then.enter_context(desk.terminal(WORKER, "worker.log"))
        wait_until(lambda: " ready." in log.read_text(), 40, "the worker to be ready")
        with desk.terminal(PAY, "pay.log") as charged:
            wait_until(lambda: desk.node("6379", "exists", *LOCKS) == 2, 40, "two locks")
            listed(desk, charged)
        text = log.read_text()
        assert "tasks are locked on one Redis alone" in text and " waits (unavailable" not in text


def test_every_step_of_the_page_on_three_nodes_does_what_it_says(desk_of_three: Desk) -> None:
    desk = desk_of_three
    with desk.terminal(NODES, "nodes.log") as nodes, contextlib.ExitStack() as then:
        wait_until(desk.all_have_votes, 40, "the nodes")
        log = then.enter_context(desk.terminal(WORKER_OF_THREE, "worker.log"))
        wait_until(lambda: " ready." in log.read_text(), 40, "the worker to be ready")
        with desk.terminal(PAY_AGAIN, "pay.log") as charged:
            wait_until(desk.both_are_charged, 40, "both orders to be charged")
            listed(desk, charged)

        kill, pay, doctor = BREAK.splitlines()
        assert desk.run(kill).returncode == 0
        assert desk.run(pay).stdout == CHARGED, log.read_text()
        diagnosis = desk.run(doctor)
        assert diagnosis.returncode == 1, diagnosis
        assert desk.local("7001") in diagnosis.stdout and "host" in diagnosis.stdout
        assert GONE in diagnosis.stdout
        assert "Ready to accept connections" in nodes.read_text()

        with desk.terminal(BACK, "back.log"):
            wait_until(lambda: desk.node("7001", "ping"), 40, "the node to be back")


def test_test_on_the_start_page_passes(desk: Desk) -> None:
    done = desk.run(f"{TEST} -p no:valkey -p no:docker_tools -p no:cacheprovider")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
