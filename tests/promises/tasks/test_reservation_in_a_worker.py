"""Reservations as a worker meets them: adopted, another task's, at ends that nothing reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Reject
from celery.signals import task_received

from celery_redlock import SingletonTask
from celery_redlock.messages import endings, reservation
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.reservation import Reservation
from celery_redlock.protocol.claim import Claim
from tests.support.delivering import RESERVED, Ran, Received, deliver, header, take, token_of
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch

# -- adopted ---------------------------------------------------------------------------------------


def reserved(redlock: FakeRedlock, task_id: str, nodes: set[int]) -> Claim:
    """A reservation, taken on these nodes only."""
    claim = reservation.claim_for(redlock, "order:1", 60.0, task_id, "charge")
    redlock.driver.dead = set(range(5)) - nodes
    reservation.take(redlock, claim)
    redlock.driver.dead = set()
    return claim


def test_adopt_refused_by_a_quorum_leaves_no_token_on_the_minority(redlock: FakeRedlock) -> None:
    other = reserved(redlock, "other", {0, 1, 2})
    ours = reservation.claim_for(redlock, "order:1", 60.0, "ours", "charge")
    assert reservation.adopt(redlock, ours) is False
    (name,) = ours.resources
    now = redlock.clock()
    assert [node.token(name, now) for node in redlock.fakes] == [other.token] * 3 + [None] * 2


def test_adopt_without_enough_answers_keeps_the_tokens(redlock: FakeRedlock) -> None:
    ours = reserved(redlock, "ours", {0, 1, 2, 3, 4})
    redlock.driver.dead = {0, 1, 2}
    assert reservation.adopt(redlock, ours) is None
    redlock.driver.dead = set()
    assert redlock.tokens(ours.resources[0]) == {ours.token}
    assert reservation.adopt(redlock, ours) is True


def test_quorum_that_names_another_reservation_refuses_ours(redlock: FakeRedlock) -> None:
    take(redlock, "another")
    redlock.driver.dead = {0, 1}
    claim = reservation.claim_for(redlock, "order:1", 10.0, "mine")
    assert not reservation.start(redlock, claim)
    assert {reservation.look(redlock, claim).token} == redlock.tokens("order:1#reserved")


def test_reservation_that_only_a_quorum_has_is_its_own(redlock: FakeRedlock) -> None:
    """A node that the publisher had not yet connected to may answer before one that has it."""
    take(redlock, "mine", nodes=3)
    redlock.driver.dead = {0}
    (token,) = redlock.tokens("order:1#reserved") - {None}
    claim = reservation.claim_for(redlock, "order:1", 10.0, "mine")
    claim.token = str(token)
    assert reservation.start(redlock, claim)


# -- another task's --------------------------------------------------------------------------------


SCOPES = ("until_executing", "until_executed", "until_and_while_executing", "until_expired")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("had_one", [False, True])
def test_reservation_of_another_task_with_the_same_key_skips_no_message(
    ran: Ran, scope: str, had_one: bool
) -> None:
    """Its own message came without a reservation, or with one that has expired since."""
    task = ran.task(scope)
    take(ran.redlock, "another-id", task="shop.another")
    theirs = ran.redlock.tokens(RESERVED)
    given: Any = header(scope, **({"token": token_of()} if had_one else {}))
    assert deliver(task, 1, redlock_reservation=given)[0] == "done"
    assert ran.redlock.tokens(RESERVED) == theirs


@pytest.mark.parametrize("scope", SCOPES)
def test_message_of_the_same_task_with_a_reserved_key_is_a_duplicate(ran: Ran, scope: str) -> None:
    task = ran.task(scope)
    take(ran.redlock, "another-id", task=task.name)
    assert deliver(task, 1, redlock_reservation=header(scope))[0] != "done"


# -- at its end ------------------------------------------------------------------------------------


class Unstorable(Exception):
    """The exception of Celery where it cannot store that a body has raised SystemExit."""


@pytest.fixture
def found(monkeypatch: Patch) -> list[Reservation]:
    """Record the reservations that are freed."""
    found: list[Reservation] = []
    endings = "celery_redlock.messages.endings"
    monkeypatch.setattr(f"{endings}.free_soon", lambda _redlock, note: found.append(note))
    monkeypatch.setattr(f"{endings}.hold", lambda *_: None)
    return found


@pytest.mark.parametrize(("again", "failed", "freed"), [(True, 0, 1), (True, 1, 0), (False, 0, 0)])
def test_redelivered_message_known_to_be_done_keeps_no_reservation(
    ran: Ran, found: list[Reservation], again: bool, failed: int, freed: int
) -> None:
    """The process of its first body died before it could free it; a failed one may come back."""
    request = Received(ran.task("until_executed"), header("until_executed", token=token_of()))
    request.delivery_info = {"redelivered": again}
    task_received.send(sender=None, request=request)
    request.on_success((failed, None, 0.1))
    assert len(found) == freed


@pytest.mark.parametrize(
    ("late", "scope", "acknowledged", "freed"),
    [
        (True, "until_executed", True, 1),
        (True, "until_executed", False, 0),  # it comes back
        (True, "until_expired", True, 0),
        (False, "until_executed", True, 0),  # the body's process has
    ],
)
def test_acknowledged_message_whose_failure_celery_cannot_store_keeps_no_reservation(
    ran: Ran, found: list[Reservation], late: bool, scope: str, acknowledged: bool, freed: int
) -> None:
    def on_failure(*_outcome: Any) -> None:
        request.acknowledged = acknowledged
        raise Unstorable

    task = ran.task(scope, acks_late=late)
    request = Received(task, header(scope, token=token_of()))
    request.on_failure = on_failure
    task_received.send(sender=None, request=request)
    with pytest.raises(Unstorable):
        request.on_failure(SystemExit(3))
    assert len(found) == freed


@pytest.mark.parametrize(
    ("scope", "enabled", "freed"),
    [("until_executed", True, 1), ("until_executed", False, 0), ("until_expired", True, 0)],
)
def test_message_that_ends_before_its_body_keeps_no_reservation(
    ran: Ran, found: list[Reservation], scope: str, enabled: bool, freed: int
) -> None:
    """Where locks are off no node is asked, and none needs to be there."""
    ran.app.conf.redlock_enabled = enabled
    given = header(scope, token=token_of())
    request = SimpleNamespace(id="the-id", **{RESERVATION: given})
    endings.over(sender=ran.task(scope), request=request)
    assert len(found) == freed
    message = SimpleNamespace(headers={"id": "the-id", RESERVATION: given})
    endings.refused(sender=SimpleNamespace(app=ran.app), message=message)
    assert len(found) == 2 * freed


def test_retry_that_cannot_be_sent_keeps_its_reservation(
    redlock: FakeRedlock, app: Any, monkeypatch: Patch
) -> None:
    @app.task(base=SingletonTask, bind=True, lock_key="k", lock_scope="until_executed")
    def task(self: Any) -> str:
        with pytest.raises(Reject):
            self.retry(countdown=1)
        assert not redlock.free("k#reserved")
        return "ran"

    def send_task(*_args: Any, **_options: Any) -> None:
        raise ConnectionError("the broker is away")

    monkeypatch.setattr(app, "send_task", send_task)
    result, _info = deliver(task)
    assert result == "ran"
    assert redlock.free("k#reserved")
