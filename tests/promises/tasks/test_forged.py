"""Forged headers: nothing that they claim about a lock counts. Over fake nodes.

Whoever may publish can run a task with any arguments. He can keep others waiting for it, too, but
run no body without its lock, keep no key for longer than its own task would, and free nothing.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from celery.worker.strategy import proto1_to_proto2

from celery_redlock import ConfigurationError
from celery_redlock.config.checks import SCOPES
from celery_redlock.messages.endings import received
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.received import _look, discard, is_discarded
from celery_redlock.messages.reservation import HOUR, MONTH
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import Owner, token_digest
from celery_redlock.worker.remote_control import end as end_by_command
from tests.support.delivering import (
    RESERVED,
    Box,
    Ran,
    Received,
    deliver,
    header,
    request_of,
    take,
    token_of,
)
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

LOCKING = [scope for scope in SCOPES if scope != "until_executing"]
YEARS = 9e9
"""285 of them."""


def reserve(redlock: FakeRedlock, token: str, ttl: float = 100.0) -> None:
    claim = Claim(RESERVED, token, ttl, 5)
    for node in redlock.fakes:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())


# -- the lock ------------------------------------------------------------------------------------

SAYS: dict[str, dict[str, Any]] = {
    "it has begun": {"begun": True},
    "nothing more": {},
    "a token": {"token": token_of()},
    "a token, and that it has begun": {"token": token_of(), "begun": True},
}


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("scope", LOCKING)
def test_forged_header_does_not_take_the_lock_from_a_body(ran: Ran, scope: str, says: str) -> None:
    task = ran.task(scope)
    result, _ = deliver(task, 1, **{RESERVATION: header("until_executing", **SAYS[says])})
    assert result == "done"
    assert ran.locked == [True]


@pytest.mark.parametrize("scope", LOCKING)
def test_confirmed_reservation_with_a_lockless_scope_does_not_skip_the_lock(
    ran: Ran, redlock: FakeRedlock, scope: str
) -> None:
    """Such messages come from a producer that still allowed a call without a lock.

    Now they wait for it.
    """
    token = token_of()
    reserve(redlock, token)
    task = ran.task(scope)
    deliver(task, 1, **{RESERVATION: header("until_executing", token=token)})
    assert ran.locked == [True]
    assert redlock.free(RESERVED)


def test_call_may_not_drop_the_lock_that_is_declared(ran: Ran, box: Box) -> None:
    for scope in LOCKING:
        with pytest.raises(ConfigurationError, match="declare"):
            ran.task(scope).apply_async((1,), lock={"scope": "until_executing"})
    assert box.messages() == []
    ran.task("until_executing").apply_async((1,), lock={"scope": "until_executing"})


# -- the reservation -----------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["until_executed", "until_expired"])
def test_message_of_a_lost_process_keeps_the_reservation_of_its_call(
    ran: Ran, redlock: FakeRedlock, box: Box, scope: str
) -> None:
    """The main process keeps it, and sends the message again (`retry_on_worker_lost`)."""
    token = token_of()
    reserve(redlock, token)
    task = ran.task("while_executing")
    given = header(scope, token=token, ttl=200.0)
    task.apply_async((1,), task_id="the-id", headers={RESERVATION: given})
    assert box.header() == given
    redlock.clock.advance(101.0)
    assert redlock.free(RESERVED) is (scope == "until_expired")


@pytest.mark.parametrize("token", ["", token_of()], ids=["no token", "a token of nobody's"])
@pytest.mark.parametrize(
    ("declared", "forged"),
    [("while_executing", "until_executed"), ("while_executing", "until_expired"),
     ("until_executed", "until_expired"), ("until_executing", "until_expired"),
     ("until_and_while_executing", "until_expired")],
)  # fmt: skip
def test_forged_header_keeps_no_key_after_the_body(
    ran: Ran, redlock: FakeRedlock, declared: str, forged: str, token: str
) -> None:
    given = header(forged, ttl=YEARS, **({"token": token} if token else {}))
    result, _ = deliver(ran.task(declared), 1, **{RESERVATION: given})
    assert result == "done"
    assert redlock.free(RESERVED)


@pytest.mark.parametrize("token", ["", token_of()], ids=["no token", "a token of nobody's"])
@pytest.mark.parametrize("declared", ["until_executing", "until_and_while_executing"])
def test_forged_header_keeps_no_key_while_the_body_runs(
    ran: Ran, declared: str, token: str
) -> None:
    """Otherwise no further call could be published; its caller would get this one's result."""
    given = header("until_executed", **({"token": token} if token else {}))
    deliver(ran.task(declared), 1, **{RESERVATION: given})
    assert ran.reserved == [{None}]


