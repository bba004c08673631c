"""A store of another package, found by its entry point, under the lock that users hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from celery_redlock import ConfigurationError, Redlock, ResourceHeld
from celery_redlock.cli import redlock as command
from celery_redlock.stores import kinds
from tests.support import sqlite_store
from tests.support.published import published
from tests.support.wait import wait_until

Locks = Callable[..., Redlock]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with published("sqlite", "tests.support.sqlite_store:KIND", tmp_path):
        yield f"sqlite://{tmp_path}/locks.db"


def test_lock_in_a_published_store_excludes_and_is_released(url: str, lock_over: Locks) -> None:
    mine, other = lock_over([url], ttl=5.0), lock_over([url], ttl=5.0)
    with mine.lock("r") as held:
        assert not held.lost
        with pytest.raises(ResourceHeld) as refused, other.lock("r"):
            pass
        assert refused.value.holder.owner == mine.client.owner
    with other.lock("r"):
        pass


def test_waiter_of_a_published_store_without_queues_polls(url: str, lock_over: Locks) -> None:
    mine, other = lock_over([url], ttl=5.0), lock_over([url], ttl=5.0)
    lease = mine.acquire("r")
    threading.Timer(0.5, mine.release, [lease]).start()
    with other.lock("r", wait=4.0) as held:
        assert not held.lost


def test_lease_in_a_published_store_is_extended_and_lost_with_its_key(
    url: str, lock_over: Locks
) -> None:
    mine = lock_over([url], ttl=1.0)
    store = sqlite_store.SqliteStore(sqlite_store.parse(url, "url"))
    store.connect()
    with pytest.raises(Exception, match="is over"), mine.lock("r") as held:
        threading.Event().wait(1.5)
        assert not held.lost
        ((token, _left),) = store.peek(["redlock:r"])
        store.release(sqlite_store.Wanted(("redlock:r",), token, 1.0))
        wait_until(lambda: held.lost, 3.0, "the extension is refused")
        held.ensure()


def test_published_store_numbers_grants_of_several_keys_and_limits(
    url: str, lock_over: Locks
) -> None:
    redlock = lock_over([url], ttl=5.0)
    tokens = []
    for _ in range(3):
        with redlock.lock("r", fencing=True) as held:
            tokens.append(held.fencing_token)
    assert tokens == sorted(set(tokens))
    assert redlock.try_acquire(("a", "b")) is not None
    assert redlock.try_acquire("b") is None
    assert [redlock.try_acquire("l", limit=2) is not None for _ in range(3)] == [True, True, False]


def test_commands_show_and_examine_a_published_store(url: str, lock_over: Locks) -> None:
    redlock = lock_over([url], ttl=5.0)
    with redlock.lock("shown"):
        listed = CliRunner().invoke(command, ["ls", "--nodes", url])
        assert listed.exit_code == 0, listed.output
        assert "shown" in listed.output
    doctor = CliRunner().invoke(command, ["doctor", "--nodes", url])
    assert doctor.exit_code == 0, doctor.output
    assert "Nothing is wrong" in doctor.output


def test_entry_point_that_is_no_kind_is_refused(tmp_path: Path) -> None:
    with (
        published("sqlite", "tests.support.sqlite_store:parse", tmp_path),
        pytest.raises(ConfigurationError, match="is no celery_redlock Kind"),
    ):
        Redlock(["sqlite:///x"])


def test_own_kinds_are_published_as_well() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    section = text.partition('[project.entry-points."celery_redlock.stores"]\n')[2]
    rows = dict(row.split(" = ") for row in section.partition("\n\n")[0].splitlines())
    expected = {
        scheme: f'"celery_redlock.stores.{package}.kind:KIND"'
        for scheme, package in kinds.OWN.items()
        if "+" not in scheme
    }
    assert rows == expected
