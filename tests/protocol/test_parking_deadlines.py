"""When a parked delivery with a `retry_deadline` goes to the pool to be refused for good."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.messages.headers import ATTEMPTS, RECEIPT, count_refusal
from celery_redlock.protocol.errors import ResourceHeld
from celery_redlock.protocol.values import Holder, Owner, token_digest
from celery_redlock.worker.parking.admission import Parked
from celery_redlock.worker.parking.deadlines import goes_now
from celery_redlock.worker.parking.watched import Watched

NOW = 1000.0
DEADLINE = 4.0


def parked(waited: float = 60.0, deadline: float | None = DEADLINE, **attempts: Any) -> Parked:
    """Return a delivery that was received so many seconds ago, and is overdue."""
    message = {
        ATTEMPTS: {"since": 5.0, **attempts},
        RECEIPT: {"at": time.monotonic() - waited, "content_type": "application/json"},
    }
    request = SimpleNamespace(request_dict=message)
    when = {"since": 5.0, "until": NOW, "latest": NOW + 100.0}
    return Parked(request, ("r",), 1, False, rank=(0.0, 5.0, 0), deadline=deadline, **when)


def watched(held_for: float, *tokens: str, looked: float = NOW, **attributes: Any) -> Watched:
    """Return what looks have found: these tokens, first so many seconds ago."""
    found: Any = SimpleNamespace(
        holders=frozenset(tokens),
        held_since=NOW - held_for,
        looked=looked,
        no_quorum=None,
        is_start=False,
    )
    vars(found).update(attributes)
    return found


def stuck(delivery: Parked, token: str) -> float:
    """Return for how long its message says that this holder was in its way, once refused."""
    holder = Holder("r", Owner("host", 1), 1, 1, None, token_digest(token))
    refusal = ResourceHeld("held", resource="r", votes=[], holder=holder)
    return float(count_refusal(delivery.request.request_dict, refusal)["stuck"])


@pytest.mark.parametrize(
    ("held_for", "goes"), [(3.9, False), (4.1, True)], ids=["new holder", "old holder"]
)
def test_a_delivery_goes_once_one_holder_has_been_seen_for_its_deadline(
    held_for: float, goes: bool
) -> None:
    delivery = parked()
    assert goes_now(delivery, watched(held_for, "t"), NOW) is goes
    assert delivery.until == pytest.approx(NOW if goes else NOW + 0.1)


def test_delivery_that_goes_needs_only_one_refusal() -> None:
    delivery = parked()
    assert goes_now(delivery, watched(5.0, "t"), NOW)
    assert stuck(delivery, "t") == pytest.approx(5.0, abs=0.1)
    assert stuck(delivery, "other") == 0.0, "the key changed hands meanwhile"


def test_time_before_the_delivery_was_received_does_not_count() -> None:
    assert not goes_now(parked(3.0), watched(50.0, "t"), NOW)


def test_an_earlier_refusal_by_the_same_holder_counts() -> None:
    delivery = parked(2.0, holder=token_digest("t"), stuck=3.0, held=1)
    assert goes_now(delivery, watched(0.5, "t"), NOW)
    assert stuck(delivery, "t") == pytest.approx(5.0, abs=0.1)
    assert not goes_now(parked(2.0, holder="another", stuck=3.0, held=1), watched(0.5, "t"), NOW)


def test_a_delivery_stays_until_a_look_has_confirmed_the_holder() -> None:
    assert not goes_now(parked(), watched(5.0, "t", looked=NOW - 2.0), NOW)
    assert goes_now(parked(), watched(5.0, "t", looked=NOW - 2.0, is_start=True), NOW)


def test_several_holders_of_a_limit_count_while_none_of_them_changes() -> None:
    delivery = parked()
    assert goes_now(delivery, watched(5.0, "t", "u"), NOW)
    assert "holder" not in delivery.request.request_dict[ATTEMPTS]


@pytest.mark.parametrize(
    ("delivery", "found"),
    [
        (parked(deadline=None), watched(0.0, "t")),
        (parked(), None),
        (parked(), watched(0.0, "t", no_quorum=NOW)),
    ],
    ids=["no deadline", "not watched", "no quorum"],
)
def test_a_delivery_goes_when_it_is_overdue_for_another_reason(
    delivery: Parked, found: Watched | None
) -> None:
    assert goes_now(delivery, found, NOW)


def test_a_delivery_is_not_put_off_beyond_what_its_broker_allows() -> None:
    delivery = parked()
    delivery.latest = NOW + 1.0
    assert not goes_now(delivery, watched(0.0, "t"), NOW)
    assert delivery.until == NOW + 1.0
    assert goes_now(delivery, watched(0.0, "t"), NOW + 1.0)