def test_reservation_header_with_other_resources_does_not_touch_them(
    ran: Ran, redlock: FakeRedlock
) -> None:
    token = token_of()
    reserve(redlock, token)
    ran.then = lambda: ran.reserved.append(redlock.tokens("order:2#reserved"))
    given = header("until_executed", token=token, resources=["order:2"])
    deliver(ran.task("until_executed"), 1, **{RESERVATION: given})
    assert ran.reserved == [{token}, {None}]
    assert redlock.tokens(RESERVED) == {token}  # the header's token is not this call's


def test_retry_reserves_by_the_scope_of_its_task_and_not_by_its_header(ran: Ran, box: Box) -> None:
    """It has other arguments; the rest of its header has been confirmed by no node."""
    task = ran.task("until_executed")
    given = {RESERVATION: header("until_expired", token=token_of())}
    ran.then = lambda: task.apply_async((2,), task_id="the-id", headers=given)
    deliver(task, 1, **given)
    sent = box.header()
    assert (sent["resources"], sent["scope"]) == (["order:2"], "until_executed")


def test_call_of_its_own_task_by_a_body_is_no_retry(
    ran: Ran, redlock: FakeRedlock, box: Box
) -> None:
    """Only a retry would be published in any case."""
    task = ran.task("until_and_while_executing")
    ran.then = lambda: take(redlock, "first") or sent.append(task.apply_async((1,), task_id="new"))
    sent: list[Any] = []
    deliver(task, 1)
    assert sent[0].id == "first"
    assert box.messages() == []


@pytest.mark.parametrize(
    ("scope", "while_running", "after"),
    [("until_executed", True, False), ("until_expired", True, True)],
)
def test_reservation_of_a_call_counts_if_the_nodes_confirm_it(
    ran: Ran, redlock: FakeRedlock, scope: str, while_running: bool, after: bool
) -> None:
    token = token_of()
    reserve(redlock, token)
    deliver(ran.task("while_executing"), 1, **{RESERVATION: header(scope, token=token)})
    assert (ran.reserved == [{token}]) is while_running
    assert (redlock.tokens(RESERVED) == {token}) is after


# -- for how long --------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve_ttl", "own"), [(None, HOUR), (5.0, 5.0), (7200.0, 7200.0)])
def test_forged_header_reserves_no_longer_than_its_task_would(
    ran: Ran, redlock: FakeRedlock, reserve_ttl: float | None, own: float
) -> None:
    task = ran.task("until_expired", lock_reserve_ttl=reserve_ttl, lock_ttl=1.0)
    deliver(task, 1, **{RESERVATION: header("until_expired", ttl=YEARS)})
    assert not redlock.free(RESERVED)
    redlock.clock.advance(own + 1.0)
    assert redlock.free(RESERVED)


@pytest.mark.parametrize("scope", ["until_executed", "while_executing"])
def test_worker_renews_a_reservation_for_no_longer_than_its_task_would(
    ran: Ran, monkeypatch: Patch, scope: str
) -> None:
    """The reservation may be a call's, too.

    Where the nodes do not hold the token, nothing happens.
    """
    asked: list[float] = []
    monkeypatch.setattr(
        "celery_redlock.messages.endings.hold", lambda _one, note: asked.append(note.ttl)
    )
    given = header("until_executed", ttl=YEARS, token=token_of())
    received(request_of(ran.task(scope), given))
    assert asked == [HOUR]
    received(request_of(ran.task(scope), {**given, "scope": "until_expired"}))  # never prolonged
    assert asked == [HOUR]


