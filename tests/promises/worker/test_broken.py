"""Faults that once broke the lock from within: replaced tasks, annotations, solo workers."""

from __future__ import annotations

from typing import Any

from celery_redlock.locking.redlock import Redlock
from celery_redlock.locking.stack import release_leftovers
from celery_redlock.messages.delivery import Delivery
from celery_redlock.protocol.values import Owner
from celery_redlock.server import start_servers


def test_replaced_task_waits_for_its_predecessor() -> None:
    class Request(dict[str, Any]):
        id = "one"
        retries = 0
        parent_id = None

    def predecessor(request: Request, task_id: str) -> bool:
        delivery = Delivery.__new__(Delivery)
        delivery._request = request
        return delivery._predecessor(Owner("host", 1, task_id))

    assert predecessor(Request(replaced_task_nesting=1), "one")
    assert not predecessor(Request(replaced_task_nesting=1), "other")
    assert not predecessor(Request(replaced_task_nesting=0), "one")  # another delivery of it


def test_end_of_a_delivery_leaves_the_programs_own_lock_alone() -> None:
    with start_servers(1) as (server,):
        redlock = Redlock([server.url])
        stamped = redlock.lock("left", owner=Owner("host", 1, "task", stamp="stamp"))
        stamped.acquire()
        with redlock.lock("own") as own:
            release_leftovers()
            assert not own.lost
            assert stamped.lost
        redlock.close()
