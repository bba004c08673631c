"""What is done to the stage. Each act is a generator: it yields seconds to wait, then heals.

Whatever happens, `finally` heals. Every act is written down with its times.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field

import redis

from celery_redlock.server import LocalServer
from tests.faults.feeder import RESOURCES, Feeder
from tests.faults.journal import Line, Process, now
from tests.faults.proxy import REPLIES, REQUESTS
from tests.faults.stage import TTL, Stage, Worker

Steps = Generator[float, None, None]
BY_ITSELF = "worker ended by itself"


@dataclass
class Fault:
    """One act.

    Attributes:
        kind: What was done.
        begin: When; seconds.
        end: When it was undone; None while it is not.
        worker: To which worker.
        pid: To which process of it.
        nodes: To which nodes, by number.
    """

    kind: str
    begin: float
    end: float | None = None
    worker: str = ""
    pid: int = 0
    nodes: tuple[int, ...] = ()

    def touches(self, begin: float, end: float) -> bool:
        return self.begin <= end and (self.end is None or self.end >= begin)


@dataclass
class Chronicle:
    """All that was done."""

    faults: list[Fault] = field(default_factory=list)

    @contextlib.contextmanager
    def fault(self, kind: str, worker: Worker | None = None, **more: object) -> Iterator[Fault]:
        """Write down a fault: from now to the end of the block."""
        name = worker.name if worker else ""
        fault = Fault(kind, now(), worker=name, **more)  # type: ignore[arg-type]
        self.faults.append(fault)
        try:
            yield fault
        finally:
            fault.end = now()

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for fault in self.faults:
            found[fault.kind] = found.get(fault.kind, 0) + 1
        return dict(sorted(found.items()))


class Acts:
    """What can be done.

    Args:
        stage: To what.
        feeder: Publishes what an act needs: bodies to strike, and tasks that wait for their locks.
        chronicle: Where it is written down.
        choose: All choices are made with it.
    """

    def __init__(
        self, stage: Stage, feeder: Feeder, chronicle: Chronicle, choose: random.Random
    ) -> None:
        self.stage = stage
        self.feeder = feeder
        self.chronicle = chronicle
        self.choose = choose
        self._ended: set[Worker] = set()
        self.guarded = False
        """Nodes that forgot have no vote for a while: they may come back at once."""

    def _numbers(self, nodes: list[LocalServer]) -> tuple[int, ...]:
        return tuple(sorted(self.stage.nodes.index(node) for node in nodes))

    def _some(self, count: int = 0) -> list[LocalServer]:
        return self.choose.sample(self.stage.nodes, count or self.choose.choice((1, 2)))

    def _command(self, node: LocalServer, *words: str | int) -> None:
        client = redis.Redis(port=node.port, socket_timeout=1.0)
        with contextlib.suppress(redis.RedisError):
            client.execute_command(*words)
        client.close()

    # -- nodes ---------------------------------------------------------------------------------

    def pause_nodes(self, count: int = 0, seconds: float = 0.0, kind: str = "node stop") -> Steps:
        """SIGSTOP."""
        nodes = self._some(count)
        self._contend(self.choose.choice(RESOURCES), many=3)
        with self.chronicle.fault(kind, nodes=self._numbers(nodes)):
            try:
                for node in nodes:
                    node.pause()
                yield seconds or self.choose.uniform(0.3, 1.5 * TTL)
            finally:
                for node in nodes:
                    node.resume()

    def restart_with_memory(self) -> Steps:
        """kill -9; back with all that was written."""
        node = self.choose.choice(self.stage.nodes[:2])
        with self.chronicle.fault("node kill, back with memory", nodes=self._numbers([node])):
            try:
                node.kill()
                yield self.choose.choice((0.0, self.choose.uniform(0.0, TTL)))
            finally:
                node.start()

    def restart_empty(self, count: int = 1) -> Steps:
        """kill -9; back empty: after more than a ttl, or at once where a guard is on."""
        nodes = self.choose.sample(self.stage.nodes[2:], count)
        at_once = self.guarded and self.choose.random() < 0.7
        kind = "node kill, back empty " + ("at once" if at_once else "after a ttl")
        with self.chronicle.fault(kind, nodes=self._numbers(nodes)):
            try:
                for node in nodes:
                    node.kill()
                yield 0.0 if at_once else 1.1 * TTL
            finally:
                for node in nodes:
                    node.start()
        yield 1.1 * TTL  # another that forgets meanwhile would be one too many

    def client_pause(self) -> Steps:
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("CLIENT PAUSE", nodes=self._numbers([node])):
            seconds = self.choose.uniform(0.1, TTL)
            self._command(node, "CLIENT", "PAUSE", int(seconds * 1000))
            yield seconds

    def client_kill(self) -> Steps:
        for node in self._some():
            with self.chronicle.fault("CLIENT KILL", nodes=self._numbers([node])):
                self._command(node, "CLIENT", "KILL", "TYPE", "normal")
        yield 0.0

    def script_flush(self) -> Steps:
        for node in self._some():
            with self.chronicle.fault("SCRIPT FLUSH", nodes=self._numbers([node])):
                self._command(node, "SCRIPT", "FLUSH")
        yield 0.0

    def flush(self) -> Steps:
        """FLUSHALL on one: breaks a premise, by itself harmless to who holds more than three."""
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("FLUSHALL", nodes=self._numbers([node])):
            self._command(node, "FLUSHALL")
        yield 1.1 * TTL

    def lose_majority(self) -> Steps:
        """For less than a ttl, or for more."""
        long = self.choose.random() < 0.5
        seconds = TTL * (self.choose.uniform(1.5, 2.3) if long else self.choose.uniform(0.2, 0.8))
        yield from self._busy(*self.choose.sample(RESOURCES, 3), seconds=seconds + TTL)
        kind = f"majority stop, {'more' if long else 'less'} than a ttl"
        yield from self.pause_nodes(self.choose.choice((3, 4)), seconds, kind)

    def forget_one_of_three(self) -> Steps:
        """Two nodes are long dead; when they come back, empty, a third restarts, empty, at once.

        Who was granted a lock meanwhile has three votes, and now two. Needs a guard.
        """
        nodes = self.choose.sample(self.stage.nodes[2:], 3)
        wanted = self.choose.sample(RESOURCES, 4)
        with self.chronicle.fault("three of five forget, at once", nodes=self._numbers(nodes)):
            try:
                for node in nodes[:2]:
                    node.kill()
                yield 0.5 * TTL
                yield from self._busy(*wanted, seconds=2.5 * TTL)
                yield 0.6 * TTL
                self._contend(*wanted, many=3)
            finally:
                nodes[2].kill()
                for node in nodes:
                    node.start()
        yield 1.2 * TTL

    # -- the network ---------------------------------------------------------------------------

    def cut(self) -> Steps:
        """Between one worker and some nodes; both ways, or one."""
        worker = self.choose.choice(self.stage.workers)
        numbers = tuple(sorted(self.choose.sample(range(5), self.choose.choice((1, 2, 2, 3, 4)))))
        ways, name = self.choose.choice(
            (({REQUESTS, REPLIES}, "cut"), ({REQUESTS}, "cut there"), ({REPLIES}, "cut back"))
        )
        with self.chronicle.fault(name, worker, nodes=numbers):
            try:
                for number in numbers:
                    worker.links[number].held = set(ways)
                yield self.choose.uniform(0.2, 1.8 * TTL)
            finally:
                for number in numbers:
                    worker.links[number].heal()

    def delay(self) -> Steps:
        worker = self.choose.choice(self.stage.workers)
        numbers = tuple(sorted(self.choose.sample(range(5), self.choose.choice((1, 2, 3, 5)))))
        with self.chronicle.fault("delay and jitter", worker, nodes=numbers):
            try:
                for number in numbers:
                    worker.links[number].delay = self.choose.uniform(0.0, 0.05)
                    worker.links[number].jitter = self.choose.uniform(0.0, 0.25)
                yield self.choose.uniform(0.5, 2 * TTL)
            finally:
                for number in numbers:
                    worker.links[number].heal()

    def reset(self) -> Steps:
        """In the middle of a reply."""
        worker = self.choose.choice(self.stage.workers)
        numbers = tuple(sorted(self.choose.sample(range(5), self.choose.choice((1, 2, 3)))))
        with self.chronicle.fault("reset in a reply", worker, nodes=numbers):
            for number in numbers:
                worker.links[number].breaks = self.choose.choice((1, 2))
            yield 0.3

    # -- workers -------------------------------------------------------------------------------

    def _victim(self, *, prefork: bool = False) -> Worker | None:
        """A worker that is up, if another will still be."""
        up = [worker for worker in self.stage.workers if worker.ready]
        those = [worker for worker in up if worker.prefork or not prefork]
        return self.choose.choice(those) if those and len(up) > 1 else None

    def _contend(self, *resources: str, many: int = 2) -> None:
        """Somebody waits for these."""
        for resource in resources:
            for _one in range(many):
                self.feeder.send(resource, 0.05, task=self.choose.choice(("early", "late")))

    def _busy(
        self, *resources: str, seconds: float, manner: str = "sleep"
    ) -> Generator[float, None, list[tuple[Process, Line]]]:
        """Bodies run there; wait a little until they do, and tell which of them do."""
        ids = {self.feeder.send(resource, seconds, manner).id for resource in resources}
        found: list[tuple[Process, Line]] = []
        for _look in range(15):
            yield 0.1
            found = [one for one in self._running(prefork=False) if one[1].task in ids]
            if len(found) == len(ids):
                break
        return found

    def _running(self, *, prefork: bool) -> list[tuple[Process, Line]]:
        """Which bodies run now: their process, and the last they wrote."""
        found = []
        up = {worker.pid: worker for worker in self.stage.workers if worker.ready}
        for process, lines in self.stage.journal.read().items():
            worker = up.get(process.main)
            if worker is None or (prefork and not worker.prefork) or not lines:
                continue
            last = lines[-1]
            if last.kind in ("enter", "alive") and now() - last.at < 0.3 and process.alive():
                found.append((process, last))
        return found

    def _child(self) -> tuple[Worker, int] | None:
        """A pool child, most often one that runs a body."""
        running = self._running(prefork=True)
        if running and self.choose.random() < 0.8:
            process, line = self.choose.choice(running)
            self._contend(line.resource)
            worker = next(w for w in self.stage.workers if w.alive and w.pid == process.main)
            return worker, process.pid
        worker_or_none = self._victim(prefork=True)
        children = worker_or_none.children() if worker_or_none else []
        return (worker_or_none, self.choose.choice(children)) if children else None  # type: ignore[return-value]

    def kill_child(self) -> Steps:
        child = self._child()
        if child is not None:
            with self.chronicle.fault("child kill -9", child[0], pid=child[1]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child[1], signal.SIGKILL)
                yield 0.0

    def stop_child(self) -> Steps:
        """SIGSTOP, for less than a ttl or more; sometimes it is killed and never wakes."""
        child = self._child()
        if child is None:
            return
        worker, pid = child
        last = signal.SIGKILL if self.choose.random() < 0.15 else signal.SIGCONT
        with self.chronicle.fault("child stop", worker, pid=pid):
            try:
                os.kill(pid, signal.SIGSTOP)
                yield self.choose.uniform(0.3, 2.5 * TTL)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, last)

    def terminate(self) -> Steps:
        """revoke(terminate=True) of a task that runs; often one that goes on for a while."""
        running = self._running(prefork=True)
        if self.choose.random() < 0.6:
            resource = self.choose.choice(RESOURCES)
            stubborn = yield from self._busy(resource, seconds=2.0, manner="stubborn")
            running = stubborn or running
        if running:
            process, line = self.choose.choice(running)
            self._contend(line.resource)
            name = self.choose.choices(("SIGTERM", "SIGKILL"), (3, 1))[0]
            with self.chronicle.fault(f"revoke, {name}", pid=process.pid) as fault:
                fault.worker = process.worker
                with contextlib.suppress(Exception):  # the broker may be away
                    self.stage.app.control.revoke(line.task, terminate=True, signal=name)
                yield 0.5

    def kill_worker(self) -> Steps:
        """kill -9 of the main process; its children die with it."""
        worker = self._victim()
        if worker is not None:
            with self.chronicle.fault("worker kill -9", worker, pid=worker.pid):
                try:
                    self._ended.add(worker)
                    worker.signal(signal.SIGKILL)
                    yield self.choose.uniform(0.1, 1.0)
                finally:
                    self._again(worker)
                yield from self._up(worker)

    def stop_worker(self) -> Steps:
        """SIGSTOP of all its processes; of that which has most to lose.

        Whoever takes what it held shall hold it when it wakes, and others shall wait.
        """
        yield from self._busy(*self.choose.sample(RESOURCES, 4), seconds=2 * TTL)
        up = [worker for worker in self.stage.workers if worker.ready]
        if len(up) < 2:
            return
        running = self._running(prefork=False)
        held = {w: {line.resource for p, line in running if p.main == w.pid} for w in up}
        worker = max(up, key=lambda one: (len(held[one]), self.choose.random()))
        with self.chronicle.fault("worker stop", worker, pid=worker.pid):
            try:
                worker.stopped = True
                worker.signal_all(signal.SIGSTOP)
                for resource in sorted(held[worker]):
                    self.feeder.send(resource, 2 * TTL)
                yield TTL * self.choose.choice((0.5, 1.2, self.choose.uniform(1.1, 1.9)))
                self._contend(*sorted(held[worker]))
                yield 0.3
            finally:
                worker.signal_all(signal.SIGCONT)
                worker.stopped = False

    def warm(self) -> Steps:
        yield from self._restart("worker restart, warm", signal.SIGTERM)

    def cold(self) -> Steps:
        yield from self._restart("worker restart, cold", signal.SIGQUIT)

    def _restart(self, kind: str, number: int) -> Steps:
        worker = self._victim()
        if worker is None:
            return
        with self.chronicle.fault(kind, worker, pid=worker.pid):
            try:
                self._ended.add(worker)
                worker.signal(number)
                for _look in range(200):
                    if not worker.alive:
                        break
                    yield 0.1
            finally:
                self._again(worker)
            yield from self._up(worker)

    def _again(self, worker: Worker) -> None:
        worker.end()
        worker.start()
        self._ended.discard(worker)

    def _up(self, worker: Worker) -> Steps:
        for _look in range(200):
            if worker.ready:
                return
            yield 0.1

    def revive(self) -> None:
        """Start again a worker that has ended and whose end nobody wanted."""
        for worker in self.stage.workers:
            if not worker.alive and worker not in self._ended:
                with self.chronicle.fault(BY_ITSELF, worker, pid=worker.pid):
                    worker.end()
                    worker.start()

    def restart_broker(self) -> Steps:
        with self.chronicle.fault("broker restart"):
            try:
                self.stage.broker.kill()
                yield self.choose.uniform(0.0, 1.0)
            finally:
                self.stage.broker.start()
            yield 0.5

    TRACKS: Mapping[str, Mapping[str, int]] = {
        "nodes": {
            "pause_nodes": 4, "restart_with_memory": 2, "restart_empty": 2, "client_pause": 2,
            "client_kill": 2, "script_flush": 1, "flush": 1, "lose_majority": 0,
            "forget_one_of_three": 0,
        },
        "network": {"cut": 4, "delay": 2, "reset": 2},
        "processes": {
            "kill_child": 4, "stop_child": 4, "terminate": 4, "kill_worker": 2, "stop_worker": 2,
            "warm": 1, "cold": 1, "restart_broker": 1,
        },
    }  # fmt: skip
    """What can happen on each track, and how often in proportion; 0: where a phase names it."""

    def act(self, name: str) -> Steps:
        """One of them, by name."""
        method: Callable[[], Steps] = getattr(self, name)
        return method()
