"""All that can be done. Each act is a generator: it yields seconds to wait, then heals.

Whatever happens, `finally` heals. Every act is written down with its times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.campaign.worker.crew import Crew, Steps
from tests.campaign.worker.etcd_acts import EtcdNodeActs
from tests.campaign.worker.load_acts import LoadActs
from tests.campaign.worker.more_node_acts import MoreNodeActs, can_fake_time
from tests.campaign.worker.postgres_acts import PostgresNodeActs
from tests.campaign.worker.stage import TTL, Worker
from tests.campaign.worker.worker_acts import WorkerActs
from tests.support.network import REPLIES, REQUESTS


class LinkActs(Crew):
    """Faults of the network between a worker and its nodes."""

    def _links(self, worker: Worker, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return some of its links, by number; all if it has no more."""
        every = range(len(worker.links))
        return tuple(sorted(self.choose.sample(every, min(len(every), self.choose.choice(counts)))))

    def cut(self) -> Steps:
        """Cut one worker off from some nodes, both ways or one."""
        worker = self.choose.choice(self.stage.workers)
        numbers = self._links(worker, (1, 2, 2, 3, 4))
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
        numbers = self._links(worker, (1, 2, 3, 5))
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
        """Reset connections in the middle of a reply."""
        worker = self.choose.choice(self.stage.workers)
        numbers = self._links(worker, (1, 2, 3))
        with self.chronicle.fault("reset in a reply", worker, nodes=numbers):
            for number in numbers:
                worker.links[number].breaks = self.choose.choice((1, 2))
            yield 0.3

    def far(self) -> Steps:
        """Delay one worker's messages by 200 ms in sum: more than it waits."""
        worker = self.choose.choice(self.stage.workers)
        with self.chronicle.fault("200 ms away", worker, nodes=tuple(range(len(worker.links)))):
            try:
                for link in worker.links:
                    link.delay = 0.1
                yield self.choose.uniform(1.0, 2 * TTL)
            finally:
                for link in worker.links:
                    link.heal()


class Acts(MoreNodeActs, LinkActs, WorkerActs, LoadActs):
    """Faults of nodes, of workers, of the network between them, of the broker, and load."""

    TRACKS: Mapping[str, Mapping[str, int]] = {
        "nodes": {
            "pause_nodes": 4, "restart_with_memory": 2, "restart_empty": 2, "client_pause": 2,
            "client_kill": 2, "script_flush": 1, "flush": 1, "lose_majority": 0,
            "forget_one_of_three": 0, "swap": 0, "demote": 0, "step_clock": 1 * can_fake_time(),
            "no_room": 1, "no_clients": 1, "long_script": 1, "load": 1,
        },
        "network": {"cut": 4, "delay": 2, "reset": 2, "far": 1},
        "processes": {
            "kill_child": 4, "stop_child": 4, "terminate": 4, "kill_worker": 2, "stop_worker": 2,
            "warm": 1, "cold": 1, "kill_helper": 1,
        },
        "load": {
            "busy_slots": 4, "flood": 3, "stream": 2, "restart_busy": 2, "drop_broker": 3,
            "cut_broker": 1, "restart_broker": 1, "revoke_later": 2, "purge": 1,
            "kill_producers": 0,
        },
    }  # fmt: skip
    """Acts on each track, and how often each happens in proportion; 0: only if a phase names it."""

    def act(self, name: str) -> Steps:
        """Return the act of that name."""
        method: Callable[[], Steps] = getattr(self, name)
        return method()


class PostgresActs(PostgresNodeActs, LinkActs, WorkerActs, LoadActs):
    """The same, where the node is a PostgreSQL database."""

    TRACKS: Mapping[str, Mapping[str, int]] = {
        **Acts.TRACKS,
        "nodes": {
            "pause_server": 4, "kill_server": 3, "restart_server": 1, "crash_backend": 2,
            "stop_backend": 4, "end_backends": 3, "deafen": 1, "cancel_queries": 1, "lock_rows": 2,
            "lock_tables": 1, "read_only": 1, "no_clients": 1, "lose_majority": 0,
        },
    }  # fmt: skip

    act = Acts.act


class EtcdActs(EtcdNodeActs, LinkActs, WorkerActs, LoadActs):
    """The same, where the node is an etcd cluster."""

    TRACKS: Mapping[str, Mapping[str, int]] = {
        **Acts.TRACKS,
        "nodes": {
            "pause_member": 4, "kill_member": 4, "pause_server": 2, "kill_server": 2, "deafen": 1,
            "lose_majority": 0,
        },
    }  # fmt: skip

    act = Acts.act