def test_worker_forgets_a_reservation_that_the_nodes_deny(
    ran: Ran, redlock: FakeRedlock, monkeypatch: Patch
) -> None:
    """A forged one costs one request, however short its ttl; the real one is prolonged."""
    held: Any = WeakKeyDictionary()
    monkeypatch.setattr("celery_redlock.messages.received._held", held)
    monkeypatch.setattr("celery_redlock.messages.received.monotonic", redlock.clock)
    monkeypatch.setattr("celery_redlock.messages.received._thread", threading.current_thread())
    task = ran.task("until_executed")
    real, forged = token_of(), token_of()[:-1] + "f"
    reserve(redlock, real, 2.0)
    requests = [
        Received(task, header("until_executed", ttl=ttl, token=token))
        for ttl, token in ((0.02, forged), (1.2, real))
    ]
    for request in requests:
        received(request)
    redlock.driver.dead.update((0, 1, 2))
    redlock.clock.advance(0.5)
    _look(list(held.items()))
    assert len(held) == 2  # too few nodes have answered
    redlock.driver.dead.clear()
    for node in redlock.fakes[:2]:
        node.execute(Verb.RELEASE, [Claim(RESERVED, real, 1.0, 5)], redlock.clock())
    redlock.driver.rounds.clear()
    for _ in range(40):
        redlock.clock.advance(0.5)
        _look(list(held.items()))
    assert list(held) == requests[1:]
    assert 10 < len(redlock.driver.rounds) < 22 and not redlock.free(RESERVED)  # in 20 s


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_replaced_message_is_discarded_by_its_token_and_no_other_with_its_id(
    ran: Ran, monkeypatch: Patch, arrives: str
) -> None:
    monkeypatch.setattr("celery_redlock.messages.received._held", WeakKeyDictionary())
    monkeypatch.setattr("celery_redlock.messages.received._thread", threading.current_thread())
    monkeypatch.setattr("celery_redlock.messages.received._discarded", set())
    task, tokens = ran.task("until_executed"), [token_of(), token_of(), token_of()]
    requests = [Received(task, header("until_executed", token=token)) for token in tokens]
    requests[1]._apply_result = print  # the pool has it
    gone: list[Any] = []
    for request in requests:
        request._announce_revoked = lambda *_, one=request: gone.append(one)
    for token in tokens[:2] if arrives == "after" else ():
        discard(token_digest(token))
    for request in requests:
        received(request)
    for token in tokens[:2] if arrives == "before" else ():
        end_by_command(SimpleNamespace(), task_id="the-id", digest=token_digest(token))
    due = [request for request in requests if is_discarded(request) and request.revoked()]
    assert gone == due == requests[:1]


def test_retry_renews_a_reservation_for_no_longer_than_its_task_would(
    ran: Ran, redlock: FakeRedlock, box: Box
) -> None:
    token = token_of()
    reserve(redlock, token)
    task = ran.task("until_executed")
    given = header("until_executed", ttl=YEARS, token=token)
    task.apply_async((1,), task_id="the-id", headers={RESERVATION: given})
    assert box.header()["token"] == token
    redlock.clock.advance(HOUR + 1.0)
    assert redlock.free(RESERVED)
    reserve(redlock, token)
    task.apply_async((1,), task_id="the-id", headers={RESERVATION: given}, countdown=1e9)
    redlock.clock.advance(MONTH + 1.0)
    assert redlock.free(RESERVED)


def test_message_sent_again_is_reserved_for_no_longer_than_its_task_would(
    ran: Ran, redlock: FakeRedlock, box: Box
) -> None:
    """It has no reservation because the nodes were away; its `expires` is its sender's claim."""
    task = ran.task("until_expired", lock_on_unavailable="run")

    def again() -> None:
        redlock.driver.dead.clear()
        task.apply_async((1,), task_id="the-id", expires=YEARS)

    ran.then = again
    redlock.driver.dead = {0, 1, 2}
    deliver(task, 1)
    assert box.header()["token"]
    redlock.clock.advance(HOUR + 1.0)
    assert redlock.free(RESERVED)


def test_call_may_reserve_for_more_than_a_month_only_if_its_task_declares_it(
    ran: Ran, redlock: FakeRedlock, box: Box
) -> None:
    wish = {"reserve_ttl": YEARS}
    with pytest.raises(ConfigurationError, match="declare such a lock_reserve_ttl with the task"):
        ran.task("until_executed").apply_async((1,), lock=wish)
    assert box.messages() == [] and redlock.free(RESERVED)
    ran.task("until_executed", lock_reserve_ttl=YEARS).apply_async((1,), lock=wish)
    redlock.clock.advance(YEARS - 1.0)
    assert not redlock.free(RESERVED)


