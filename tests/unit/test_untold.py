"""Messages that are acknowledged though nothing says how their bodies ended."""

from __future__ import annotations

from typing import Any

import pytest
from celery.signals import task_received

from celery_redlock.messages.reservation import Reservation
from tests.unit.delivering import Patch, Ran
from tests.unit.test_forged import header, token_of
from tests.unit.test_forged_fuzz import Received


class Unstorable(Exception):
    """What Celery raises where it cannot store that a body has raised SystemExit."""


@pytest.mark.parametrize(
    ("late", "scope", "acknowledged", "freed"),
    [
        (True, "until_executed", True, 1),
        (True, "until_executed", False, 0),  # it comes back
        (True, "until_expired", True, 0),
        (False, "until_executed", True, 0),  # the body's process has
    ],
)
def test_what_celery_fails_to_tell_of_a_body_keeps_no_reservation(
    ran: Ran, monkeypatch: Patch, late: bool, scope: str, acknowledged: bool, freed: int
) -> None:
    found: list[Reservation] = []
    monkeypatch.setattr(
        "celery_redlock.messages.endings.free_soon", lambda _redlock, note: found.append(note)
    )
    monkeypatch.setattr("celery_redlock.messages.endings.hold", lambda *_: None)

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
