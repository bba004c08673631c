"""Requests about locks that a PostgreSQL database receives, each with its process, by its log."""

from __future__ import annotations

import re
import threading
import uuid
from typing import Any

from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.cluster import Cluster
from tests.support.monitor import VerbMonitor
from tests.support.wait import wait_until

LOGGED = {"log_statement": "all", "log_connections": "on", "log_line_prefix": "%r "}
"""Settings of a server whose log can be read so."""
_LINE = re.compile(r"^127\.0\.0\.1\((\d+)\) (\w+):  (.*)$")
_VERB = re.compile(r"redlock_(\w+)\(")
EVERY = 0.005
"""Seconds between two looks at the log: a client may be dead soon after it has connected."""


class PostgresMonitor(VerbMonitor):
    """The same as of a Redis node."""

    def __init__(self, cluster: Cluster) -> None:
        (node,) = cluster.nodes
        assert isinstance(node, LocalPostgres)
        self._server = node
        self._node = f"0100007F:{node.port:04X}"
        self._seen: list[tuple[str, str]] = []
        self._pids: dict[str, int] = {}
        self._over = threading.Event()
        self._marks: set[str] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> PostgresMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join(30.0)

    def _listen(self) -> None:
        asked: dict[str, str] = {}
        with open(self._server.data.parent / "server.log", encoding="utf-8") as log:
            line = ""
            while not self._over.wait(0.0 if line else EVERY):
                line += log.readline()
                if line.endswith("\n"):
                    if found := _LINE.match(line):
                        self._hear(found[1], found[2], found[3], asked)
                    line = ""

    def _hear(self, port: str, kind: str, text: str, asked: dict[str, str]) -> None:
        if text.startswith("connection received"):
            self._find(port)
        elif kind == "DETAIL" and port in asked:
            words = re.findall(r"[^\s'\"{},]+", text)
            self._seen.append((port, " ".join((asked.pop(port), *words))))
        elif verb := _VERB.search(text):
            asked[port] = verb[1]
        elif "SELECT 'mark" in text:
            self._marks.add(text.split("'")[1])

    def _caught_up(self) -> None:
        mark = f"mark{uuid.uuid4().hex}"
        postgres.sql(self._server, f"SELECT '{mark}'")
        wait_until(lambda: mark in self._marks, 5.0, "the log has been read so far")
