"""Output for people and programs around us, and what they can make us do. See docs/hostile.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app import utils
from celery.worker import control
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import SingletonTask
from celery_redlock.protocol.values import Owner, token_digest
from celery_redlock.worker import remote_control

ANY = st.text() | st.text(alphabet="|%7C25\x00\ud800 0").map(str)


@pytest.mark.parametrize("how", ["report", "inspect conf", "inspect report"])
def test_celery_reports_show_no_password_of_a_node(how: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://redlock:S3CRET@h:6379/0"]
    names = ("BROKER_URL", "BROKER_READ_URL", "BROKER_WRITE_URL")
    named = {f"SHOP_{name}": "redis://:S3CRET@h:6379/0" for name in names}
    app.config_from_object(named, namespace="SHOP")
    app.conf.ONCE = {"settings": {"url": "redis://:S3CRET@h:6379/0"}}
    app.task(lambda: None, name="charge", base=SingletonTask, shared=False)
    state: Any = SimpleNamespace(app=app)
    told = {
        "report": app.bugreport,
        "inspect conf": lambda: json.dumps(control.conf(state)),
        "inspect report": lambda: json.dumps(control.report(state)),
    }[how]()
    assert "redlock_nodes" in told and "S3CRET" not in told
    assert all(name in told for name in named)


def test_settings_hidden_by_celery_stay_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "HIDDEN_SETTINGS", re.compile("API|TOKEN", re.IGNORECASE))
    remote_control.register()
    remote_control.register()
    assert utils.HIDDEN_SETTINGS.pattern.startswith("API|TOKEN|REDLOCK_NODES|^URL$|")
    assert utils.HIDDEN_SETTINGS.pattern.count("REDLOCK_NODES") == 1
    hidden = utils.filter_hidden_settings({"x_token": "a", "CELERY_REDLOCK_NODES": "b", "y": "c"})
    assert {name for name, value in hidden.items() if "***" in value} == {
        "x_token",
        "CELERY_REDLOCK_NODES",
    }


STAMP = st.text(st.characters(exclude_characters="|", codec="utf-8"))
OWNERS = st.builds(Owner, st.text(), st.integers(0, 2**40), ANY, st.integers(0, 99), STAMP, ANY)


@given(OWNERS, st.integers(0, 1 << 33))
def test_owner_is_read_back_from_its_token_whatever_its_names(owner: Owner, now: int) -> None:
    found = Owner.of(owner.token("0" * 32, now))
    assert found == replace(owner, host=owner.host.replace("|", ""))
    assert found is not None and found.since == now


@given(
    ANY
    | st.lists(ANY | st.from_regex(r"\d{1,30}", fullmatch=True), min_size=7, max_size=9).map(
        "|".join
    )
)
def test_any_value_is_read_as_an_owner_or_as_none(value: str) -> None:
    found = Owner.of(value)
    digest = token_digest(value)
    assert len(digest) == 8
    if found is not None:
        assert str(found).isprintable()
        assert min(found.pid, found.retries, found.since) >= 0
