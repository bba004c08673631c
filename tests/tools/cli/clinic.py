"""Sites to be examined: their servers, their nodes, their apps."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterable
from typing import Any

import redis
from celery import Celery
from click.testing import CliRunner

from celery_redlock import SingletonTask
from celery_redlock.cli.context import Site
from celery_redlock.cli.doctor import command
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from tests.support.proxy import Proxy

__all__ = ["HOSTS", "OWNER", "TOKENS", "Forger", "examined", "found", "put", "shop"]
__all__ += ["url"]

HOSTS = ["--bind", "127.0.0.1", "127.0.0.2", "127.0.0.3"]
"""Several addresses, as if there were several hosts."""
OWNER = Owner("web-1", 4242, "0123-abcd", task="shop.charge")
TOKENS = [OWNER.token(f"{number:032x}", 1.7e9) for number in range(3)]


def url(server: LocalServer | Proxy, host: int = 1, user: str = "") -> str:
    """Where a server is, as seen from one of its addresses."""
    return f"redis://{user}127.0.0.{host}:{server.port}/0"


def put(nodes: Iterable[redis.Redis], key: str, token: str, **how: Any) -> None:
    """Set a key on some nodes, for a minute by default."""
    for node in nodes:
        node.set(key, token.encode("utf-8", "surrogatepass"), **(how or {"px": 60_000}))


def shop(nodes: list[str], **conf: Any) -> Celery:
    """An app with a locked task."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update({"redlock_nodes": nodes, **conf})
    task: Callable[..., Any] = app.task(
        base=SingletonTask, name="shop.charge", shared=False, lock_key="order:{order_id}"
    )

    def charge(order_id: int) -> None: ...

    task(charge)
    return app


def examined(site: Site, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the doctor's exit code and its report on a site."""
    result = CliRunner().invoke(command, ["--timeout", "1", *arguments, "--json"], obj=site)
    assert result.stdout, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    for finding in report["findings"]:  # each is a sentence that says what to do
        assert finding["where"] and finding["what"] and finding["fix"], finding
    assert "SECRET" not in result.output
    if "redlock" in vars(site):
        site.redlock.close()
    return result.exit_code, report


def found(report: dict[str, Any], level: str) -> dict[str, dict[str, Any]]:
    """The findings of a level, by check."""
    return {one["check"]: one for one in report["findings"] if one["level"] == level}


class Forger(Proxy):
    """A proxy in front of a server that replaces parts of its answers by as many other bytes.

    Args:
        port: The server's.
        pattern: What is changed.
        change: What it becomes.
    """

    def __init__(self, port: int, pattern: bytes, change: Callable[[bytes], bytes]) -> None:
        self._pattern, self._change = re.compile(pattern), change
        super().__init__(port)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(self._pattern.sub(lambda found: self._change(found[0]), data))
        for one in (client, server):
            one.close()
