"""A server's process with its directory, both of which end with the process that started it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..server import GUARD

__all__ = ["GuardedProcess"]


class GuardedProcess:
    """One server's process, and the guard that outlives us to end it.

    Args:
        directory: Its own; it goes away with the process.
        user: Who runs it; we ourselves if None.
    """

    def __init__(self, directory: Path, user: str | None = None) -> None:
        self._dir, self._user = directory, user
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.paused = False

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None:
            raise RuntimeError("the server has no process before start()")
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def said(self) -> list[str]:
        """The lines of its log."""
        return (self._dir / "server.log").read_text(errors="replace").splitlines()

    def _launch(self, command: list[str]) -> None:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(self._dir)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        with open(self._dir / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, user=self._user, cwd="/"
            )
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"%d\n" % self._process.pid)
        self._guard.stdin.flush()

    def _dismiss(self) -> None:
        """It is dead: nobody needs to end it any more."""
        self.paused = False
        if self._guard is not None:
            self._guard.communicate(b"-\n")
            self._guard = None
