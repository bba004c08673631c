"""Deliveries that can be parked."""

from __future__ import annotations

import pytest

from celery_redlock.config.options import TASK, TaskOptions
from celery_redlock.messages import policy
from celery_redlock.messages.policy import parks, set_parking

OPTIONS = TaskOptions(**{name: option.default for name, option in TASK.items()}, waits={})


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_parking", [True])


def test_delivery_with_a_waiting_policy_can_be_parked(parking: None) -> None:
    assert parks(OPTIONS)
    assert parks(OPTIONS.replace(limit=2))


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS.replace(on_conflict="skip"),
        OPTIONS.replace(on_conflict=print),
        OPTIONS.replace(scope="until_executing"),
    ],
)
def test_delivery_with_another_policy_or_scope_is_not_parked(
    parking: None, options: TaskOptions
) -> None:
    assert not parks(options)


def test_delivery_is_not_parked_before_a_worker_has_enabled_parking() -> None:
    assert not parks(OPTIONS)


def test_parking_can_be_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_parking", [False])
    set_parking(True)
    assert parks(OPTIONS)
    set_parking(False)
    assert not parks(OPTIONS)
