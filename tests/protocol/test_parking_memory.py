"""The bound on parked deliveries, and the fate of those beyond it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_redlock.messages.headers import ATTEMPTS, attempts_of
from celery_redlock.worker.parking.memory import REQUEST_BYTES, ParkingMemory, size_of
from tests.support.delivering import Received, _parking

WHEN: dict[str, Any] = {"since": 0.0, "until": 60.0, "again": True}


@pytest.fixture
def parking(app: Celery, charge: Any) -> Any:
    """Five parked deliveries, and memory for two; nothing of it is Celery's but two free slots."""
    parking = _parking(app)
    parking._memory = ParkingMemory(parking.admission, 2 * REQUEST_BYTES + 1)
    parking._slots = lambda: 2
    parking.sent = []
    parking._unpark = parking.sent.append
    for number in range(5):
        message = SimpleNamespace(id=number, request_dict={ATTEMPTS: {"parked": True, "held": 3}})
        arrived = parking.admission.arrive(message, ("r",), 0.0, **WHEN, size=REQUEST_BYTES)
        assert not arrived
    return parking


@pytest.mark.parametrize(
    ("body", "more"), [(b"x" * 1000, 3500), ("x" * 10, 35), ({"a": 1}, 0), (None, 0)]
)
def test_size_of_a_delivery_counts_its_body_and_what_celery_adds(body: Any, more: int) -> None:
    assert size_of(SimpleNamespace(message=SimpleNamespace(body=body))) == REQUEST_BYTES + more


def test_window_is_wider_only_by_deliveries_that_fit_into_memory(parking: Any) -> None:
    assert parking._memory.is_over
    assert parking._extra == 2
    parking.admission.take_back(2)
    assert not parking._memory.is_over
    assert parking._extra == 2
    parking.admission.take_back(1)
    assert parking._extra == 1


def test_deliveries_beyond_the_memory_go_last_first_as_many_as_have_slots(parking: Any) -> None:
    parking._prefetch.is_full = lambda over: over
    parking._leave_room()
    assert [one.request.id for one in parking.sent] == [4, 3]
    assert [attempts_of(one.request.request_dict)["parked"] for one in parking.sent] == [False] * 2
    assert len(parking.admission) == 3


def test_delivery_that_leaves_a_full_window_within_memory_comes_back_soon(parking: Any) -> None:
    """The window cannot be wider: another worker, or this one, has room in a moment."""
    parking._memory = ParkingMemory(parking.admission, 10 * REQUEST_BYTES)
    parking._prefetch.is_full = lambda over: not over
    parking._leave_room()
    (only,) = parking.sent
    assert attempts_of(only.request.request_dict)["parked"] is True


def test_arrival_beyond_the_memory_sends_none_away_but_the_sweep_does(
    parking: Any, charge: Any
) -> None:
    """Otherwise as many would go as arrive, fill the pool, and keep others from their slots."""
    parking._pauses, parking._to_pool = (), lambda _request: None
    parking._prefetch.is_full = lambda over: over
    parking(Received(charge, None))
    assert parking.sent == []


def test_memory_that_is_exceeded_is_logged_once_until_nothing_is_parked(
    parking: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        parking._memory.warn()
    parking.admission.take_back(1)
    parking._memory.warn()
    assert caplog.text.count("5 parked tasks take more memory than redlock_parking_memory") == 1
    parking.admission.take_back(0)
    parking._memory.warn()
    for number in range(3):
        parking.admission.arrive(
            SimpleNamespace(id=number), ("r",), 0.0, **WHEN, size=REQUEST_BYTES
        )
    parking._memory.warn()
    assert caplog.text.count("take more memory") == 2
