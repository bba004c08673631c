"""Containers of pytest-celery, made of processes of this machine: no Docker is needed.

pytest-celery's nodes (`CeleryTestWorker`, `CeleryTestBroker`, `CeleryTestBackend`) each wrap a
container of pytest-docker-tools, and that wraps a container of Docker's SDK. `LocalProcess` and
`LocalServerProcess` stand in the place of the last: they have the attributes that are used.
"""

from __future__ import annotations

import contextlib
import signal as signals
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from pytest_celery import CeleryWorkerContainer, RedisContainer

from celery_redlock.server import LocalServer
from tests.support import forked
from tests.support.wait import wait_until

READY = 60.0
"""Seconds for a worker to start, on a machine that is busy."""


class _Shaped:
    """Common attributes of all: no network of their own, no ports to publish."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"local-{self.id[:8]}"
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": "127.0.0.1", "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
        }

    def reload(self) -> None:
        """Nothing is cached."""


class LocalProcess(_Shaped):
    """A program that runs, with its output in a file; begun anew by `restart`.

    Attributes:
        process: The process, the newest if it was restarted.
        output: Where all it prints goes.
        begun: How much was in that file when it was last started; bytes.
    """

    def __init__(
        self, command: Sequence[str], *, output: Path, env: Mapping[str, str], cwd: Path
    ) -> None:
        super().__init__()
        self.output = output
        self._command, self._env, self._cwd = list(command), dict(env), cwd
        self.begun = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.begun = self.output.stat().st_size if self.output.exists() else 0
        with open(self.output, "ab") as output:
            return forked.start(self._command, cwd=self._cwd, env=self._env, output=output)

    @property
    def status(self) -> str:
        return "running" if self.process.poll() is None else "exited"

    def logs(self) -> bytes:
        return self.output.read_bytes()

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal to the process; SIGKILL, the default, to its children as well."""
        number = signals.Signals[signal] if isinstance(signal, str) else signal
        if number not in (None, signals.SIGKILL):
            self.process.send_signal(number)
            return
        for process in self._family() if self.process.poll() is None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(60.0)

    def _family(self) -> list[psutil.Process]:
        """Return its children and itself.

        None if it ends meanwhile, and no waiting for its forks.
        """
        try:
            process = psutil.Process(self.process.pid)
            return [*process.children(recursive=True), process]
        except psutil.NoSuchProcess:
            return []

    def restart(self, timeout: float = 10.0) -> None:
        """Ask it to end, kill it if it does not in time, start it again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(timeout)
        self.kill()
        self.process = self._start()


class LocalServerProcess(_Shaped):
    """A server that was started elsewhere."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__()
        self.server = server

    @property
    def status(self) -> str:
        return "running" if self.server.running else "exited"

    def logs(self) -> bytes:
        return self.server.log.encode()

    def kill(self, signal: str | int | None = None) -> None:
        self.server.kill()

    def restart(self, timeout: float = 10.0) -> None:
        """Restart it empty, on its port, as a container without a volume."""
        self.server.restart()


class LocalWorker(CeleryWorkerContainer):
    """A worker that is a process of this machine."""

    _container: LocalProcess

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._container.process

    @property
    def output(self) -> Path:
        return self._container.output

    def _wait_ready(self, timeout: float = READY) -> bool:
        # Of this start: what it printed before a restart stands in the same file. And soon:
        # pytest-docker-tools looks once a second.
        def up() -> bool:
            assert self.process.poll() is None, self.logs()
            return b" ready." in self._container.logs()[self._container.begun :]

        wait_until(up, timeout, "the worker is ready", every=0.02)
        return True


class LocalRedis(RedisContainer):
    """A server of this machine, as a broker or a backend."""

    _container: LocalServerProcess

    @property
    def port(self) -> int:
        return self._container.server.port

    @property
    def hostname(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def host_url(self) -> str:
        return self.url

    @property
    def url(self) -> str:
        return self._container.server.url
