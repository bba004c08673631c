"""Parked deliveries as workers report them, and how they are combined with the nodes' queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.stores.reading import FOREIGN, KeyValue
from celery_redlock.survey.models import Entry, NodeLook, Survey
from celery_redlock.survey.snapshot import _read
from celery_redlock.survey.waiting import Parked, count_parked, waited_for
from celery_redlock.web.workers import _answer as page_answer
from celery_redlock.worker.parking.admission import AdmissionQueue
from celery_redlock.worker.parking.consumer import Parking
from celery_redlock.worker.remote_control import _waits


def request(task_id: str, **headers: Any) -> Any:
    attempts = {ATTEMPTS: {"since": 5.0, **headers}}
    return SimpleNamespace(
        id=task_id, name="shop.charge", request_dict=attempts, time_start=None, args=(), kwargs={}
    )


def test_parked_task_that_was_sent_to_a_full_pool_still_waits() -> None:
    """From the moment it is parked until a process of the pool begins with it."""
    parking = object.__new__(Parking)
    parking.admission = admission = AdmissionQueue()
    consumer = SimpleNamespace(on_task_request=parking)

    def waiting() -> dict[str, str]:
        return {wait["task_id"]: wait["where"] for wait in _waits(consumer, [])}

    first, second, third = request("first"), *(request(n, parked=True) for n in ("second", "third"))
    for number, one in enumerate((first, second, third)):
        admission.arrive(one, ("order:1",), 0.0, since=5.0 + number, until=99.0)
    both = {"second": "parked", "third": "parked"}
    assert waiting() == both  # the first never waited
    admission.ended(first, ("order:1",))
    taken = admission.take(("order:1",), 1.0, free=True)
    assert taken is not None and taken.request is second
    assert waiting() == both
    second.time_start = 7.0  # a process has begun with it
    assert waiting() == {"third": "parked"}


def entry(kind: str, waiting: int, *waits: float) -> Entry:
    held_for = waits[0] if kind == "line" and waits else None
    return Entry(
        *("order:1", "redlock:order:1", kind, 1, None, "", (9.0,) * 3, 3, 3, 2),
        waiting=waiting,
        waits=waits,
        held_for=held_for,
    )


def counted(*entries: Entry, parked: Parked, prefix: str | None = None) -> list[Entry]:
    looks = tuple(NodeLook(name, True) for name in "abc")
    return list(count_parked(Survey(entries, looks, 1.0), parked, prefix=prefix).entries)


def test_worker_in_the_wait_queue_counts_as_its_parked_tasks() -> None:
    waits = [{"resource": "order:1", "waited": 30.0 + n, "where": "parked"} for n in range(4)]
    slot = {"resource": "order:1", "waited": 99.0, "where": "slot"}
    in_line = {"waits": waits[:3], "queued": ["order:1", "order:1", 7]}
    full = {"waits": [*waits[3:], slot], "queued": []}
    parked = Parked.of([in_line, full])
    lock, line = counted(entry("lock", 3, 8.0), entry("line", 3, 8.0), parked=parked)
    # Of the three in line one is a worker; those in a slot stand in line themselves.
    assert (lock.waiting, lock.waits, lock.held_for) == (6, (33.0,), None)
    assert (line.waiting, line.waits, line.held_for) == (6, (33.0,), 33.0)
    assert counted(entry("reservation", 0), parked=parked)[0].waiting == 0


def test_queue_without_waiters_on_the_nodes_is_listed_for_parked_tasks() -> None:
    parked = Parked.of([{"waits": [{"resource": "order:2", "waited": 3.0, "where": "parked"}]}])
    lock = entry("lock", 0)
    assert counted(lock, parked=parked) == [lock]
    _lock, line = counted(lock, parked=parked, prefix="redlock:")
    assert (line.resource, line.kind, line.waiting, line.held_for) == ("order:2", "line", 1, 3.0)
    assert line.key == "redlock:order:2#line" and not line.held
    line.data()


def test_task_that_waits_for_several_keys_counts_at_each() -> None:
    """On the page as well, which reads the workers' answers by itself."""
    both = ["order:1", "order:2"]
    wait = {"resource": " + ".join(both), "resources": both, "waited": 3.0, "where": "parked"}
    for told in ({"waits": [wait]}, page_answer("w", {"waits": [wait], "holds": []})):
        assert [*waited_for(told["waits"][0])] == both
        parked = Parked.of([told])
        assert counted(entry("lock", 0), parked=parked)[0].waiting == 1
        assert set(parked.waited) == set(both)
    old = page_answer("w", {"waits": [{**wait, "resources": None}], "holds": []})
    assert [*waited_for(old["waits"][0])] == ["order:1 + order:2"]


def test_queue_that_empties_while_it_is_read_is_no_foreign_key() -> None:
    """The queue exists when its value is requested, which is none, and not when its members are."""
    reader: Any = SimpleNamespace(
        values=lambda keys: dict.fromkeys(keys, KeyValue(FOREIGN, 9.0)),
        queues=lambda _keys, _members: {},
        by_script=False,
    )
    assert _read(reader, {"order:1#line": b"redlock:order:1#line"}, 1) == {}
