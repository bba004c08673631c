"""A process with many connections to one node, which extends many leases there.

`capacity.py` runs `python -m benchmarks.capacity_load NUMBER CONNECTIONS LEASES TTL URL`. It
prints a line once all leases are held over all connections. Then it uses the connections in turn,
until a line comes on standard input; it answers with the number of leases that it still holds.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import signal
import sys

from celery_redlock import Redlock

PAUSE_S = 0.02
"""Between two locks of a process: its connections are used, and the load stays that of leases."""


def main() -> None:
    number, connections, leases, ttl, url = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    redlocks = [
        Redlock([url], ttl=float(ttl), node_timeout=3.0, restart_guard="off")
        for _ in range(int(connections))
    ]
    keeper, others = redlocks[0], redlocks[1:] or redlocks
    with contextlib.ExitStack() as stack:
        for one in redlocks:
            one.connect(10.0)
            stack.callback(one.close)
        held = [
            stack.enter_context(keeper.lock(f"load:{number}:{lease}", wait=10.0))
            for lease in range(int(leases))
        ]
        print("ready", flush=True)
        for turn, one in enumerate(itertools.cycle(others)):
            if select.select([sys.stdin], [], [], PAUSE_S)[0]:
                break
            with one.lock(f"turn:{number}:{turn}", wait=10.0):
                pass
        lost = sum(lease.lost or lease.remaining() <= 0 for lease in held)
        print(len(held) - lost, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
