"""A member of an etcd cluster that passes requests on, and answers them with something odd."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from tests.support.etcd_peer import http as as_http
from tests.support.proxy import Front

__all__ = ["OddEtcd"]


class OddEtcd(Front):
    """A proxy in front of a real member that changes its answers.

    Attributes:
        odd: Makes of a path and of the true answer what is answered.
        seen: The paths that were asked, and the true answers.
    """

    def __init__(self, port: int) -> None:
        self.odd: Callable[[str, Any], Any] = lambda _path, said: said
        self.seen: list[tuple[str, Any]] = []
        super().__init__(port)

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def _take(self, client: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self._port)
        with client, client.makefile("rb") as requests, contextlib.suppress(OSError, ValueError):
            while first := requests.readline():
                path, length = first.split()[1].decode(), 0
                while (field := requests.readline()) not in (b"\r\n", b""):
                    if field.lower().startswith(b"content-length:"):
                        length = int(field.partition(b":")[2])
                upstream.request("POST", path, requests.read(length))
                with upstream.getresponse() as response:
                    said = json.loads(response.read())
                self.seen.append((path, said))
                client.sendall(as_http(self.odd(path, said)))
        upstream.close()
