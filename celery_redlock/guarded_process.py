"""A server's process that cannot outlive the program that started it.

A test run that is killed, a demonstration left by Ctrl-C, a benchmark that crashes must leave no
server behind, so each server has a *guard*: a shell that blocks on a pipe whose other end only this
process holds. However this process dies, the kernel closes the pipe, and the guard kills the server
and removes its directory. (PR_SET_PDEATHSIG would do it with less, but it needs Python code between
fork and exec, works on Linux only, and fires when the *thread* that started the server ends.)
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
from typing import TYPE_CHECKING

from .protocol.errors import RedlockError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GuardedProcess"]

# Reads the pid, then blocks. A line says that the server is already gone; end of file that we are.
GUARD = 'read -r pid; read -r _ || { kill -9 "$pid"; rm -rf -- "$1"; }'


class GuardedProcess(ABC):
    """One server's process and its directory, both of which end with the process that started it.

    It is a context manager: entering starts it, leaving stops it.

    Args:
        prefix: What the name of its directory begins with.
        parent: Where that is made; with other temporary files if None.
        user: Who runs it; we ourselves if None.
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
        """Its own: made when it is first asked for, gone once it is stopped."""
        if self._dir is None:
            self._dir = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
            if self._user:
                shutil.chown(self._dir, self._user)
        return self._dir

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
        """What the server has printed since it was started."""
        with contextlib.suppress(FileNotFoundError):
            return (self._dir / "server.log").read_text(errors="replace") if self._dir else ""
        return ""

    @abstractmethod
    def start(self) -> GuardedProcess:
        """Start the server, wait until it serves, and return it."""

    def stop(self) -> None:
        """End the server, paused or not, and remove its directory. Never fails, idempotent."""
        if os.getpid() != self._owner:
            return  # A fork of ours: the server is the parent's.
        self._end()
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def _end(self) -> None:
        """End it for good; what a kill leaves outside of its directory goes as well."""
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
        """Freeze the server (SIGSTOP); returns once it is frozen: it answers nothing any more."""
        if self.paused:
            return
        if not self.running:
            raise RuntimeError(f"{self!r} cannot be paused: it is not running.")
        os.kill(self.pid, signal.SIGSTOP)
        # The signal returns before the last thread has stopped. Only the wait status tells.
        _pid, status = os.waitpid(self.pid, os.WUNTRACED)
        self.paused = os.WIFSTOPPED(status)
        if not self.paused:
            raise RedlockError(f"{self!r} could not be paused: it has ended.")

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        if self.paused and self.running:
            os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    def _launch(self, command: Sequence[str]) -> None:
        """Start the process, and who ends it should we die.

        Raises:
            OSError: The command does not run.
        """
        # In sessions apart: Ctrl-C is for the program, which ends its servers itself.
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
                cwd="/" if self._user else None,  # who may not look into ours complains
            )
        assert guard.stdin is not None
        guard.stdin.write(b"%d\n" % self._process.pid)
        guard.stdin.flush()

    def _dismiss_guard(self) -> None:
        """The process was seen dead: its pid may soon be another process's."""
        self.paused = False
        if self._guard is not None:
            self._guard.communicate(b"-\n-\n")
            self._guard = None

    def _last_words(self) -> str:
        lines = [line for line in self.log.splitlines() if line.strip()]
        return f"Its last words: {' / '.join(lines[-3:])}" if lines else "It printed nothing."

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


_guards: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def _close_pipes_in_child() -> None:
    # A fork holds the pipe as well, and would keep the servers alive after its parent's death.
    for guard in list(_guards):
        with contextlib.suppress(OSError, AttributeError):
            guard.stdin.close()  # type: ignore[union-attr]


os.register_at_fork(after_in_child=_close_pipes_in_child)
