"""Costs of locks to a node: commands, bytes, memory, connections, CPU; and a node under a load.

python -m benchmarks.capacity             # print the tables
python -m benchmarks.capacity --write     # and write them into docs/capacity.md
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from typing import Any

from benchmarks.capacity_node import BARE, LIMIT_S, Node, Size, summed
from benchmarks.environments import ROOT
from benchmarks.processes import in_a_process, until
from benchmarks.stats import table
from celery_redlock import Redlock
from celery_redlock.server import start_servers

PAGE = ROOT / "docs" / "capacity.md"
SHORT_TTL_S = 3.0
"""Ttl of the leases whose extensions are counted: they come each second."""
FULL = Size(5, 300, 3000, 2000, 100_000, 4, 30.0, 20.0)
QUICK = Size(3, 100, 600, 200, 4000, 2, 9.0, 4.0)

LOCKS: dict[str, dict[str, Any]] = {
    "lock and release": {},
    "with fencing": {"fencing": True},
    "with `limit=3`": {"limit": 3},
    "with two keys": {},
    "as a reader (`shared`)": {"shared": True},
}
EXTENSION = "an extension, each third of the ttl"


def _locks(node: Node, redlock: Redlock, name: str, count: int) -> dict[str, float]:
    before = node.info()
    for number in range(count):
        resource: str | list[str] = f"cost:{number}"
        if "two keys" in name:
            resource = [f"cost:{number}", f"more:{number}"]
        assert redlock.release(redlock.acquire(resource, **LOCKS[name]))
    return node.since(before, count)


def _extensions(node: Node, count: int) -> dict[str, float]:
    """Count the extensions by the leases that were renewed: each is one PEXPIRE."""

    redlock = Redlock([node.url], ttl=SHORT_TTL_S, node_timeout=3.0, restart_guard="off")
    with contextlib.closing(redlock), contextlib.ExitStack() as stack:
        for number in range(count):
            stack.enter_context(redlock.lock(f"extended:{number}"))
        before = node.info()
        until(lambda: node.since(before).get("pexpire", 0) >= 2 * count, LIMIT_S, "extensions", 0.3)
        did = node.since(before)
        return {name: done / did["pexpire"] for name, done in did.items()}


def memory(node: Node, size: Size) -> dict[str, float]:
    """Return the bytes that a lease, a fencing token, a reservation and a connection take."""
    redlock = Redlock([node.url], node_timeout=3.0, restart_guard="off")
    with contextlib.closing(redlock):
        redlock.connect()
        found = {}
        before = node.memory()
        for number in range(size.many):
            redlock.acquire(f"memory:{number}")
        found["lease"] = (node.memory() - before) / size.many
        before = node.memory()
        for number in range(size.many):
            redlock.release(redlock.acquire(f"fenced:{number}", fencing=True))
        found["fencing token, for a week"] = (node.memory() - before) / size.many
    node.client.flushall()
    before, count = node.memory(), max(10, size.many // 15)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            one = Redlock([node.url], node_timeout=3.0, restart_guard="off")
            stack.callback(one.close)
            one.connect(10.0)
        found["connection"] = (node.memory() - before) / count
    return found


@contextlib.contextmanager
def load(url: str, size: Size) -> Iterator[list[subprocess.Popen[str]]]:
    """Have processes hold the leases over all these connections to one node."""
    each, leases = size.connections // size.processes, size.leases // size.processes
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for number in range(size.processes):
            command = [sys.executable, "-m", "benchmarks.capacity_load", str(number)]
            command += [str(each), str(leases), str(size.ttl), url]
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("a process of the load has failed")
        yield processes


def under_load(node: Node, size: Size) -> dict[str, float]:
    """Return what a node does under the load, and what a lock takes there beside a bare pair."""
    probe = Redlock([node.url], node_timeout=3.0, restart_guard="off")
    before_all = node.info()
    with contextlib.closing(probe), load(node.url, size) as processes:
        probe.connect()
        before, start = node.info(), time.monotonic()
        pairs: list[tuple[float, float]] = []
        while time.monotonic() < start + size.window:
            pairs.append((_timed(lambda: probe.release(probe.acquire("probe"))), _timed(node.pair)))
            time.sleep(0.01)
        did = node.since(before, time.monotonic() - start)
        full = node.info()
        for process in processes:
            print("stop", file=process.stdin, flush=True)
        held = sum(int(process.stdout.readline()) for process in processes)  # type: ignore[union-attr]
    return {
        "connections": full["connected_clients"] - 2,  # the probe and we
        "leases": size.leases,
        "held at the end": held,
        "memory": full["used_memory"] - before_all["used_memory"],
        "extensions": did["pexpire"],
        "in": did["in"],
        "cpu": did["cpu"],
        "x bare": median(one for one, _ in pairs) / median(other for _, other in pairs),
    }


def _timed(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def measure(node_url: str, broker: str, size: Size, seed: int = 1) -> dict[str, Any]:
    """Measure all of it on one node that holds nothing else."""
    node, order = Node(node_url), Random(seed)
    redlock = Redlock([node_url], node_timeout=3.0, restart_guard="off")
    rounds = []
    with contextlib.closing(redlock):
        redlock.release(redlock.acquire("first"))
        for _ in range(size.rounds):
            figures = {BARE: node.pairs(size.operations)}
            for name in order.sample(list(LOCKS), len(LOCKS)):
                figures[name] = _locks(node, redlock, name, size.operations)
            figures[EXTENSION] = _extensions(node, size.operations)
            rounds.append({name: figures[name] for name in (BARE, *LOCKS, EXTENSION)})
    with tempfile.NamedTemporaryFile() as log:
        servers = {"BENCH_BROKER": broker, "BENCH_NODES": node_url, "BENCH_LOG": log.name}
        of_tasks = in_a_process("capacity_tasks", seed, size, **servers)
    node.client.flushall()
    taken = memory(node, size)
    taken.update(of_tasks["memory"])
    node.client.flushall()
    figures = {
        "locks": summed(rounds),
        "tasks": of_tasks["costs"],
        "worker": {"connections": of_tasks["connections"], **of_tasks["idle"]},
        "memory": taken,
        "load": under_load(node, size),
    }
    node.client.flushall()
    node.close()
    return figures


Table = tuple[list[str], list[list[str]]]
COLUMNS = ["commands", "requests", "bytes in", "bytes out", "CPU, x bare"]


def tables(figures: dict[str, Any]) -> list[Table]:
    """Return the tables as heads and rows."""
    of_tasks = {name: cost for name, cost in figures["tasks"].items() if name != BARE}
    costs = [
        [
            name,
            f"{cost['commands']:.1f}",
            f"{cost['requests']:.1f}",
            f"{cost['in']:.0f}",
            f"{cost['out']:.0f}",
            f"{cost['x bare']:.2f}",
        ]
        for name, cost in {**figures["locks"], **of_tasks}.items()
    ]
    sizes = [[name, f"{size:.0f}"] for name, size in figures["memory"].items()]
    f, idle = figures["load"], figures["worker"]
    bare = figures["locks"][BARE]["cpu"]
    loaded = [
        ["connections", f"{f['connections']:.0f}"],
        ["leases; still held at the end", f"{f['leases']:.0f}; {f['held at the end']:.0f}"],
        ["memory, MB", f"{f['memory'] / 1e6:.1f}"],
        ["extensions a second", f"{f['extensions']:.0f}"],
        ["bytes in a second, kB", f"{f['in'] / 1e3:.0f}"],
        ["CPU, as of so many bare pairs a second", f"{f['cpu'] / bare:.0f}"],
        ["one more lock and release, p50, x bare pair", f"{f['x bare']:.2f}"],
    ]
    workers = [
        ["connections", f"{idle['connections']:.0f}"],
        ["commands a second, idle", f"{idle['commands']:.1f}"],
        ["requests a second, idle", f"{idle['requests']:.1f}"],
        ["bytes in a second, idle", f"{idle['in']:.0f}"],
    ]
    return [
        (["what it costs each node", *COLUMNS], costs),
        (["memory on each node", "bytes"], sizes),
        (["a worker with two pool processes", ""], workers),
        (["one node under a load", ""], loaded),
    ]


def show(figures: dict[str, Any]) -> str:
    return "\n\n".join(table(head, rows) for head, rows in tables(figures))


def written(page: str, figures: dict[str, Any]) -> str:
    """Return the page with these figures in the places of its tables."""
    for head, rows in tables(figures):
        lines = ["|".join(["", *(f" {cell} " for cell in row), ""]) for row in (head, *rows)]
        lines.insert(1, "|---" + "|--:" * (len(head) - 1) + "|")
        place = re.compile(rf"^\| {re.escape(head[0])} \|.*\n(?:\|.*\n)+", re.M)
        page, found = place.subn(lambda _, new=lines: "\n".join(new) + "\n", page)
        if found != 1:
            raise RuntimeError(f"{PAGE.name} has {found} tables that begin with {head[0]!r}")
    return page


def on_servers(size: Size, seed: int = 1) -> dict[str, Any]:
    """Measure on a node and a broker of its own."""
    with start_servers(2) as (node, broker):
        return measure(node.url, broker.url, size, seed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity")
    parser.add_argument("--quick", action="store_true", help="a small load, rough figures")
    parser.add_argument("--seed", type=int, default=1, help="of the order within a round")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/capacity.md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    figures = on_servers(QUICK if arguments.quick else FULL, arguments.seed)
    print(show(figures))
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