@pytest.mark.parametrize(
    "wish", [{"lock": {"reserve_ttl": YEARS}}, {"countdown": 1e9}, {"expires": 1e9}], ids=repr
)
def test_callback_reserves_for_at_most_a_month_and_its_parent_succeeds(
    ran: Ran, redlock: FakeRedlock, box: Box, wish: Any, caplog: Log
) -> None:
    callback = ran.task("until_executed").si(1).set(**wish)
    assert deliver(ran.task("while_executing"), 2, callbacks=[callback])[0] == "done"
    assert box.header()["ttl"] <= MONTH
    assert len(caplog.messages) == ("lock" in wish)
    redlock.clock.advance(MONTH - 1.0)
    assert not redlock.free(RESERVED)
    redlock.clock.advance(1.001)
    assert redlock.free(RESERVED)


def test_stamp_named_lock_is_no_option_of_a_call(ran: Ran, redlock: FakeRedlock, box: Box) -> None:
    """Celery passes a message's stamps on as options where it is sent again."""
    wish = {"scope": "until_expired", "reserve_ttl": YEARS}
    task = ran.task("while_executing")
    task.apply_async((1,), task_id="the-id", lock=wish, stamped_headers=["lock"])
    assert box.message().headers["stamps"]["lock"] == wish
    assert redlock.free(RESERVED)

    @ran.app.task(name="plain")
    def plain() -> None: ...

    plain.apply_async(lock="blue", stamped_headers=["lock"])
    assert box.message().headers["stamps"]["lock"] == "blue"


# -- another's id --------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [scope for scope in SCOPES if scope != "while_executing"])
def test_task_id_alone_does_not_open_a_reservation(
    ran: Ran, redlock: FakeRedlock, scope: str
) -> None:
    take(redlock, "the-id")
    tokens = redlock.tokens(RESERVED)
    deliver(ran.task(scope), 1)
    assert ran.locked == [scope != "until_executing"]  # in doubt a duplicate, never a loss
    assert ran.reserved == [tokens]
    assert redlock.tokens(RESERVED) == tokens


def test_lockless_task_without_a_quorum_logs_that_it_may_be_a_duplicate(
    ran: Ran, redlock: FakeRedlock, caplog: Log
) -> None:
    redlock.driver.dead = {0, 1, 2}
    deliver(ran.task("until_executing"), 1)
    assert ran.locked == [False]
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "may be a duplicate, but goes on: " in line
    assert "3 of 5 nodes did not vote" in line


def test_redelivered_message_frees_the_reservation_of_its_first_delivery(
    ran: Ran, redlock: FakeRedlock
) -> None:
    """Sent by name, it had no reservation; its worker took one, and died."""
    take(redlock, "the-id")
    deliver(ran.task("until_executed"), 1, delivery_info={"redelivered": True})
    assert redlock.free(RESERVED)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "scope", ["until_executing", "until_and_while_executing", "until_executed"]
)
def test_redelivered_message_that_may_have_begun_is_no_duplicate(
    ran: Ran, redlock: FakeRedlock, scope: str, again: bool, late: bool
) -> None:
    """If it has begun, it has freed its reservation, and another may have reserved the key since.

    A message that is acknowledged early has not begun if it comes back.
    """
    take(redlock, "other")
    given = {RESERVATION: header(scope, token=token_of())}
    task = ran.task(scope, acks_late=late)
    result, _ = deliver(task, 1, delivery_info={"redelivered": again}, **given)
    assert (result == "done") is (again and late and scope != "until_executed")


def test_retry_without_its_reservation_is_sent_again_all_the_same(
    ran: Ran, redlock: FakeRedlock, box: Box
) -> None:
    """The retry meets its lock, and must not count as its own duplicate where it is published."""
    take(redlock, "the-id")
    redlock.acquire("order:1", owner=Owner("there", 7, "the-id"))
    _, info = deliver(ran.task("until_executed"), 1)
    assert info.state == "RETRY"
    assert box.message().headers["id"] == "the-id"


def test_message_of_protocol_1_keeps_its_reservation_header(
    ran: Ran, redlock: FakeRedlock, box: Box
) -> None:
    """Its sender's reservation counts too, though the id in the message alone proves nothing."""
    ran.app.conf.task_protocol = 1
    task = ran.task("until_executed")
    task.delay(1)
    message = box.message()
    assert "id" not in message.headers
    _body, headers, *_rest = proto1_to_proto2(message, message.decode())
    (token,) = redlock.tokens(RESERVED)
    given = {name: headers[name] for name in ("id", "headers")}
    deliver(task, 1, **given)
    assert ran.reserved == [{token}]
    assert redlock.free(RESERVED)
