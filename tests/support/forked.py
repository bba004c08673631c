"""Starts programs that use Celery as forks of one process that has imported it already.

A worker takes half a second of a core to import Celery, kombu and redis-py, and tests start some
two hundred workers and beats: a third of all that they compute. So the first start begins a
process that imports these and nothing else (no app, no settings, no environment of a test), and
every start is a fork of it; a pool of greenlets is one of another, where gevent has changed modules
before these were imported. Programs that need something of the interpreter itself are started
anew.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
MODULE = "tests.support.run_celery"
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
"""A worker that says nothing to others, and does not wait for them."""
SERVE = "--serve"
PROGRAM = "--program"
GREEN = "gevent"
OF_THE_INTERPRETER = ("PYTHON", "LD_", "MALLOC_", "TZ", "PROMETHEUS_")
"""Beginnings of the names of variables that are read before or during the imports."""
PRELOADED = (
    *("celery.app.backends", "celery.app.log", "celery.apps.beat", "celery.apps.worker"),
    *("celery.backends.redis", "celery.bin.celery", "celery.bin.worker", "celery.bin.beat"),
    *("celery.worker.autoscale", "celery.worker.consumer", "kombu.transport.redis", "redis"),
    *("celery.app.control", "celery.app.events", "celery.worker.strategy", "pydantic.main"),
    *("pydantic.json_schema", "pydantic.types", "pydantic.fields", "celery.fixups.django"),
    *("celery_redlock.keepalive.supervisor", "celery_redlock.locking.client"),
    *("celery_redlock.worker.parking.consumer", "celery_redlock.worker.startup"),
    "celery_redlock.messages.publish",
)
POOLS = {
    False: (
        *("billiard.heap", "billiard.popen_fork", "billiard.synchronize"),
        *("celery.concurrency.prefork", "celery.concurrency.thread"),
    ),
    True: ("celery.concurrency.gevent",),
}
"""Modules that are imported as well; the keys are True for greenlets."""


class Forked:
    """A program, as `subprocess.Popen` has them: as much of it as tests ask for."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end

    def poll(self) -> int | None:
        """Return its return code; None if it has not ended."""
        with contextlib.suppress(BlockingIOError):
            return self._wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its return code.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        try:
            return self._wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(MODULE, timeout or 0.0) from None

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._end.settimeout(timeout)
            # Nothing comes if the process that reports it is dead; so is this one, then.
            self.returncode = json.loads(self._end.recv(100) or str(-signal.SIGKILL))
            self._end.close()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_servers: dict[bool, tuple[subprocess.Popen[bytes], socket.socket]] = {}
"""Servers of this process, by True for greenlets. Each ends when its socket is closed: with us."""


def celery(app: str, *arguments: str) -> list[str]:
    """The command of a Celery program of an app, that logs what it does."""
    return [sys.executable, "-m", MODULE, "-A", app, *arguments, "-l", "INFO"]


def start(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output in a file; a fork if it can be one.

    Args:
        command: What a shell would be given.
        cwd: Where it runs.
        env: All of its environment.
        output: The file.
    """
    if not _can_be_forked(command, env):
        return start_anew(command, cwd=cwd, env=env, output=output)
    green = GREEN in command
    if green not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [sys.executable, "-m", MODULE, SERVE, str(theirs.fileno()), *[GREEN][:green]]
        with theirs:
            server = subprocess.Popen(
                arguments, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        _servers[green] = server, ours
        atexit.register(_end, server, ours)
    end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = json.dumps([list(command[3:]), str(cwd), dict(env)]).encode()
    with theirs:
        socket.send_fds(_servers[green][1], [request], [output.fileno(), theirs.fileno()])
    forked: Any = Forked(int(end.recv(100)), end)
    started: subprocess.Popen[bytes] = forked
    return started


def run(
    *arguments: str, cwd: Path, env: Mapping[str, str], timeout: float = 60.0
) -> tuple[int, str]:
    """Run a Python program to its end, as `python ARGUMENTS` would.

    Args:
        *arguments: A script, or `-m` and a module, and its arguments.
        cwd: Where it runs.
        env: All of its environment.
        timeout: Seconds until it is killed.

    Returns:
        Its return code, and all that it printed, errors too.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", MODULE, PROGRAM, *arguments]
        process = start(command, cwd=cwd, env=env, output=output)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        output.seek(0)
        return code, output.read().decode()


def start_anew(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start as `start` does, with nothing imported, for modules that must be changed first."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end(server: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(5.0)


def _can_be_forked(command: Sequence[str], env: Mapping[str, str]) -> bool:
    def of_the_interpreter(variables: Mapping[str, str]) -> dict[str, str]:
        given = {name: variables[name] for name in variables if name.startswith(OF_THE_INTERPRETER)}
        given.pop("PYTHONPATH", None)  # the root of the project, which is where we are
        return given

    return (
        sys.platform == "linux"
        and command[:3] == [sys.executable, "-m", MODULE]
        and of_the_interpreter(env) == of_the_interpreter(os.environ)
    )


def serve(requests: socket.socket, green: bool) -> None:
    """Fork for each request; return in the forks alone, which then run what was requested.

    Args:
        requests: Where they come from; at its end, so does this.
        green: The forks run greenlets. This process itself runs none.
    """
    fork, waitpid, plain_socket = os.fork, os.waitpid, socket.socket
    selector = selectors.DefaultSelector()
    if green:
        from gevent import monkey, reinit

        monkey.patch_all()
    for module in (*PRELOADED, *POOLS[green]):
        with contextlib.suppress(ModuleNotFoundError):  # pydantic may not be there
            __import__(module)
    ends: dict[int, tuple[int, socket.socket]] = {}
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _events in selector.select():
            if key.fd in ends:
                pid, told = ends.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), told:
                    told.send(str(code).encode())
                continue
            data, given, _flags, _address = socket.recv_fds(requests, 1 << 20, 2)
            if not data:
                os._exit(0)
            output, end = given
            pid = fork()
            if pid == 0:
                if green:
                    reinit()
                selector.close()
                for descriptor in (requests, *(told for _pid, told in ends.values())):
                    descriptor.close()
                for descriptor in (end, *ends):
                    os.close(descriptor)
                _become(*json.loads(data), output)
                return
            os.close(output)
            told = plain_socket(fileno=end)
            told.send(str(pid).encode())
            pidfd = os.pidfd_open(pid)
            ends[pidfd] = pid, told
            selector.register(pidfd, selectors.EVENT_READ)


def _become(arguments: list[str], cwd: str, env: dict[str, str], output: int) -> None:
    """Be as if started anew."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = arguments
    time.tzset()
