"""What PostgreSQL is asked over a connection that has just broken is asked over the next one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial

from celery_redlock import Redlock
from celery_redlock.protocol import quorum
from celery_redlock.protocol.values import Query
from tests.support import postgres


def test_a_connection_that_breaks_as_requests_are_written_to_it_is_a_silent_node_and_no_error(
    lock_over: Callable[..., Redlock],
) -> None:
    with postgres.start_postgres() as server:
        redlock = lock_over([server.url])
        redlock.connect()
        (node,) = redlock.client.driver.nodes
        with socket.socket(fileno=os.dup(node.fileno())) as stream:
            stream.shutdown(socket.SHUT_RDWR)
        # The second is written behind a first that could not be.
        peek = partial(quorum.peek, [Query(("r",), 1)], patience=0.2)
        assert [round_.silent for round_ in redlock.client.driver.run_all([peek] * 3)] == [1] * 3
        lease = redlock.acquire("r", wait=5.0)
        assert redlock.release(lease)
