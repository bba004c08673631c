"""A server's process that cannot outlive the program that started it.

A test run that is killed, a demonstration that is left by Ctrl-C, and a benchmark that crashes must
leave no server behind. So each server has a *guard*: a shell that blocks on a pipe whose other end
only this process holds. However this process dies, the kernel closes the pipe, and the guard kills
the server and removes its directory. (PR_SET_PDEATHSIG would be simpler, but it needs Python code
between fork and exec, works on Linux only, and fires when the *thread* that started the server
ends.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .protocol.errors import RedlockError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GuardedCluster", "GuardedProcess"]

# It reads the pid, then blocks. Another line means that the server is already gone; end of file
# means that this process is gone.
GUARD = 'read -r pid; read -r _ || { kill -9 "$pid"; rm -rf -- "$1"; }'


class GuardedProcess(ABC):
    """One server's process and its directory; both end with the process that started them.

    It is a context manager: to enter it starts the server, to leave it stops the server.

    Args:
        prefix: The prefix of its directory's name.
        parent: Where the directory is made; None for the place of temporary files.
        user: The user that runs it; None for the present user.
    """

    def __init__(
        self, prefix: str = "redlock-", parent: str | None = None, user: str | None = None
    ) -> None:
        self.paused = False
        self._prefix, self._parent, self._user = prefix, parent, user
        self._dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @property
    def directory(self) -> Path:
        """The server's directory: made at the first use, and removed when the server is stopped."""
        if self._dir is None:
            self._dir = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
            if self._user:
                shutil.chown(self._dir, self._user)
        return self._dir

    @property
    def pid(self) -> int:
        """The server's process id; that of the last process if it is not running."""
        if self._process is None:
            raise RuntimeError("the server has no process before start()")
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if there is a process; a paused server is running, too."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The output of the server since it was started."""
        with contextlib.suppress(FileNotFoundError):
            return (self._dir / "server.log").read_text(errors="replace") if self._dir else ""
        return ""

    @abstractmethod
    def start(self) -> GuardedProcess:
        """Start the server, wait until it serves, and return it."""

    def stop(self) -> None:
        """End the server, paused or not, and remove its directory. It never fails. Idempotent."""
        if os.getpid() != self._owner:
            return  # this process is a fork, and the server is its parent's
        self._end()
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def _end(self) -> None:
        """End it for good, and remove everything that a kill leaves outside of its directory."""
        self.kill()

    def kill(self) -> None:
        """End the server as `kill -9` does, paused or not. `start` brings it back."""
        if self._process is not None:
            self._process.kill()  # also ends a stopped process
            self._process.wait()
        self._dismiss_guard()

    def restart(self) -> None:
        """Kill the server and start it on the same port. A paused one runs again."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP), and return when it is frozen and answers nothing."""
        if self.paused:
            return
        if not self.running:
            raise RuntimeError(f"{self!r} cannot be paused: it is not running.")
        os.kill(self.pid, signal.SIGSTOP)
        # `kill` returns before the last thread has stopped. Only the wait status shows the end.
        _pid, status = os.waitpid(self.pid, os.WUNTRACED)
        self.paused = os.WIFSTOPPED(status)
        if not self.paused:
            raise RedlockError(f"{self!r} could not be paused: it has ended.")

    def resume(self) -> None:
        """Let a paused server run again (SIGCONT)."""
        if self.paused and self.running:
            os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    def _launch(self, command: Sequence[str]) -> None:
        """Start the process, and the guard that ends it if this process dies.

        Raises:
            OSError: The command does not run.
        """
        # Both get sessions of their own: Ctrl-C is for the program, which ends its servers itself.
        guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._guard = guard
        _guards.add(guard)
        with open(self.directory / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=self._user,
                cwd="/" if self._user else None,  # another user may have no access to ours
            )
        assert guard.stdin is not None
        guard.stdin.write(b"%d\n" % self._process.pid)
        guard.stdin.flush()

    def _dismiss_guard(self) -> None:
        """End the guard, because the server is dead: its pid may soon be another process's."""
        self.paused = False
        if self._guard is not None:
            self._guard.communicate(b"-\n-\n")
            self._guard = None

    def _log_tail(self) -> str:
        lines = [line for line in self.log.splitlines() if line.strip()]
        return f"Its last words: {' / '.join(lines[-3:])}" if lines else "It printed nothing."

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


_guards: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _close_pipes_in_child() -> None:
    # A fork holds the pipes, too, and would keep the servers alive after its parent's death.
    for guard in list(_guards):
        with contextlib.suppress(OSError, AttributeError):
            guard.stdin.close()  # type: ignore[union-attr]


os.register_at_fork(after_in_child=_close_pipes_in_child)


class GuardedCluster:
    """Some servers that act as one. Each method acts on all of them.

    It is a context manager, as each of them is. The `start` of one returns at once, and its `wait`
    returns once it serves, because no server may do so without the others.

    Attributes:
        members: The servers, to act on one of them.
    """

    members: Sequence[Any]

    @property
    def running(self) -> bool:
        """True if all servers run."""
        return all(member.running for member in self.members)

    def start(self) -> Self:
        """Start the servers that do not run, wait until all serve, and return this.

        Raises:
            RedlockError: They did not serve in time.
        """
        for member in self.members:
            if not member.running:
                member.kill()  # also ends the guard process of the last start
                member.start()
        for member in self.members:
            member.wait()
        return self

    def kill(self) -> None:
        """End the servers as `kill -9` does. `start` brings them back with their data."""
        for member in self.members:
            member.kill()

    def pause(self) -> None:
        """Freeze the servers (SIGSTOP), so that they answer nothing."""
        for member in self.members:
            if member.running:
                member.pause()

    def resume(self) -> None:
        """Let the servers run again (SIGCONT)."""
        for member in self.members:
            member.resume()

    def stop(self) -> None:
        """End the servers, and remove their data. It never fails. Idempotent."""
        for member in self.members:
            member.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc_info: object) -> None:
        self.stop()
