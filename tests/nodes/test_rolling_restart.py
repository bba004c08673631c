"""Three nodes that are restarted one after the other, under programs that lock now and then."""

from __future__ import annotations

import contextlib
import itertools
import time

from celery_redlock import Redlock
from celery_redlock.protocol.lease import drift
from celery_redlock.server import start_servers
from tests.support.names import Log

TTL = 1.0
SPAN = TTL + drift(TTL)
WHOLE_SECONDS_S = 2.0
"""By how much more a node's age may be than its uptime says, as the guard reads it."""
EVERY_S = SPAN + WHOLE_SECONDS_S + 0.5
RESTARTS = 6


def test_restarts_one_after_the_other_cost_each_node_its_vote_for_a_ttl(caplog: Log) -> None:
    """For a program that has long been idle, and for one that starts in between."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(start_servers(3))
        started = [time.monotonic()] * len(servers)
        waited = set()

        def program() -> Redlock:
            made = Redlock([server.url for server in servers], ttl=TTL, restart_guard="auto")
            return stack.enter_context(contextlib.closing(made))

        # Each has a pause of its own, and so meets a restart at a time of its own.
        programs = [program() for _ in range(15)]
        due = [time.monotonic() + SPAN + WHOLE_SECONDS_S] * len(programs)
        pauses = [0.2 + 0.55 * number for number in range(len(programs))]
        begun = max(due) + 0.5
        for restart in itertools.count():
            while (begin := time.monotonic()) < begun + restart * EVERY_S:
                number = min(range(len(due)), key=due.__getitem__)
                if due[number] > begin:
                    time.sleep(min(due[number], begun + restart * EVERY_S) - begin)
                    continue
                redlock = programs[number]
                redlock.release(redlock.acquire(f"r{number}", wait=10.0))
                now = time.monotonic()
                due[number] = now + pauses[number]
                for node, since in zip(redlock.client.driver.nodes, started, strict=True):
                    doubt = node._trust.doubt(begin)
                    # Of a node that was met while the machine stalled the age is known that badly.
                    late = SPAN + WHOLE_SECONDS_S + now - begin
                    assert not doubt or begin < since + late, f"after {pauses[number]} s: {doubt}"
                    waited |= {since} if doubt else set()
            if restart == RESTARTS:
                break
            servers[restart % 3].restart()
            started[restart % 3] = time.monotonic()
            programs.append(program())
            due.append(time.monotonic() + 0.7)
            pauses.append(3.0)
    assert len(waited) >= RESTARTS, "each of them took a vote, for a while"
    assert "is another server" not in caplog.text
