"""Which deliveries can be parked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.config.options import TASK, TaskOptions
from celery_redlock.messages import parkable
from celery_redlock.messages.parkable import at_work, parks, set_at_work

OPTIONS = TaskOptions(**{name: option.default for name, option in TASK.items()}, waits={})


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parkable, "_at_work", [True])


def request(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


def test_what_waits_for_one_lock_is_parked(parking: None) -> None:
    mine = request()
    assert parks(mine, OPTIONS, ["one"])
    assert at_work(mine)


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        (OPTIONS, ["one", "two"]),
        (OPTIONS, []),
        (replace(OPTIONS, on_conflict="skip"), ["one"]),
        (replace(OPTIONS, on_conflict=print), ["one"]),
        (replace(OPTIONS, limit=2), ["one"]),
        (replace(OPTIONS, scope="until_executing"), ["one"]),
    ],
)
def test_all_else_is_not(parking: None, options: TaskOptions, resources: list[str]) -> None:
    forged = request(redlock_parks=True)  # a message's headers become attributes
    assert not parks(forged, options, resources)
    assert not at_work(forged)


def test_nor_where_no_worker_has_begun_to() -> None:
    mine = request()
    assert not parks(mine, OPTIONS, ["one"])
    assert not at_work(mine)
    assert not at_work(request())


def test_it_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parkable, "_at_work", [False])
    set_at_work(True)
    assert parks(request(), OPTIONS, ["one"])
    set_at_work(False)
    assert not parks(request(), OPTIONS, ["one"])
