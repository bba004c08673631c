"""The sidecar: a small process that supervises what a worker holds (`redlock_keeper = "process"`).

No thread of a process can extend leases while a C call keeps the GIL, and none can free them once
the process is dead. In a prefork worker the main process does both for its children. Elsewhere
(threads, solo, gevent, a program that uses `Redlock` itself), or where the main process may be
killed too, the sidecar does. It reads the shared table (`shared_table.py`) and imports no Celery.
It notices the death of its client because its standard input ends.

It receives the nodes' passwords, so it imports nothing from the directory that it is started in,
where anybody may have put a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .shared_table import SharedLeaseTable

__all__ = ["Sidecar"]

logger = logging.getLogger("celery_redlock.keeper")

STEADY = 5.0
"""Seconds that a sidecar must live for the next one to be started without delay."""
AGAIN, AGAIN_MAX = 0.05, 5.0
"""Seconds before it is started again, doubled up to this each time it dies at once."""
START = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main()"
"""What it runs. Not `-m`, which has the working directory first on the path."""
NEEDED = ("celery_redlock", "redis")
"""What it imports, and does not come with Python."""


class Sidecar:
    """The client's end: starts the sidecar, and starts it again if it dies.

    Args:
        table: The leases that it supervises.
        config: How to reach the nodes; may hold passwords, so it travels through a pipe.
    """

    def __init__(self, table: SharedLeaseTable, config: Mapping[str, Any]) -> None:
        self._table = table
        self._config = json.dumps({"fd": table.fd, "ring": table.ring, **config}).encode() + b"\n"
        self._closed = threading.Event()
        self._process = self._spawn()
        threading.Thread(target=self._mind, name="celery_redlock helper", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id of the sidecar that runs now, or has just died."""
        return self._process.pid

    def close(self) -> None:
        """End it. The leases in the table then have no supervisor."""
        self._closed.set()
        self.forked()

    def forked(self) -> None:
        """In a child: it is the parent's death that the helper is to hear of, not ours."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", START, __name__, *_path()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._table.fd, self._table.ring),
            start_new_session=True,  # Ctrl-C at a terminal is for the worker
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # dead already: then it is started again
            process.stdin.write(self._config)
            process.stdin.flush()
        return process

    def _mind(self) -> None:
        pause = AGAIN
        while True:
            try:
                self._process.wait(STEADY)
                pause = min(2 * pause, AGAIN_MAX)
            except subprocess.TimeoutExpired:
                self._process.wait()
                pause = AGAIN
            if self._closed.is_set():
                return
            logger.warning(
                "the helper process %d that keeps the locks has ended (%d); starting another",
                self._process.pid,
                self._process.returncode,
            )
            while not self._closed.wait(pause):
                try:
                    self._process = self._spawn()
                    break
                except OSError as error:  # no memory, too many processes or files: not for ever
                    pause = min(2 * pause, AGAIN_MAX)
                    logger.error("cannot start the helper process that keeps the locks: %s", error)
            else:
                return


def _path() -> list[str]:
    """Return where the helper finds modules: where we do, but for the working directory.

    Where we have ourselves imported from there what it needs, it stands last: after all that has
    such a name elsewhere, and after Python's own.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # it has been removed
        here = ""
    path = [place for place in sys.path if os.path.isabs(place)]
    path = [place for place in path if os.path.realpath(place) != here]
    homes = (getattr(sys.modules.get(name), "__file__", None) for name in NEEDED)
    return list(dict.fromkeys([*path, *(str(Path(home).parents[1]) for home in homes if home)]))


def main() -> None:
    """Run the sidecar: supervise the table until the client is gone."""
    from ..stores.redis.address import parse_nodes
    from ..stores.redis.driver import Driver
    from .supervisor import LeaseSupervisor

    # Whoever ends the worker by a signal to all of its group must not end this first.
    for name in ("SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    logging.basicConfig(format="[%(asctime)s: %(levelname)s/%(name)s helper] %(message)s")
    stdin = sys.stdin.fileno()
    config = json.loads(_line(stdin))
    addresses = parse_nodes(config["nodes"])
    # It only extends and frees, and that any node may do; its client has said what is to be said.
    driver = Driver(addresses, config["prefix"], strict=False)
    table = SharedLeaseTable(len(addresses), config["fd"], config["ring"])
    LeaseSupervisor(table, driver, config["node_timeout"], client=stdin).run()


def _line(fd: int) -> bytes:
    """One line of input, and no byte more: what follows is the end."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 65536)
        if not data:
            raise SystemExit(1)
        line += data
    return line
