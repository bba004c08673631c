"""Sentinels that watch a master and its replica, all on this machine: real ones, and a puppet."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from celery_redlock.server import LocalServer, find_server, free_port, start_servers
from tests.support.proxy import close
from tests.support.wait import wait_until

__all__ = ["SERVICE", "Puppet", "Watched", "watched"]

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
        """Return True if all Sentinels know each other and the replica, and it has caught up."""
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


class Puppet:
    """A Sentinel with the answers that the test gives it.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        master, host: The port and the address of the master that it names.
        epoch: The version of its configuration.
        allows: Whether clients may subscribe.
        delay: Seconds that it takes for each answer.
        greeted: How many times it was asked who is the master.
        subscribers: The connections that are subscribed.
    """

    def __init__(self, master: int, epoch: int = 1, host: str = "127.0.0.1") -> None:
        self.master, self.epoch, self.host = master, epoch, host
        self.allows = True
        self.delay = 0.0
        self.greeted = 0
        self.subscribers: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *_error: object) -> None:
        close(self._listener)
        self.hang_up()

    def switch(self, master: int) -> None:
        """Name another master from now on, without announcing it."""
        self.master, self.epoch = master, self.epoch + 1

    def announce(self, service: str = SERVICE) -> None:
        """Send the master to the subscribers."""
        news = f"{service} 127.0.0.1 1 127.0.0.1 {self.master}"
        for client in self.subscribers:
            client.sendall(_array("message", "+switch-master", news))

    def hang_up(self) -> None:
        """Close all connections."""
        for client in self._open:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self._open.clear()
        self.subscribers.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = self._listener.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(65536):
                time.sleep(self.delay)
                client.sendall(b"".join(map(self._answer, data.split(b"\r\n"))))
                if b"SUBSCRIBE" in data and self.allows:
                    self.subscribers.append(client)

    def _answer(self, word: bytes) -> bytes:
        where = (self.host, str(self.master))
        if word.upper() in (b"MASTER", b"MASTERS"):
            state = {"name": SERVICE, "ip": where[0], "port": where[1], "flags": "master"}
            state |= {"num-other-sentinels": "2", "config-epoch": str(self.epoch)}
            reply = _array(*(text for pair in state.items() for text in pair))
            return reply if word.upper() == b"MASTER" else b"*1\r\n" + reply
        if word == b"GET-MASTER-ADDR-BY-NAME":
            self.greeted += 1
            return _array(*where)
        if word == b"SUBSCRIBE":
            confirmed = _array("subscribe", "+switch-master") + b":1\r\n"
            denied = b"-NOPERM this user has no permissions to access the channel\r\n"
            return confirmed.replace(b"*2", b"*3") if self.allows else denied
        return b"+OK\r\n" if word == b"CLIENT" else b""


def _array(*texts: str) -> bytes:
    return b"*%d\r\n" % len(texts) + b"".join(
        b"$%d\r\n%b\r\n" % (len(text), text.encode()) for text in texts
    )
