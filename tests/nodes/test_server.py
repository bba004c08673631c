"""Local servers start together, follow their options, and never outlive their parent."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_redlock import server as server_module
from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.server import LocalServer, find_server, start_servers
from tests.support.wait import wait_until


def client(server: LocalServer, timeout: float = 2.0) -> redis.Redis:
    return redis.Redis.from_url(server.url, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))


def ping(server: LocalServer, timeout: float = 2.0) -> bool:
    with client(server, timeout) as c:
        return bool(c.ping())


def alive(pid: int) -> bool:
    """Return True if the process runs.

    A zombie is dead: some containers never collect an orphan.
    """
    return state(pid) not in ("gone", psutil.STATUS_ZOMBIE)


def state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


# -- finding a binary -----------------------------------------------------------------------------


def fake_binary(directory: Path, name: str) -> str:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\necho 'not today' >&2; exit 3\n")
    path.chmod(0o755)
    return str(path)


def test_server_variable_comes_first_and_a_wrong_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = fake_binary(tmp_path / "mine", "my-server")
    monkeypatch.setenv("CELERY_REDLOCK_SERVER", mine)
    assert find_server() == mine
    os.unlink(mine)
    with pytest.raises(ConfigurationError, match=r"CELERY_REDLOCK_SERVER.*my-server"):
        find_server()


def test_bundled_server_is_preferred_to_valkey_and_redis_or_a_hint_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CELERY_REDLOCK_SERVER", raising=False)
    bundled = fake_binary(tmp_path / "bundled", "valkey-server")
    valkey = fake_binary(tmp_path / "bin", "valkey-server")
    redis_server = fake_binary(tmp_path / "bin", "redis-server")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(server_module, "_bundled", lambda: [bundled])
    assert find_server() == bundled
    os.chmod(bundled, 0o644)  # cannot run: as good as absent
    assert find_server() == valkey
    os.unlink(valkey)
    assert find_server() == redis_server
    os.unlink(redis_server)
    with pytest.raises(ConfigurationError) as caught:
        find_server()
    for hint in ("apt install redis-server", "brew install valkey", "apk add valkey"):
        assert hint in str(caught.value)


# -- start and stop -------------------------------------------------------------------------------


def test_local_server_answers_after_start_and_is_gone_after_stop() -> None:
    server = LocalServer(config=["--maxmemory", "3mb"])
    for name in ("url", "pid"):
        with pytest.raises(RuntimeError):
            getattr(server, name)
    server.start()
    try:
        pid, directory = server.pid, server._dir
        assert directory is not None and directory.is_dir()
        server.start()  # twice is once
        assert server.running and server.pid == pid
        with client(server) as c:
            assert c.info("server")["process_id"] == pid
            wanted = {"maxmemory": "3145728", "bind": "127.0.0.1", "save": "", "appendonly": "no"}
            assert {name: c.config_get(name)[name] for name in wanted} == wanted
    finally:
        server.stop()
    assert not server.running
    assert not alive(pid)
    assert not directory.exists()
    with pytest.raises(redis.ConnectionError):
        ping(server)
    server.stop()  # idempotent


def test_local_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    broken = fake_binary(tmp_path, "broken")
    for server, said in [
        (LocalServer(config=["--no-such-directive", "1"]), "no-such-directive"),
        (LocalServer(binary=broken), "not today"),
        (LocalServer(binary=str(tmp_path / "missing")), "does not run"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            server.start()
        assert not server.running
        assert server._dir is None


def test_local_server_takes_another_port_if_its_first_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LocalServer() as first:
        free = server_module.free_port
        offers = [first.port, first.port]
        monkeypatch.setattr(server_module, "free_port", lambda: offers.pop() if offers else free())
        with LocalServer() as second:
            assert not offers
            assert second.port != first.port
            assert 18_000 <= second.port < 32_000, "within a range of ephemeral ports"
            with client(second) as c:
                assert c.info("server")["process_id"] == second.pid


# -- faults ---------------------------------------------------------------------------------------


def dies(server: LocalServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.running, 5, "the server is seen dead")
    with pytest.raises(RuntimeError, match="not running"):
        server.pause()


def paused_and_restarted(server: LocalServer) -> None:
    server.pause()
    server.restart()


@pytest.mark.parametrize("end", [LocalServer.kill, dies, paused_and_restarted])
def test_ended_local_server_comes_back_empty_on_the_same_port(
    end: Callable[[LocalServer], None],
) -> None:
    with LocalServer() as server:
        url, pid = server.url, server.pid
        with client(server) as c:
            c.set("k", "v")
        end(server)
        if end is not paused_and_restarted:
            with pytest.raises(redis.ConnectionError):
                ping(server)
        server.start()
        assert server.url == url
        assert server.pid != pid
        with client(server) as c:
            assert c.get("k") is None


def test_port_of_a_dead_local_server_is_given_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer() as one:
        ports = range(one.port - 100, one.port + 100)
        monkeypatch.setattr(server_module, "PORTS", ports)
        others = (port for port in ports if port != one.port)
        monkeypatch.setattr(
            "random.SystemRandom.sample", lambda *_, k: [one.port, *itertools.islice(others, k)]
        )
        one.kill()
        with pytest.raises(redis.ConnectionError):
            ping(one)
        with LocalServer() as another:
            assert another.port != one.port
            assert ping(one.start())


# -- several --------------------------------------------------------------------------------------


def test_several_local_servers_start_and_stop_together_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), start_servers(5) as five:
        assert len({server.port for server in five}) == 5
        assert all(ping(server) for server in five)
        five[1].pause()
        five[2].kill()
        _ = 1 / 0
    assert not any(alive(server.pid) for server in five)


def test_local_server_that_cannot_start_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[LocalServer] = []
    spawn = LocalServer._spawn

    def third_fails(self: LocalServer) -> None:
        if len(started) == 2:
            raise ConfigurationError("no")
        spawn(self)
        started.append(self)

    monkeypatch.setattr(LocalServer, "_spawn", third_fails)
    with pytest.raises(ConfigurationError), start_servers(3):
        pytest.fail("it must not get here")
    assert len(started) == 2
    assert not any(alive(server.pid) for server in started)


# -- they never outlive their owner ---------------------------------------------------------------

OWNER = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from celery_redlock.server import LocalServer, start_servers
how = sys.argv[1]
servers = [LocalServer().start() for _ in range(2)]
if how == "paused":
    servers[0].pause()
child = 0
if how == "fork":
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(*[s.pid for s in servers], child, *[s._dir for s in servers], flush=True)
if how == "returns":
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "signum"),
    [
        ("sleeps", signal.SIGKILL),
        ("sleeps", signal.SIGTERM),
        ("sleeps", signal.SIGINT),
        ("paused", signal.SIGKILL),
        ("group", signal.SIGKILL),
        ("fork", signal.SIGKILL),
        ("returns", None),
    ],
)
def test_local_servers_end_with_their_owner_however_it_ends(
    how: str, signum: signal.Signals | None
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OWNER, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    fork, pids = 0, []
    try:
        assert owner.stdout is not None
        one, two, child, *directories = owner.stdout.readline().split()
        pids, fork = [int(one), int(two)], int(child)
        if signum is not None:
            assert all(alive(pid) for pid in pids)
            if how == "group":  # as a terminal or a shell's job control does it
                os.killpg(owner.pid, signum)
            else:
                owner.send_signal(signum)
        owner.wait(10)
        wait_until(lambda: not any(alive(pid) for pid in pids), 5, "both servers are dead")
        wait_until(lambda: not any(map(os.path.exists, directories)), 5, "no directory is left")
        if fork:
            assert alive(fork)  # it did outlive its parent, and held nothing open
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
        for pid in [*pids, fork]:
            if pid and alive(pid):  # a failure here must not leave what it found
                os.kill(pid, signal.SIGKILL)


def test_local_server_outlives_the_thread_that_started_it() -> None:
    server = LocalServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        assert ping(server)
    finally:
        server.stop()


def test_fork_stops_no_local_server_of_its_parent() -> None:
    with LocalServer() as server:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                server.stop()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert server.running
        assert ping(server)
        assert server._dir is not None and server._dir.is_dir()


def test_local_servers_leave_no_descriptor_and_no_child() -> None:
    gc.collect()  # what other tests have left is not to be closed in the middle
    before = len(os.listdir("/dev/fd"))
    children: set[int] = set()
    for _ in range(3):
        with start_servers(2) as two:
            two[0].restart()
            for server in two:
                assert server._guard is not None
                children |= {server.pid, server._guard.pid}
    assert len(os.listdir("/dev/fd")) <= before  # a thread of another test may close one
    assert len(children) == 12
    for pid in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_password_of_a_local_server_is_not_in_the_process_list() -> None:
    word = 'a secret "word" \\ with # all\tof é'
    with LocalServer(password=word) as server:
        # As it was started with: later it says something else of itself.
        assert server._process is not None
        assert not any("word" in argument for argument in server._process.args)
        assert "secret" not in repr(server)
        for _ in range(2):
            assert ping(server)
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)).ping()
            server.restart()


def test_directory_of_a_local_server_is_for_its_owner_alone() -> None:
    with LocalServer(password="x") as server:
        assert server._dir is not None
        assert stat.S_IMODE(server._dir.stat().st_mode) == 0o700
