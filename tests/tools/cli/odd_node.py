"""A node that answers whoever looks with something odd: in front of a real one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import redis

from celery_redlock.stores.redis.reader import READ_SCRIPT
from tests.support.proxy import Front

__all__ = ["ODD", "OddNode", "bent"]

ODD: tuple[Any, ...] = (
    *(None, 0, 1, -3, 2**63, 10**400, -(10**400)),
    *(
        b"",
        b"nan",
        b"1e400",
        b"\xff\xfe",
        b"x" * 5000,
        b"9" * 400,
        b"\x1b[2J\n",
        b"a:1",
        b"|1||0||9||",
    ),
    *([], [[]], [b"0", [b"x", 5, [], None]], [None] * 3, [[[[b"deep"]]]]),
    redis.ResponseError("ERR \x1b[2J odd"),
)
LOOKS = (b"SCAN", b"ZCARD", b"ZRANGE", b"PTTL", b"TIME", b"INFO", b"CONFIG", b"GET", b"GETRANGE")
"""Commands of observers, besides their script."""


def bent(reply: Any, rng: Random) -> Any:
    """A reply with something odd in it."""
    if not isinstance(reply, list) or not reply or rng.random() < 0.2:
        return rng.choice(ODD)
    bent_one = list(reply)
    place = rng.randrange(len(reply))
    how = rng.random()
    if how < 0.15:
        del bent_one[place]
    elif how < 0.3:
        bent_one.insert(place, rng.choice(ODD))
    else:
        bent_one[place] = bent(reply[place], rng)
    return bent_one


class OddNode(Front):
    """A proxy that passes requests on and answers them with something else.

    Attributes:
        odd: Returns the answer to an observer, given a request's words and its true reply.
    """

    def __init__(self, port: int) -> None:
        self.odd: Callable[[list[bytes], Any], Any] = lambda _words, reply: reply
        super().__init__(port)

    def _take(self, client: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        upstream = redis.Connection(port=self._port, protocol=2)
        with client, client.makefile("rb") as requests, contextlib.suppress(OSError, ValueError):
            while head := requests.readline():
                words = []
                for _ in range(int(head[1:])):
                    words.append(requests.read(int(requests.readline()[1:]) + 2)[:-2])
                reply: Any
                try:
                    upstream.send_command(*words)
                    reply = upstream.read_response(disable_decoding=True)
                except redis.ResponseError as error:
                    reply = error
                except redis.ConnectionError:
                    break
                looks = words[0] in LOOKS or (words[0] == b"EVAL" and words[1] == READ_SCRIPT)
                client.sendall(_encoded(self.odd(words, reply) if looks else reply))
        upstream.disconnect()


def _encoded(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(_encoded, value))
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    return b"-%b\r\n" % str(value).encode()
