"""A local etcd cluster for the demonstration, the tests and the benchmarks: one member, or three.

On loopback only, without a password. Its data survives `kill` and `start`, and `stop` removes it.
"""

from __future__ import annotations

import http.client
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress

from ..guarded_process import GuardedCluster, GuardedProcess
from ..protocol.errors import ConfigurationError, RedlockError
from ..server import free_port

__all__ = ["LocalEtcd", "Member", "find_etcd"]

BINARY_VARIABLE = "CELERY_REDLOCK_ETCD"
"""Environment variable with the server binary; it takes precedence."""
MEMORY = "/dev/shm"
"""Directory for its data, if it exists: etcd waits for the disk at each write."""
PORT_TRIES = 20
"""Attempts to start if another process takes a port; so many failures are no coincidence."""
START_TIMEOUT_S = 30.0
SETTINGS = ("--logger=zap", "--log-level=error", "--heartbeat-interval=100")


def find_etcd() -> str:
    """Find the etcd binary.

    Raises:
        ConfigurationError: There is none; the message names the remedy.
    """
    named = os.environ.get(BINARY_VARIABLE, "etcd")
    if found := shutil.which(named):
        return found
    raise ConfigurationError(
        "No etcd server was found: install one (apt install etcd-server, brew install etcd) or name"
        f" its binary in {BINARY_VARIABLE}."
    )


class Member(GuardedProcess):
    """One member of a cluster. It keeps its ports and its data over `kill` and `start`."""

    def __init__(self, binary: str, name: str, options: Sequence[str]) -> None:
        self.name, self._binary, self.options = name, binary, options
        super().__init__("redlock-etcd-", MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.take_ports()
        self.cluster = ""

    def take_ports(self) -> None:
        """Choose two free ports."""
        self.port, self._peer_port = free_port(), free_port()

    @property
    def peer(self) -> str:
        """The name and peer URL of this member, for the others."""
        return f"{self.name}=http://127.0.0.1:{self._peer_port}"

    def start(self) -> Member:
        """Start it, and return it without waiting; see `wait`."""
        peer, client = self.peer.partition("=")[2], f"http://127.0.0.1:{self.port}"
        command = [self._binary, f"--name={self.name}", f"--data-dir={self.directory / 'data'}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--initial-cluster={self.cluster}", *SETTINGS, *self.options]
        self._launch(command)
        return self

    def wait(self) -> None:
        """Wait until it serves, with a leader.

        Raises:
            RedlockError: It did not serve in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.running:
            asking = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
            with suppress(OSError, http.client.HTTPException), closing(asking):
                asking.request("GET", "/health")
                if asking.getresponse().status == 200:
                    return
            time.sleep(0.02)
        raise RedlockError(f"etcd did not start. {self._log_tail()}")

    def wipe(self) -> None:
        """Kill it, and remove its data."""
        self.kill()
        shutil.rmtree(self.directory / "data", ignore_errors=True)


class LocalEtcd(GuardedCluster):
    """One cluster on 127.0.0.1. Each method acts on all its members.

    Attributes:
        members: The members, to act on one of them.
    """

    members: list[Member]

    def __init__(self, members: int = 1, *options: str) -> None:
        binary = find_etcd()
        self.members = [Member(binary, f"m{n}", options) for n in range(members)]
        self._introduce()
        self._tries = PORT_TRIES

    def _introduce(self) -> None:
        for member in self.members:
            member.cluster = ",".join(one.peer for one in self.members)

    @property
    def url(self) -> str:
        """The URL that names all its members."""
        return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in self.members)

    @property
    def port(self) -> int:
        """The port of its first member."""
        return self.members[0].port

    @property
    def pid(self) -> int:
        """The process id of its first member."""
        return self.members[0].pid

    @property
    def paused(self) -> bool:
        """True if one of its members is frozen."""
        return any(member.paused for member in self.members)

    def start(self) -> LocalEtcd:
        """Start the cluster, on other ports if a program has taken one at its first start."""
        try:
            super().start()
        except RedlockError as error:
            if "address already in use" not in str(error) or not self._tries:
                raise
            self._tries -= 1
            for member in self.members:
                member.wipe()
                member.take_ports()
            self._introduce()
            return self.start()
        self._tries = 0
        return self

    def restart(self) -> None:
        """Kill it and start it on the same ports, with its data."""
        self.kill()
        self.start()

    def reset(self) -> None:
        """Remove its data, and start it again, empty."""
        for member in self.members:
            member.wipe()
        self.start()
