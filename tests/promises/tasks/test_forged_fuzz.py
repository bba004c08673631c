"""Headers of any kind: the worker goes on, and the body is locked as it is declared."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.utils.collections import LimitedSet
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_redlock import ResourceHeld, Skipped
from celery_redlock.config.checks import DUPLICATE_POLICIES, MIN_TTL, SCOPES
from celery_redlock.messages.broker import may_be_dropped, queue_of, without_delays
from celery_redlock.messages.endings import over, received, refused
from celery_redlock.messages.headers import (
    ATTEMPTS,
    MAX_ATTEMPTS,
    RECEIPT,
    RESERVATION,
    attempts_of,
    count_refusal,
    is_redelivered,
    mark_copy,
    receive,
    serializer_of,
    short_id,
    waited,
)
from celery_redlock.messages.received import _HeldMessage, _look
from celery_redlock.messages.reservation import HOUR, Reservation, claim_of, free
from celery_redlock.messages.results import end_of
from celery_redlock.protocol import quorum
from celery_redlock.protocol.values import Owner
from celery_redlock.stores.redis.requests import encode
from tests.support.delivering import RESERVED, Box, Ran, Received, _parking, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch

CASES = settings(
    max_examples=int(os.environ.get("KEY_CASES", 40)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def nested(depth: int) -> Any:
    inner: Any = []
    for _ in range(depth):
        inner = [inner]
    return inner


numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), math.inf])
texts = st.text(alphabet=st.characters(), max_size=9) | st.sampled_from(["", "\ud800", "x" * 2000])
scalars = st.none() | st.booleans() | numbers | texts
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
) | st.sampled_from([nested(100), {"a": nested(100)}])
tokens = st.sampled_from(
    [Owner("there", 7, "the-id").token("0" * 32), "||²||0||0|", "|h|1|i|0||٣|"]
)


def some(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values that resemble the header: each field valid, invalid or missing."""
    fields = {name: values | junk for name, values in known.items()}
    return st.fixed_dictionaries({}, optional=fields) | junk


reservations = some(
    resources=st.just(["order:1"]),
    scope=st.sampled_from(SCOPES),
    on_duplicate=st.sampled_from(DUPLICATE_POLICIES),
    ttl=numbers,
    token=tokens,
    begun=st.just(True),
)
attempts = some(
    held=numbers, unavailable=numbers, since=numbers, stuck=numbers, pause=numbers,
    holder=texts, copy=st.booleans(), again=st.booleans(), parked=st.booleans(),
)  # fmt: skip


HUGE = {"resources": ["order:1"], "scope": "until_executed", "on_duplicate": "skip",
        "ttl": 10**400}  # fmt: skip
GIVEN = {"resources": ["order:1"], "scope": "until_executed", "on_duplicate": "skip", "ttl": 5.0,
         "token": Owner("there", 7, "the-id").token("0" * 32)}  # fmt: skip
BEGUN = {**HUGE, "scope": "until_executing", "begun": True}
ENDLESS = {**HUGE, "scope": "until_expired", "ttl": 1e10}


