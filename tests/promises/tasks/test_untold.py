"""Reservations of messages at their ends, also at those that nothing reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Reject
from celery.signals import task_received

from celery_redlock import SingletonTask
from celery_redlock.messages import endings
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.reservation import Reservation
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from tests.support.delivering import Ran, Received, deliver, header, token_of
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch


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


@pytest.mark.parametrize("away", [False, True])
def test_reservation_not_kept_after_success_is_logged(
    ran: Ran, redlock: FakeRedlock, caplog: Log, away: bool
) -> None:
    token = token_of()
    claim = Claim("order:1#reserved", token, 60.0, 5)
    for node in redlock.fakes:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())
    if away:
        ran.then = lambda: redlock.driver.dead.update({0, 1, 2})
    result, _ = deliver(
        ran.task("until_succeeded"), 1, **{RESERVATION: header("until_succeeded", token=token)}
    )
    assert result == "done"
    assert ("and its key is not kept" in caplog.text) is away


def test_reservation_is_extended_while_its_body_runs(ran: Ran, redlock: FakeRedlock) -> None:
    token, watched = token_of(), set[str]()
    claim = Claim("order:1#reserved", token, 60.0, 5)
    for node in redlock.fakes:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())
    ran.then = lambda: watched.update(redlock.watchdog.watched)
    given = header("until_executed", token=token)
    assert deliver(ran.task("until_executed"), 1, **{RESERVATION: given})[0] == "done"
    assert token in watched
    assert not redlock.watchdog.watched
