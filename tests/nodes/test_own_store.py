"""A store of another package, found by its entry point, under the lock that users hold."""

from __future__ import annotations

import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock, ResourceHeld
from celery_redlock.cli import redlock as command
from celery_redlock.stores import kinds
from celery_redlock.stores.contract import Address, Can, Granted, Kind, Store, Wanted
from tests.support import sqlite_store
from tests.support.names import Patch
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


@pytest.mark.parametrize("guard", ["uptime", "off"])
def test_guard_keeps_a_store_that_has_another_id_of_its_data_from_voting(
    url: str, lock_over: Locks, guard: str
) -> None:
    redlock = lock_over([url], ttl=5.0, restart_guard=guard)
    redlock.release(redlock.acquire("r"))  # however recently its server was started
    with sqlite3.connect(url.partition("://")[2]) as database:
        database.executescript("DROP TABLE lease; DELETE FROM memory")  # its data is lost
    if guard == "off":
        assert redlock.acquire("r", wait=2.0)
        return
    with pytest.raises(QuorumUnavailable, match="it may have forgotten locks"):
        redlock.acquire("r", wait=0.5)


def test_commands_show_and_examine_a_published_store(url: str, lock_over: Locks) -> None:
    redlock = lock_over([url], ttl=5.0)
    with redlock.lock("shown"):
        listed = CliRunner().invoke(command, ["ls", "--nodes", url])
        assert listed.exit_code == 0, listed.output
        assert "shown" in listed.output
    doctor = CliRunner().invoke(command, ["doctor", "--nodes", url])
    assert doctor.exit_code == 0, doctor.output
    assert "Nothing is wrong" in doctor.output


BROKEN = """
from dataclasses import dataclass, replace
from celery_redlock.stores.contract import Can, Kind
from tests.support import sqlite_store
from tests.support.names import Patch

KIND = Kind(name="Odd", can=Can(), parse="broken:parse", store="tests.support.sqlite_store:None")
NO_PARSE = Kind(name="Odd", can=Can(), parse="broken:nothing", store="broken:Store")
NO_MODULE = Kind(name="Odd", can=Can(), parse="nowhere:parse", store="broken:Store")
NO_CLIENT = Kind(name="Odd", can=Can(), parse="clientless:parse", store="broken:Store")
OURS = Kind(name="Redis", can=Can(), parse="broken:parse", store="broken:Store")

def parse(url, where):
    return sqlite_store.parse(url, where)
"""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("tests.support.sqlite_store:parse", "sqlite_store:parse for odd:// is no .* Kind"),
        ("nowhere:KIND", r"nowhere:KIND for odd:// cannot be loaded \(ModuleNotFoundError: "),
        ("broken:NOTHING", r"broken:NOTHING for odd:// cannot be loaded \(AttributeError: "),
        ("broken:KIND", "returned an address whose store is 'SQLite', and its kind is 'Odd'"),
        ("broken:NO_PARSE", "Odd names broken:nothing as its parse, and there is none"),
        ("broken:NO_MODULE", "Odd names nowhere:parse as its parse, and there is none"),
        ("broken:NO_CLIENT", r"its client is missing \(No module named 'nowhere'\)"),
        ("broken:OURS", "names its kind Redis, as ours is"),
    ],
)
def test_broken_entry_point_of_a_store_is_refused_each_time_with_the_reason(
    tmp_path: Path, monkeypatch: Patch, value: str, why: str
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "clientless.py").write_text("import nowhere")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("broken", "clientless"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with published("odd", value, tmp_path):
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=why):
                Redlock(["odd:///x"])


def test_two_packages_with_one_scheme_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with (
        published("odd", "nowhere:KIND", tmp_path),
        published("odd", "elsewhere:KIND", tmp_path / "other", "other_store"),
        pytest.raises(ConfigurationError, match="odd://: elsewhere:KIND, nowhere:KIND"),
    ):
        Redlock(["odd:///x"])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({}, "names neither a store nor a node"),
        ({"node": "a:Node"}, "names a node without a reader"),
        ({"store": "a:Store", "can": Can(queues=True)}, "queues, and names no subscription"),
    ],
)
def test_kind_without_a_part_that_it_needs_is_refused(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"kind of store Odd {why}"):
        Kind(**{"name": "Odd", "can": Can(), "parse": "a:parse", **parts})


def test_page_about_stores_names_every_field_and_method_of_the_contract() -> None:
    page = (Path(__file__).parents[2] / "docs" / "write-a-store.md").read_text("utf-8")
    names = {field.name for kind in (Kind, Can) for field in fields(kind)}
    names |= set(Wanted._fields) | set(Granted._fields)
    names |= {name for kind in (Store, Address) for name in vars(kind) if not name.startswith("_")}
    names |= {"identity", "longest_ttl"}
    assert {name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", page)} == set()


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