@pytest.fixture
def raised(monkeypatch: Patch) -> Iterator[list[str]]:
    """Collect the exceptions of signal handlers, which Celery only logs."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [
        logging.getLogger(name) for name in ("celery.utils.dispatch.signal", "celery_redlock")
    ]
    for logger in loggers:
        logger.addHandler(handler)
    yield said
    for logger in loggers:
        logger.removeHandler(handler)
    assert said == []


# -- reading -------------------------------------------------------------------------------------


@CASES
@given(header=reservations, task_id=junk | st.just("the-id"), scope=st.sampled_from(SCOPES))
def test_any_reservation_header_is_refused_or_read_within_bounds(
    ran: Ran, redlock: FakeRedlock, header: Any, task_id: Any, scope: str
) -> None:
    task = ran.task(scope)
    for options in (None, task.redlock.options(ran.app)):
        assert Reservation.of(GIVEN, task_id, options) is not None
        note = Reservation.of(header, task_id, options)
        if note is None:
            continue
        assert note.scope in SCOPES and note.on_duplicate in DUPLICATE_POLICIES
        assert MIN_TTL <= note.ttl <= HOUR
        if options is not None and scope != "until_executing":
            assert note.scope != "until_executing"
        json.dumps(note.header())
        claim = claim_of(redlock, note)
        free(redlock, claim, 0.1)
        assert encode(next(quorum.free(claim, 0.0, 0.1)), "redlock:")


@CASES
@given(given=attempts, receipt=some(at=numbers, content_type=texts), task_id=junk, info=junk)
def test_any_attempts_header_is_read_within_bounds(
    given: Any, receipt: Any, task_id: Any, info: Any
) -> None:
    headers = {ATTEMPTS: given, RECEIPT: receipt}
    read = attempts_of(headers)
    json.dumps(read, allow_nan=False)
    assert 0 <= read["held"] <= MAX_ATTEMPTS and read["stuck"] >= 0.0
    assert count_refusal(headers, ResourceHeld("held"))["stuck"] >= 0.0
    assert waited(headers) >= 0.0
    serializer_of(headers)
    is_redelivered(info)
    mark_copy(headers)
    receive(headers, info)
    assert len(short_id(task_id)) < 300


@pytest.mark.parametrize("given", [10**5000, nested(100_000)], ids=["a number", "a list"])
def test_huge_or_deeply_nested_header_values_raise_nothing(app: Celery, given: Any) -> None:
    """Such values come from other serializers; JSON has none of them."""
    assert short_id(given) == f"no id, but a {type(given).__name__}"
    assert queue_of(app, {"delivery_info": {"exchange": given, "routing_key": given}}) is None
    assert without_delays({"x-death": [{"queue": given}]}) == {"x-death": [{"queue": given}]}
    assert Skipped.of({"celery_redlock": "skipped", "resource": given}) == Skipped("", "")


def test_message_sent_again_carries_no_cc_or_bcc() -> None:
    assert without_delays({"CC": ["q2"], "BCC": ["q3"], "lang": "py"}) == {"lang": "py"}


@CASES
@given(
    info=junk | some(exchange=texts, routing_key=texts), count=junk, deaths=junk | some(queue=texts)
)
def test_any_delivery_info_is_read_without_an_error(
    app: Celery, info: Any, count: Any, deaths: Any
) -> None:
    request = {"delivery_info": info, "x-delivery-count": count}
    queue_of(app, request)
    may_be_dropped(app, request)
    without_delays({"x-death": deaths})
    without_delays({"x-death": [deaths]})


@CASES
@given(result=junk | some(celery_redlock=st.just("skipped"), resource=texts, holder=texts))
def test_any_result_is_read_as_a_skip_marker_or_as_none(result: Any) -> None:
    marker = Skipped.of(result)
    if isinstance(result, dict) and result.get("celery_redlock") == "skipped":
        assert marker is not None
        for name in ("resource", "holder"):
            given = result.get(name)
            assert marker[name] == (given if isinstance(given, str) else "")
    else:
        assert marker is None


@CASES
@given(state=junk | st.sampled_from(sorted(states.READY_STATES)))
def test_any_backend_state_is_read_as_an_end_or_as_none(state: Any) -> None:
    backend = SimpleNamespace(as_uri=lambda: "redis://", get_state=lambda _task_id: state)
    task = SimpleNamespace(backend=backend, ignore_result=False)
    ended = isinstance(state, str) and state in states.READY_STATES
    assert end_of(task, "id", "until_executed") == (state if ended else None)


# -- delivering ----------------------------------------------------------------------------------


@CASES
@example(scope="until_executed", header=HUGE, given={}, receipt={}, more={})
@example(scope="while_executing", header=BEGUN, given={}, receipt={}, more={})
@example(scope="until_expired", header=ENDLESS, given={}, receipt={}, more={})
@given(
    scope=st.sampled_from(SCOPES), header=reservations, given=attempts, receipt=junk,
    more=st.fixed_dictionaries(
        {}, optional={"parent_id": junk, "replaced_task_nesting": junk, "retries": junk,
                      "redlock_lease": junk, "redlock_arrival": junk}),
)  # fmt: skip
def test_body_with_forged_headers_is_locked_as_declared_or_its_message_is_refused(
    ran: Ran,
    redlock: FakeRedlock,
    box: Box,
    raised: list[str],
    scope: str,
    header: Any,
    given: Any,
    receipt: Any,
    more: dict[str, Any],
) -> None:
    ran.locked.clear()
    raised.clear()
    result, info = deliver(
        ran.task(scope), 1, **{**more, RESERVATION: header, ATTEMPTS: given, RECEIPT: receipt}
    )
    if info is not None:
        assert "\n" not in str(result)
        assert ran.locked == []
    else:
        assert ran.locked == [True] or (ran.locked == [False] and scope == "until_executing")
    redlock.clock.advance(HOUR + 1.0)
    assert redlock.free(RESERVED)
    assert redlock.free("order:1")
    assert raised == []


# -- a worker's main process ---------------------------------------------------------------------


@CASES
@example("until_executed", HUGE, {}, "id", 0, {}, False)
@example("while_executing", None, {"held": 1}, "id", 10**400, {}, False)
@example("while_executing", None, {"held": 1, "since": math.nan}, "id", 0, {}, False)
@given(
    scope=st.sampled_from(SCOPES), header=reservations, given=attempts,
    task_id=junk | st.just("id"),
    priority=junk, stamps=junk, redelivered=junk,
)  # fmt: skip
def test_main_process_of_a_worker_survives_any_header(
    ran: Ran,
    redlock: FakeRedlock,
    monkeypatch: Patch,
    raised: list[str],
    scope: str,
    header: Any,
    given: Any,
    task_id: Any,
    priority: Any,
    stamps: Any,
    redelivered: Any,
) -> None:
    raised.clear()
    held: dict[Any, Any] = {}
    monkeypatch.setattr(
        "celery_redlock.messages.endings.hold", lambda one, note: held.update({one: note})
    )
    monkeypatch.setattr("celery.worker.state.revoked_stamps", {"who": ["me"]})
    monkeypatch.setattr("celery.worker.state.revoked", LimitedSet())
    monkeypatch.setattr("celery_redlock.messages.reservation.threading.Thread", AtOnce)
    request = Received(ran.task(scope), header)
    request.id, request.stamps = task_id, stamps
    request.request_dict[ATTEMPTS] = given
    request.delivery_info = {"priority": priority, "redelivered": redelivered}
    received(request)
    if held:
        _look([(one, overdue(note)) for one, note in held.items()])
    parking = _parking(ran.app)
    parking._park(request)
    for parked in parking.admission.parked():
        assert math.isfinite(parked.since) and math.isfinite(parked.rank[0])
    refused(sender=request.task, message=SimpleNamespace(headers=request.request_dict))
    over(sender=request.task, request=SimpleNamespace(id=task_id, **request.request_dict))
    assert raised == []


class AtOnce:
    """A thread that is over before it begins."""

    def __init__(self, target: Any, **_options: Any) -> None:
        self.start = target


def overdue(note: Reservation) -> _HeldMessage:
    held = _HeldMessage(note)
    held.due = 0.0
    return held


@pytest.mark.parametrize("header", [{}, BEGUN, HUGE])
def test_task_without_a_reservation_is_parked_whatever_its_header_says(
    ran: Ran, header: Any
) -> None:
    parking = _parking(ran.app)
    assert parking._park(Received(ran.task("while_executing"), header))


def test_parked_task_from_a_host_whose_clock_is_ahead_goes_before_later_tasks(ran: Ran) -> None:
    """Otherwise it would be passed by others until the time that its header names."""
    parking = _parking(ran.app)
    for name, ahead in ("first", 3600.0), ("later", 0.0):
        request = Received(ran.task("while_executing"), {})
        request.id = name
        request.request_dict[ATTEMPTS] = {"held": 1, "since": time.time() + ahead}
        assert parking._park(request)
    last = parking.admission.take_back(1)
    assert [parked.request.id for parked in last] == ["later"]


@pytest.mark.parametrize("bad", [{"stamps": 7}, {"stamps": {"who": {}}}, {"id": []}])
def test_message_with_unreadable_stamps_or_id_stops_no_renewal_of_others(
    ran: Ran, redlock: FakeRedlock, monkeypatch: Patch, bad: Any
) -> None:
    token = Owner("there", 7, "the-id").token("0" * 32)
    monkeypatch.setattr("celery.worker.state.revoked_stamps", {"who": ["me"]})
    header = {"resources": ["order:1"], "scope": "until_executed", "on_duplicate": "skip",
              "ttl": 60.0, "token": token}  # fmt: skip
    task = ran.task("until_executed")
    note = Reservation.of(header, "the-id", task.redlock.options(ran.app))
    assert note is not None
    forged, other = Received(task, header), Received(task, header)
    vars(forged).update(bad)
    _look([(forged, overdue(note)), (other, overdue(note))])
    assert redlock.driver.rounds == ["renew"]
