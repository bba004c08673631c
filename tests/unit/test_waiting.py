"""Which deliveries can be parked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_redlock.config.options import TASK, TaskOptions
from celery_redlock.messages import policy
from celery_redlock.messages.policy import parks, set_at_work

OPTIONS = TaskOptions(**{name: option.default for name, option in TASK.items()}, waits={})


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_at_work", [True])


def test_what_waits_for_one_lock_is_parked(parking: None) -> None:
    assert parks(OPTIONS, ["one"])


@pytest.mark.parametrize(
    ("options", "resources"),
    [(OPTIONS, ["one", "two"]), (OPTIONS, []), (replace(OPTIONS, on_conflict="skip"), ["one"]),
     (replace(OPTIONS, on_conflict=print), ["one"]), (replace(OPTIONS, limit=2), ["one"]),
     (replace(OPTIONS, scope="until_executing"), ["one"])],
)  # fmt: skip
def test_all_else_is_not(parking: None, options: TaskOptions, resources: list[str]) -> None:
    assert not parks(options, resources)


def test_nor_where_no_worker_has_begun_to() -> None:
    assert not parks(OPTIONS, ["one"])


def test_it_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_at_work", [False])
    set_at_work(True)
    assert parks(OPTIONS, ["one"])
    set_at_work(False)
    assert not parks(OPTIONS, ["one"])
