"""Which deliveries can be parked."""

from __future__ import annotations

import pytest

from celery_redlock.config.options import TASK, TaskOptions
from celery_redlock.messages import policy
from celery_redlock.messages.policy import parks, set_parking

OPTIONS = TaskOptions(**{name: option.default for name, option in TASK.items()}, waits={})


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_parking", [True])


def test_what_waits_for_a_lock_is_parked(parking: None) -> None:
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
def test_all_else_is_not(parking: None, options: TaskOptions) -> None:
    assert not parks(options)


def test_nor_where_no_worker_has_begun_to() -> None:
    assert not parks(OPTIONS)


def test_it_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_parking", [False])
    set_parking(True)
    assert parks(OPTIONS)
    set_parking(False)
    assert not parks(OPTIONS)
