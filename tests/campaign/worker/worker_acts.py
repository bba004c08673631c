"""Faults of workers. Each act is a generator: it yields seconds to wait, then heals."""

from __future__ import annotations

import contextlib
import os
import signal

from tests.campaign.worker.crew import Crew, Steps
from tests.campaign.worker.feeder import RESOURCES
from tests.campaign.worker.stage import HELPED, TTL, Worker

BY_ITSELF = "worker ended by itself"


class WorkerActs(Crew):
    """Faults of workers. At least one worker stays up."""

    def _victim(self, *, prefork: bool = False, helped: bool = False) -> Worker | None:
        """A worker that is up, if another will still be."""
        up = [worker for worker in self.stage.workers if worker.ready]
        those = [worker for worker in up if worker.prefork or not prefork]
        those = [worker for worker in those if worker.name == HELPED or not helped]
        return self.choose.choice(those) if those and len(up) > 1 else None

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
        """revoke(terminate=True) a running task, often one that goes on for a while."""
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

    def kill_helper(self) -> Steps:
        """Kill the process that extends a worker's leases; the worker starts another."""
        worker = self._victim(helped=True)
        for pid in worker.children(helper=True) if worker else []:
            with self.chronicle.fault("helper kill -9", worker, pid=pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                yield 0.3

    def stop_worker(self) -> Steps:
        """Stop all processes of a worker, mostly of the one with most keys.

        The next holder must have the key when the worker wakes, and others must wait.
        """
        yield from self._busy(*self.choose.sample(RESOURCES, 4), seconds=2 * TTL)
        up = [worker for worker in self.stage.workers if worker.ready]
        if len(up) < 2:
            return
        running = self._running(prefork=False)
        held = {w: {line.resource for p, line in running if p.main == w.pid} for w in up}
        # A helper would go on extending: nothing would be lost.
        rank = {one: (one.name != HELPED, len(held[one]), self.choose.random()) for one in up}
        worker = max(up, key=lambda one: rank[one]) if self.choose.random() < 0.8 else up[-1]
        with self.chronicle.fault("worker stop", worker, pid=worker.pid):
            try:
                worker.stopped = True
                worker.signal_all(signal.SIGSTOP)
                for resource in sorted(held[worker]):
                    self.feeder.send(resource, 2 * TTL)
                yield 0.5 * TTL
                if self.choose.random() < 0.8:
                    yield 0.7 * TTL
                    yield from self._taken(held[worker], worker)
                self._contend(*sorted(held[worker]))
                yield 0.3
            finally:
                worker.signal_all(signal.SIGCONT)
                worker.stopped = False

    def _taken(self, resources: set[str], worker: Worker) -> Steps:
        """Wait a little until another worker's body runs there."""
        for _look in range(int(1.3 * TTL / 0.1)):
            running = self._running(prefork=False)
            if any(line.resource in resources and p.main != worker.pid for p, line in running):
                return
            yield 0.1

    def warm(self) -> Steps:
        yield from self._restart("worker restart, warm", signal.SIGTERM)

    def cold(self) -> Steps:
        yield from self._restart("worker restart, cold", signal.SIGQUIT)

    def _restart(self, kind: str, number: int) -> Steps:
        worker = self._victim()
        if worker is None or (number == signal.SIGQUIT and worker.name == "green"):
            return  # Celery fails at it there, and acknowledges what it has broken off
        pid = worker.pid
        with self.chronicle.fault(kind, worker, pid=pid):
            try:
                self._ended.add(worker)
                worker.signal(number)
                for _look in range(200):
                    if not worker.alive or worker.pid != pid:
                        break
                    yield 0.1
            finally:
                if not worker.alive or worker.pid == pid:  # else another act has started it again
                    self._again(worker)
            yield from self._up(worker)

    def _again(self, worker: Worker) -> None:
        worker.kill()
        worker.start()
        self._ended.discard(worker)

    def _up(self, worker: Worker) -> Steps:
        for _look in range(200):
            if worker.ready:
                return
            yield 0.1

    def revive(self) -> None:
        """Start workers again that have ended by themselves."""
        for worker in self.stage.workers:
            ending = not worker.alive or "Unrecoverable error" in worker.newest
            if ending and worker not in self._ended:
                with self.chronicle.fault(BY_ITSELF, worker, pid=worker.pid):
                    worker.kill()
                    worker.start()
