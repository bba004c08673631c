"""Requests about locks that a node receives, each with its process."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import psutil
import redis

from celery_redlock.protocol.values import Owner
from tests.support.cluster import Cluster
from tests.support.wait import wait_until

GONE = -1
"""Stands for a process that connected, spoke and ended before it could be looked up."""


class Monitor:
    """All requests about locks that a node receives, in order."""

    longer = 0.0
    """Seconds for which a key may outlive a ttl of one second."""

    def __init__(self, cluster: Cluster) -> None:
        for _ in range(2):  # a node learns the script of a release from its first client
            with cluster.redlock.lock("first"):
                pass
        self._node = f"0100007F:{cluster.nodes[0].port:04X}"
        self._client = redis.Redis(port=cluster.nodes[0].port, socket_timeout=None)
        self._seen: list[tuple[str, str]] = []
        self._pids: dict[str, int] = {}
        self._monitor = self._client.monitor()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Monitor:
        self._monitor.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._client.client_kill_filter(_type="normal", skipme=True)
        self._thread.join()  # closed while it is read, a connection of redis-py fails in any way
        self._monitor.__exit__(*error)
        self._client.close()

    def _listen(self) -> None:
        with contextlib.suppress(redis.ConnectionError):
            for line in self._monitor.listen():
                if self._over.is_set():
                    return  # there may be much left, and each new connection is looked up
                source = "lua" if line["client_type"] == "lua" else line["client_port"]
                connects = line["command"].startswith("CLIENT SETNAME celery_redlock")
                locks = " redlock:" in line["command"] and source != "lua"
                if connects or (locks and source not in self._pids):
                    self._find(source)  # at once: later it may be dead
                self._seen.append((source, line["command"]))

    def _find(self, port: str) -> None:
        """Find the process of a connection; its port may have been another's, or one's elsewhere.

        Among our own descendants only: a look at all processes of the machine takes so long that
        whose it is may be dead meanwhile. Parents before their children, which have what was open
        when they were forked: a worker forks for `uname`, and in gevent's way, that takes a while.
        """
        self._pids.pop(port, None)
        local = f"0100007F:{int(port):04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{line[9]}]" for line in lines if line[1:3] == [local, self._node]}
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(OSError):
                for fd in os.listdir(f"/proc/{process.pid}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/{process.pid}/fd/{fd}") in inodes:
                            self._pids[port] = process.pid
                            return

    def _caught_up(self) -> None:
        marker = uuid.uuid4().hex
        self._client.echo(marker)
        wait_until(
            lambda: any(marker in words for _source, words in reversed(self._seen)),
            5.0,
            "the monitor has shown all",
        )

    def _about(self, resource: str) -> list[tuple[str, list[str]]]:
        """Return the requests about one resource, with the connection of each."""
        self._caught_up()
        lines = [(source, words.split(" ")) for source, words in self._seen]
        return [(source, words) for source, words in lines if f"redlock:{resource}" in words]

    def about(self, resource: str) -> list[tuple[str, int, list[str]]]:
        """Return the requests about one resource, with the connection and process of each."""
        return [(one, self._pids.get(one, GONE), words) for one, words in self._about(resource)]

    def taken(self, resource: str) -> int:
        """Return how often a lock on a resource was requested."""
        return sum(words[0].upper() == "SET" for _source, words in self._about(resource))

    def deleted(self, resource: str) -> int:
        """Return how often its key was deleted by its owner."""
        return sum(words[0].upper() == "DEL" for _source, words in self._about(resource))

    def extended_by(self, resource: str, task: str) -> set[int]:
        """Return the processes that requested an extension of a task's locks."""
        return {
            self._pids.get(source, GONE)
            for source, words in self._about(resource)
            if source != "lua"
            and any("PEXPIRE" in word for word in words)
            and any(task in word for word in words)
        }

    def freed_by(self, resource: str, task: str) -> int | None:
        """The process that freed the first lock of a task; None if it was its ttl.

        Where another was first on this node, its lock is on the others, and its release is seen.
        """
        token = asker = released = ""
        setters: dict[str, str] = {}
        for source, words in self._about(resource):
            if source != "lua":
                token = next((word for word in words if task in word), "")
                asker = source if token else ""
                if token and words[0].upper() == "SET":
                    setters.setdefault(token, source)
                elif asker and any("EVALSHA" in word or "PUBLISH" in word for word in words):
                    released = asker
            elif asker and words[0].upper() == "DEL":
                released = asker
            if released:
                owner = Owner.of(token)
                same = owner is not None and setters.get(token) == released
                return owner.pid if owner and same else self._pids.get(released, GONE)
        return None


class VerbMonitor(Monitor):
    """A monitor of a store whose requests begin with one word each."""

    def taken(self, resource: str) -> int:
        """Return how often a lock on a resource was requested."""
        return sum(words[0] == "acquire" for _port, words in self._about(resource))

    def extended_by(self, resource: str, task: str) -> set[int]:
        """Return the processes that requested an extension of a task's locks."""
        return {
            self._pids.get(port, GONE)
            for port, words in self._about(resource)
            if words[0] == "extend" and any(task in word for word in words)
        }

    def freed_by(self, resource: str, task: str) -> int | None:
        """The process that freed the first lock of a task; None if it was its ttl."""
        setters: dict[str, str] = {}
        for port, words in self._about(resource):
            token = next((word for word in words if task in word), "")
            if not token:
                continue
            if words[0] == "acquire":
                setters.setdefault(token, port)
            elif words[0] in ("release", "free") and token in setters:
                owner = Owner.of(token)
                same = owner is not None and setters[token] == port
                return owner.pid if owner and same else self._pids.get(port, GONE)
        return None
