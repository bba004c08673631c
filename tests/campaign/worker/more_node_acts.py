"""More faults of nodes: other servers in their place, roles, clocks, limits. Generators again."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

from celery_redlock.server import LocalServer, find_server
from tests.campaign.worker.chronicle import DEMOTED, SWAPPED
from tests.campaign.worker.crew import Steps
from tests.campaign.worker.feeder import RESOURCES
from tests.campaign.worker.node_acts import NodeActs
from tests.campaign.worker.stage import TTL
from tests.support.wait import wait_until

FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


class MoreNodeActs(NodeActs):
    """Further faults of nodes, one at a time, on the track of the others."""

    def swap(self) -> Steps:
        """Put other servers behind the addresses of three nodes, and later the first ones again.

        The spares are new, empty, and up for longer than a ttl: a client that checks only the
        uptime would trust them. Three of five that know nothing are a quorum.
        """
        numbers = (2, 3, 4)  # the others claim that they never forget
        wanted = self.choose.sample(RESOURCES, 4)
        with contextlib.ExitStack() as stack:
            spares = {number: stack.enter_context(LocalServer()) for number in numbers}
            yield 1.6 * TTL
            yield from self._busy(*wanted, seconds=2.5 * TTL)
            with self.chronicle.fault(SWAPPED, nodes=numbers):
                try:
                    self._behind({number: spares[number] for number in numbers})
                    self._contend(*wanted, many=3)
                    yield 1.2 * TTL
                    yield from self._busy(*wanted, seconds=2.0 * TTL)
                finally:
                    self._behind({number: self.stage.nodes[number] for number in numbers})
                    self._contend(*wanted, many=3)
            yield 1.2 * TTL

    def _behind(self, servers: dict[int, LocalServer]) -> None:
        """Lead new connections to these nodes to those servers."""
        for number, server in servers.items():
            self.stage.standing[number] = server
            for worker in self.stage.workers:
                worker.links[number].target = server.port
                worker.links[number].drops = True

    def demote(self) -> Steps:
        """Make three nodes replicas of an empty server, and masters again; no client is dropped."""
        numbers = (2, 3, 4)
        nodes = [self.stage.nodes[number] for number in numbers]
        wanted = self.choose.sample(RESOURCES, 4)
        yield from self._busy(*wanted, seconds=2.0 * TTL)
        with (
            LocalServer(config=("--repl-diskless-sync-delay", "0")) as master,
            self.chronicle.fault(DEMOTED, nodes=numbers),
        ):
            try:
                for node in nodes:
                    self._command(node, "REPLICAOF", "127.0.0.1", master.port)
                for _look in range(15):
                    yield 0.1
                    if all(self._synced(node) for node in nodes):
                        break
            finally:
                for node in nodes:
                    self._command(node, "REPLICAOF", "NO", "ONE")
            self._contend(*wanted, many=3)
        yield 1.2 * TTL

    def _synced(self, node: LocalServer) -> bool:
        client = redis.Redis(port=node.port, socket_timeout=1.0)
        with contextlib.suppress(redis.RedisError), contextlib.closing(client):
            return bool(client.info("replication").get("master_link_status") == "up")
        return False

    def step_clock(self) -> Steps:
        """Step the clock of a node: ahead, so that it forgets all; or back, so that it keeps."""
        seconds = self.choose.choice((-3600, -2.5 * TTL, 2.5 * TTL, 3600))
        number = self.choose.randrange(2, 5)
        with _server_with_a_clock() as (server, step):
            self._behind({number: server})
            yield 1.2 * TTL
            self._contend(self.choose.choice(RESOURCES), many=3)
            with self.chronicle.fault("clock stepped", nodes=(number,)):
                step(seconds)
                yield TTL
                self._behind({number: self.stage.nodes[number]})
        yield 1.2 * TTL

    def no_room(self) -> Steps:
        """-OOM: let a node have no memory for anything more."""
        yield from self._configured("no memory", "maxmemory", "1", "0")

    def no_clients(self) -> Steps:
        """Let a node refuse all clients, and disconnect those that it has."""
        for node in self._some():
            client = redis.Redis(port=node.port, socket_timeout=2.0, single_connection_client=True)
            with self.chronicle.fault("maxclients", nodes=self._numbers([node])):
                try:
                    with contextlib.suppress(redis.RedisError):
                        client.config_set("maxclients", 1)
                        client.execute_command("CLIENT", "KILL", "TYPE", "normal")
                    yield self.choose.uniform(0.3, TTL)
                finally:
                    with contextlib.suppress(redis.RedisError):
                        client.config_set("maxclients", 10_000)
                    client.close()

    def _configured(self, kind: str, name: str, value: str, normal: str) -> Steps:
        nodes = self._some()
        with self.chronicle.fault(kind, nodes=self._numbers(nodes)):
            try:
                for node in nodes:
                    self._command(node, "CONFIG", "SET", name, value)
                yield self.choose.uniform(0.3, TTL)
            finally:
                for node in nodes:
                    self._command(node, "CONFIG", "SET", name, normal)

    def long_script(self) -> Steps:
        """-BUSY: run a long script of another client."""
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("long script", nodes=self._numbers([node])):
            self._command(node, "CONFIG", "SET", "busy-reply-threshold", "20")
            seconds = self.choose.uniform(0.3, TTL)
            script = threading.Thread(target=self._command, args=(node, "EVAL", ENDLESS, "0"))
            script.start()
            try:
                yield seconds
            finally:
                # The node may let nobody in just now; and a script goes on without its client.
                wait_until(lambda: self._kill_script(node), 30.0, "the script is killed")
                script.join()

    def _kill_script(self, node: LocalServer) -> bool:
        """Kill the script that runs on a node; return whether none does."""
        with (
            contextlib.suppress(redis.RedisError),
            redis.Redis(port=node.port, socket_timeout=1.0) as client,
        ):
            try:
                client.script_kill()
            except redis.ResponseError as error:
                return str(error).startswith("NOTBUSY")
        return False

    def load(self) -> Steps:
        """-LOADING: let a node read all its data again, slowly."""
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("loading", nodes=self._numbers([node])):
            fill = "for i = 1, 400 do redis.call('SET', 'junk:' .. i, i, 'EX', 60) end"
            self._command(node, "EVAL", fill, "0")
            self._command(node, "CONFIG", "SET", "key-load-delay", 3000)
            self._command(node, "CONFIG", "SET", "loading-process-events-interval-bytes", 1024)
            reload = threading.Thread(target=self._command, args=(node, "DEBUG", "RELOAD"))
            reload.start()
            try:
                yield 1.0
            finally:
                self._command(node, "CONFIG", "SET", "key-load-delay", 0)
                reload.join()


ENDLESS = "while true do end"


@functools.cache
def can_fake_time() -> bool:
    """Return True if there is a libfaketime with which this machine's server can be started."""
    return os.path.exists(FAKETIME)


@contextlib.contextmanager
def _server_with_a_clock() -> Iterator[tuple[LocalServer, Callable[[float], None]]]:
    """Yield a server and a function that makes its clock jump."""
    directory = Path(tempfile.mkdtemp(prefix="redlock-clock-"))
    try:
        offset = directory / "offset"
        offset.write_text("+0\n")
        binary = directory / "server"
        binary.write_text(
            "#!/bin/sh\n"
            f"export LD_PRELOAD={FAKETIME} FAKETIME_TIMESTAMP_FILE={offset}\n"
            "export FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1\n"
            f'exec {find_server()} "$@"\n'
        )
        binary.chmod(binary.stat().st_mode | stat.S_IXUSR)

        def step(seconds: float) -> None:
            new = directory / "new"
            new.write_text(f"{seconds:+f}\n")
            new.replace(offset)

        with LocalServer(binary=str(binary)) as server:
            yield server, step
    finally:
        shutil.rmtree(directory, ignore_errors=True)
