"""A RabbitMQ for tests: an own process on free ports of the loopback, gone when its test run is.

Debian's package runs one as a service; this one shares nothing with that. It has its own node name,
directory, cookie and name server (`epmd`), which Erlang would else start for all nodes of the
machine, and leave running. It takes about five seconds to start and 140 MB.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from celery_redlock.server import free_port

READY = 60.0
"""Seconds for it to start, on a machine that is busy."""
TRIES = 3
"""Another may take a port that was free when it was chosen."""

# As the guards of celery_redlock.server: end of file means that the test run is gone.
_GUARD = 'read -r pids; read -r _ || { kill -9 $pids; rm -rf -- "$1"; }'

_CONFIG = """\
listeners.tcp.1 = 127.0.0.1:{port}
num_acceptors.tcp = 1
log.file = false
log.console = true
log.console.level = warning
vm_memory_high_watermark.absolute = 512MB
disk_free_limit.absolute = 1MB
"""


@functools.cache
def missing() -> str:
    """Return why there can be no RabbitMQ here; empty if there can."""
    if not _program():
        return "there is no rabbitmq-server (apt install rabbitmq-server)"
    if not shutil.which("epmd"):
        return "there is a rabbitmq-server, but no epmd (apt install erlang-base)"
    return ""


def _program() -> str | None:
    # What Debian has on PATH is a wrapper that changes the user and writes into /var/log.
    debian = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    return str(debian) if debian.exists() else shutil.which("rabbitmq-server")


@contextlib.contextmanager
def start_rabbitmq(advanced: str = "") -> Iterator[str]:
    """A running RabbitMQ, and its end.

    Args:
        advanced: What its configuration cannot say: Erlang terms of the application `rabbit`.

    Yields:
        Its URL.
    """
    for last in range(1, TRIES + 1):
        with contextlib.ExitStack() as stack:
            directory = Path(tempfile.mkdtemp(prefix="redlock-rabbitmq-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            port = free_port()
            server = _spawn(directory, port, stack, advanced)
            url = f"amqp://guest:guest@127.0.0.1:{port}//"
            if _answers(port, server):
                yield url
                return
            said = (directory / "output").read_text(errors="replace")
            assert last < TRIES, f"RabbitMQ does not start: {said[-2000:]}"


def _spawn(
    directory: Path, port: int, stack: contextlib.ExitStack, advanced: str = ""
) -> subprocess.Popen[bytes]:
    """Start it with its epmd, and owe their end to `stack`."""
    epmd_port, distribution_port = free_port(), free_port()
    (directory / "rabbitmq.conf").write_text(_CONFIG.format(port=port))
    (directory / "advanced.config").write_text(f"[{{rabbit, [{advanced}]}}].\n")
    (directory / "enabled_plugins").write_text("[].\n")
    ours = {
        "HOME": str(directory),  # for the cookie
        "ERL_EPMD_PORT": str(epmd_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_ALLOW_INPUT": "1",  # the script becomes the server, so that its pid is the one
        "RABBITMQ_NODENAME": "test@localhost",
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_BASE": str(directory),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_CONFIG_FILES": str(directory / "conf.d"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-noshell -noinput +S 1:1 +sbwt none -kernel inet_dist_use_interface {127,0,0,1}"
        ),
    }
    others = {name: value for name, value in os.environ.items() if "RABBITMQ" not in name}
    program = _program()
    assert program is not None
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    stack.callback(_dismiss, guard)
    with open(directory / "output", "wb") as output:
        epmd, server = (
            subprocess.Popen(
                command,
                env=others | ours,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in (["epmd", "-port", str(epmd_port), "-address", "127.0.0.1"], [program])
        )
    for process in (epmd, server):
        stack.callback(_kill, process)
    assert guard.stdin is not None
    guard.stdin.write(b"%d %d\n" % (epmd.pid, server.pid))
    guard.stdin.flush()
    return server


def _answers(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Wait until it does; False if it ended instead. It listens last, when all the rest is up."""
    deadline = time.monotonic() + READY
    while server.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection,
        ):
            connection.sendall(b"AMQP\0\0\x09\x01")
            if connection.recv(1) == b"\x01":  # a method frame: Connection.Start
                return True
        time.sleep(0.05)
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # nothing to save; what it started itself ends with it
    process.wait()


def _dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Let the guard end without killing anything: its processes have been seen dead."""
    guard.communicate(b"-\n-\n")
