"""A PostgreSQL server that lets us in, and then answers no question to its end."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from celery_redlock.protocol.errors import NodeError
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.stores.kinds import make_node, parse_nodes
from tests.support.names import Patch
from tests.support.peer import DEADLINE, in_thread

pytest.importorskip("psycopg")


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


SETTINGS = ("server_version", "15.0"), ("client_encoding", "UTF8"), ("in_hot_standby", "off")
SETTINGS += (("default_transaction_read_only", "off"),)
LET_IN = message(b"R", struct.pack("!i", 0))
LET_IN += b"".join(message(b"S", f"{name}\0{value}\0".encode()) for name, value in SETTINGS)
LET_IN += message(b"K", struct.pack("!ii", 1, 2)) + message(b"Z", b"I")
COLUMN = message(b"T", struct.pack("!h", 1) + b"a\0" + struct.pack("!ihihih", 0, 0, 25, -1, -1, 0))


def drip(client: socket.socket) -> None:
    for byte in COLUMN * 1000:
        client.sendall(bytes([byte]))
        time.sleep(0.02)


def other_type(client: socket.socket) -> None:
    row = message(b"D", struct.pack("!hi", 1, 3) + b"xyz")
    client.sendall(COLUMN + row + message(b"C", b"SELECT 1\0") + message(b"Z", b"I"))


HOSTILE: dict[str, Callable[[socket.socket], object]] = {
    "silence": lambda client: client.recv(1),
    "bytes that drip": drip,
    "half an answer": lambda client: (client.sendall(COLUMN[:9]), client.recv(1)),
    "a row of another type": other_type,
    "no PostgreSQL": lambda client: client.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 99),
}


@pytest.fixture(params=HOSTILE)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(65536)
                    client.sendall(LET_IN)
                    client.recv(65536)
                    HOSTILE[request.param](client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        yield f"postgresql://me:SECRET@127.0.0.1:{port}/shop?sslmode=disable&gssencmode=disable"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(DEADLINE)
    assert not thread.is_alive(), "it was hung up on"


def test_handshake_with_a_hostile_postgresql_is_the_silence_of_its_node(
    url: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("celery_redlock.stores.postgresql.handshake.ANSWER_S", 0.3)
    (address,) = parse_nodes([url])
    node = make_node(
        *(0, address, "redlock:", RestartGuard(False, 60.0, print), []),
        clock=time.monotonic,
        later=lambda call: call(),
    )
    with pytest.raises(NodeError) as raised:
        in_thread(node.connect)()
    assert "SECRET" not in str(raised.value)
