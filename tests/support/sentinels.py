"""Real Sentinels that watch a master and its replica, all on this machine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from celery_redlock.server import LocalServer, find_server, free_port, start_servers
from tests.support.wait import wait_until

__all__ = ["SERVICE", "Watched", "watched"]

SERVICE = "mymaster"
CONFIG = """\
port {port}
bind 127.0.0.1
dir {dir}
sentinel resolve-hostnames no
sentinel monitor {service} 127.0.0.1 {master} 2
sentinel down-after-milliseconds {service} 500
sentinel failover-timeout {service} 5000
sentinel parallel-syncs {service} 1
"""


class Watched:
    """A master, its replica, and three Sentinels.

    Attributes:
        servers: The master it began with, and its replica.
        ports: Of the Sentinels.
    """

    def __init__(self, servers: list[LocalServer], ports: list[int]) -> None:
        self.servers = servers
        self.ports = ports

    @property
    def url(self) -> str:
        """The URL of the service."""
        return f"sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{SERVICE}"

    @property
    def master(self) -> int:
        """The port of the master that the first Sentinel knows."""
        with redis.Redis(port=self.ports[0], decode_responses=True) as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def ready(self) -> bool:
        """Whether all Sentinels know each other and the replica, which has caught up."""
        for port in self.ports:
            with redis.Redis(port=port, decode_responses=True) as client:
                state = client.sentinel_masters()[SERVICE]
                if state["num-other-sentinels"] != 2 or state["num-slaves"] != 1:
                    return False
                (replica,) = client.sentinel_slaves(SERVICE)
                if replica["master-link-status"] != "ok" or replica["is_disconnected"]:
                    return False
        return True


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    """Start all of it; stop it at the end, whatever happens."""
    directory = Path(tempfile.mkdtemp(prefix="redlock-"))
    sentinels: list[subprocess.Popen[bytes]] = []
    with start_servers(2) as servers:
        try:
            master, replica = servers
            with redis.Redis(port=replica.port) as client:
                client.replicaof("127.0.0.1", master.port)
            ports = []
            for number in range(3):
                port = free_port()
                place = directory / str(number)
                place.mkdir()
                config = place / "sentinel.conf"
                config.write_text(
                    CONFIG.format(port=port, dir=place, service=SERVICE, master=master.port)
                )
                command = [find_server(), str(config), "--sentinel"]
                sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
                ports.append(port)
            found = Watched(servers, ports)

            def ready() -> bool:
                with contextlib.suppress(redis.RedisError):
                    return found.ready()
                return False

            wait_until(ready, 30.0, "the Sentinels know each other and the replica", every=0.05)
            yield found
        finally:
            for process in sentinels:
                process.kill()
                process.wait()
            shutil.rmtree(directory, ignore_errors=True)
