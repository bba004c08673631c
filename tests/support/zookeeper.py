"""A local ZooKeeper ensemble for tests: one server, or three, on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from celery_redlock.guarded_process import GuardedCluster, GuardedProcess
from celery_redlock.protocol.errors import ConfigurationError, RedlockError
from celery_redlock.server import free_port
from tests.support import wanting

__all__ = ["LocalZooKeeper", "find_zookeeper", "missing", "require", "start_zookeeper"]

JAR = "/usr/share/java/zookeeper.jar"
FOR_TLS = "/usr/share/java/netty-codec.jar:/usr/share/java/netty-resolver.jar"
"""Jars that TLS needs besides those that the jar of the server names."""
MEMORY = "/dev/shm"
TICK_MS = 500
"""Shorter than a server's usual 2 s, so that tests need not wait for long: sessions of 1 to 10 s
and, where a test asks for it, of 40."""
START_TIMEOUT_S = 60.0
LOG = """<configuration><appender name="A" class="ch.qos.logback.core.ConsoleAppender"><encoder>
<pattern>%level %msg%n</pattern></encoder></appender>
<root level="ERROR"><appender-ref ref="A"/></root></configuration>"""


def find_zookeeper() -> str:
    """Return the jar of the server.

    Raises:
        ConfigurationError: It is missing, or Java is.
    """
    if not Path(JAR).exists() or shutil.which("java") is None:
        raise ConfigurationError(
            "No ZooKeeper server was found: apt install --no-install-recommends zookeeper"
        )
    return JAR


missing = partial(wanting.missing, find_zookeeper)
require = partial(wanting.require, find_zookeeper)


@contextmanager
def start_zookeeper(members: int = 1) -> Iterator[LocalZooKeeper]:
    """Start an ensemble; skip the test where there can be none."""
    require()
    with LocalZooKeeper(members) as server:
        yield server


class Member(GuardedProcess):
    """One server. It keeps its ports and its data over `kill` and `start`."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("redlock-zookeeper-", MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.port, self.peer, self.election = free_port(), free_port(), free_port()
        self.lines: list[str] = []

    def start(self) -> Member:
        """Start it, and return it without waiting; see `wait`."""
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        (data / "myid").write_text(f"{self.number}\n")
        (self.directory / "logback.xml").write_text(LOG)
        settings = [
            f"tickTime={TICK_MS}", "initLimit=20", "syncLimit=10", f"dataDir={data}",
            f"clientPort={self.port}", "clientPortAddress=127.0.0.1", "maxClientCnxns=0",
            "admin.enableServer=false", "maxSessionTimeout=40000", "forceSync=no", *self.lines,
        ]  # fmt: skip
        config = self.directory / "zoo.cfg"
        config.write_text("\n".join(settings) + "\n")
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        options = ["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        options.append(f"-Dlogback.configurationFile={self.directory / 'logback.xml'}")
        options.append("-Dzookeeper.jmx.log4j.disable=true")
        classes = f"{self.directory}:{find_zookeeper()}:{FOR_TLS}"
        self._launch(["java", *options, "-cp", classes, main, str(config)])
        return self

    def says(self) -> str:
        """Return its answer to `srvr`; empty if it gives none."""
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1.0) as connection,
        ):
            connection.settimeout(1.0)
            connection.sendall(b"srvr")
            answer = b""
            while data := connection.recv(4096):
                answer += data
            return answer.decode()
        return ""

    def wait(self) -> None:
        """Wait until it serves, with a leader.

        Raises:
            RedlockError: It did not serve in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.running:
            if "Mode: " in self.says():
                return
            time.sleep(0.05)
        raise RedlockError(f"ZooKeeper did not start. {self._log_tail()}")


class LocalZooKeeper(GuardedCluster):
    """One ensemble on 127.0.0.1. Each method acts on all its servers."""

    def __init__(self, members: int = 1, ttl: float = 5.0, chroot: str = "") -> None:
        self.members = [Member(number) for number in range(1, members + 1)]
        self.ttl, self.chroot = ttl, chroot
        if members > 1:
            for one in self.members:
                one.lines = [
                    f"server.{m.number}=127.0.0.1:{m.peer}:{m.election}" for m in self.members
                ]

    @property
    def url(self) -> str:
        """The URL that names all its servers."""
        hosts = ",".join(f"127.0.0.1:{member.port}" for member in self.members)
        return f"zookeeper://{hosts}{self.chroot}?ttl={self.ttl:g}"
