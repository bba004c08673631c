"""The sidecar: a small process that supervises a worker's leases (`redlock_keeper = "process"`).

No thread of a process can extend leases while a C call keeps the GIL, and none can release them
once the process is dead. In a prefork worker the main process does both for its children. Elsewhere
(threads, solo, gevent, a program that uses `Redlock` itself), or if the main process may be killed
too, the sidecar does. It reads the shared table (`shared_table.py`) and does not import Celery. It
notices the death of its client because its standard input ends.

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

from ..protocol.texts import event
from ..runtime.clock import monotonic
from .shared_table import SharedLeaseTable

__all__ = ["Sidecar"]

logger = logging.getLogger("celery_redlock.keeper")

STEADY_S = 5.0
"""Lifetime in seconds after which a sidecar that ends is replaced without a long delay."""
RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.05, 5.0
"""First and longest delay before it is replaced otherwise, in seconds; doubled each time. A sidecar
that cannot start must not keep a core busy."""
START = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import main; main()"
"""The code that it runs. Not `-m`, which puts the working directory first on the path."""
NEEDED = ("celery_redlock", "redis", "psycopg")
"""Packages that it imports if we have them, besides Python's own."""


_SPAWNING = threading.RLock()
"""Lock that keeps threads from forking while another thread starts a sidecar. The child would
inherit a pipe whose end the start waits for, and the start would last as long as the child."""
os.register_at_fork(
    before=_SPAWNING.acquire,
    after_in_parent=_SPAWNING.release,
    after_in_child=_SPAWNING.release,
)


class Sidecar:
    """The client's side: starts the sidecar, and starts another if it dies.

    Args:
        table: The leases that it supervises.
        config: The arguments for reaching the nodes; sent through a pipe, because it may contain
            passwords.
    """

    def __init__(self, table: SharedLeaseTable, config: Mapping[str, Any]) -> None:
        self._table = table
        self._config = json.dumps({"fd": table.fd, **config}).encode() + b"\n"
        self._closed = threading.Event()
        self._spawn()
        threading.Thread(target=self._restart, name="celery_redlock sidecar", daemon=True).start()

    def close(self) -> None:
        """End it. The leases in the table then have no supervisor."""
        self._closed.set()
        self.forked()

    def forked(self) -> None:
        """Close its input in a forked child, so that the sidecar notices the parent's end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _spawn(self) -> None:
        with _SPAWNING:  # a fork that follows knows the process, and closes its input: see `forked`
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", "-c", START, __name__, *_path()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._table.fd,),
                start_new_session=True,  # Ctrl-C at a terminal must reach only the worker
            )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # dead already: then it is started again
            process.stdin.write(self._config)
            process.stdin.flush()

    def _restart(self) -> None:
        """Start another sidecar each time that one ends."""
        delay = RESTART_DELAY_S
        while True:
            started = monotonic()
            code = self._process.wait()
            if monotonic() - started > STEADY_S:
                delay = RESTART_DELAY_S
            if self._closed.is_set():
                return
            logger.warning(
                "the extender process %d (sidecar) has ended with exit code %d; starting another",
                self._process.pid,
                code,
                extra=event("keeper_ended"),
            )
            if self._closed.wait(delay):
                return
            delay = min(2 * delay, MAX_RESTART_DELAY_S)
            try:
                self._spawn()
            except OSError as error:  # no memory, too many processes or files: may be temporary
                logger.error(
                    "the extender process (sidecar) cannot be started: %s",
                    error,
                    extra=event("keeper_unstartable"),
                )


def _path() -> list[str]:
    """Return the sidecar's module path: ours, without the working directory.

    If we have imported a package that it needs from that directory, the directory comes last: after
    all other directories, and after Python's own.
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
    from ..stores.driver import Driver
    from ..stores.kinds import parse_nodes
    from .supervisor import LeaseSupervisor

    # A signal to the worker's whole group must not end this first.
    for name in ("SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    logging.basicConfig(format="[%(asctime)s: %(levelname)s/%(name)s sidecar] %(message)s")
    stdin = sys.stdin.fileno()
    config = json.loads(_line(stdin))
    addresses = parse_nodes(config["nodes"])
    # Not strict: it only extends and releases, which is safe on any node, and its client has
    # reported unsuitable nodes.
    driver = Driver(addresses, config["prefix"], strict=False)
    table = SharedLeaseTable(len(addresses), config["fd"])
    LeaseSupervisor(table, driver, config["node_timeout"], client=stdin).run()


def _line(fd: int) -> bytes:
    """Read one line of input, and no byte more: the supervisor polls the rest for its end."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 65536)
        if not data:
            raise SystemExit(1)
        line += data
    return line
