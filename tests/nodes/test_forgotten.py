"""Time without a vote of a node that may have forgotten, for each kind of key that nodes keep.

The table is in docs/guarantees.md, "What a node may forget". The nodes here have been known for a
minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state
from celery.beat import ScheduleEntry
from celery.schedules import crontab

from celery_redlock import QuorumUnavailable, Redlock, SingletonTask
from celery_redlock.beat.claims import TickClaims
from celery_redlock.locking import pauses
from celery_redlock.protocol.names import mark_of
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer, start_servers
from celery_redlock.worker.startup import check
from tests.conftest import as_new
from tests.support.names import Locks, Patch
from tests.support.nodes import admin, make_known_to

HOUR, DAY = 3600.0, 86_400.0
TTL = 30.0
KNOWN_S = 60.0

Declare = Callable[..., Any]


@pytest.fixture(scope="module")
def three() -> Iterator[list[LocalServer]]:
    with start_servers(3) as three:
        yield three


@pytest.fixture
def nodes(three: list[LocalServer]) -> list[LocalServer]:
    as_new(three)
    for server in three:
        with admin(server, text=True) as client:
            make_known_to(client, KNOWN_S)
    return three


@pytest.fixture
def redlock(nodes: list[LocalServer], lock: Locks) -> Redlock:
    return lock(nodes, ttl=TTL)


@pytest.fixture
def app(redlock: Redlock, monkeypatch: Patch) -> Celery:
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    monkeypatch.setattr(Redlock, "from_app", staticmethod(lambda app: redlock))
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
    return app


@pytest.fixture
def declare(app: Celery) -> Declare:
    """Declares a task `work(key)`, with the options given."""

    def declared(**options: Any) -> Any:
        name = f"shop.work{len(app.tasks)}"

        @app.task(base=SingletonTask, name=name, shared=False, lock_key="<key>", **options)
        def work(key: str) -> str:
            return key

        return work

    return declared


def votes_on_locks(redlock: Redlock) -> bool:
    """Return True; raise if a lock cannot be taken, by this process or by one that starts now."""
    assert redlock.client.guard.longest == TTL
    redlock.release(redlock.acquire("any"))
    return True


def seconds_without_vote(call: Callable[[], object]) -> float:
    with pytest.raises(QuorumUnavailable) as refused:
        call()
    found = re.search(r"has no vote (on this )?for another (\d+\.\d) s", str(refused.value))
    assert found, str(refused.value)
    return float(found[2])


def test_lock_with_a_long_ttl_silences_young_nodes_for_every_lock(redlock: Redlock) -> None:
    assert votes_on_locks(redlock)
    for name, ttl in (("long", 100.0), ("any", TTL)):
        left = seconds_without_vote(lambda name=name, ttl=ttl: redlock.acquire(name, ttl=ttl))  # type: ignore[misc]
        assert 35 < left <= 100 * 1.01 + 0.002 - KNOWN_S


def test_hold_for_silences_young_nodes_for_its_own_task_alone(
    redlock: Redlock, declare: Declare
) -> None:
    assert 3500 < seconds_without_vote(lambda: declare(lock_hold_for=HOUR)("a")) < 3600
    assert declare()("a") == "a"
    assert votes_on_locks(redlock)


def test_hold_for_is_granted_by_nodes_that_are_older_than_it(
    redlock: Redlock, declare: Declare
) -> None:
    assert declare(lock_hold_for=50.0)("a") == "a"
    assert redlock.holder("a") is None  # a call in a process does not keep it
    assert votes_on_locks(redlock)


def test_rate_silences_young_nodes_for_its_own_starts_alone(
    redlock: Redlock, declare: Declare
) -> None:
    assert DAY < seconds_without_vote(lambda: declare(lock_rate="2/d")("a")) < DAY * 1.02
    assert declare(lock_rate="2/50s")("b") == "b"
    assert votes_on_locks(redlock)


def test_keep_for_a_month_silences_no_node(redlock: Redlock) -> None:
    with redlock.lock("a") as lease:
        assert lease.keep(31 * DAY)
    assert votes_on_locks(redlock)


def test_reservation_for_a_month_silences_no_node(redlock: Redlock, declare: Declare) -> None:
    work = declare(lock_scope="until_expired", lock_reserve_ttl=31 * DAY)
    first = work.delay("a")
    assert work.delay("a").id == first.id
    assert votes_on_locks(redlock)


def test_claim_on_a_yearly_tick_silences_no_node(redlock: Redlock, app: Celery) -> None:
    yearly = crontab(minute=0, hour=0, day_of_month=1, month_of_year=1, app=app)
    entry = ScheduleEntry("yearly", "shop.close", schedule=yearly, app=app)
    entry.last_run_at = entry.last_run_at.replace(year=2020)
    decision = TickClaims(app, redlock, "hold").decide(entry, 1.0)
    assert decision.send and decision.claim is not None
    decision.claim.finish(sent=True)
    assert decision.claim.request.names[0].startswith("beat:shop:yearly:")
    assert redlock.holder(decision.claim.resource) is not None
    assert votes_on_locks(redlock)


def test_mark_of_a_success_silences_no_node(redlock: Redlock) -> None:
    with redlock.lock("a") as lease:
        assert lease.claim is not None
        lease.claim.mark = mark_of(Owner("host", 1, "the-id"), ("a",)), DAY
    assert votes_on_locks(redlock)


@pytest.mark.parametrize("limit", [0, 5])
def test_pause_or_limit_of_an_operator_silences_no_node(redlock: Redlock, limit: int) -> None:
    pauses.begin(redlock, "order:*", DAY, "alice@web-1", "a reason", limit=limit)
    assert votes_on_locks(redlock)


def test_fencing_number_silences_no_node(redlock: Redlock) -> None:
    redlock.release(redlock.acquire("a", fencing=True))
    assert votes_on_locks(redlock)


def test_worker_checks_its_nodes_by_the_ttls_of_its_tasks_alone(
    redlock: Redlock, app: Celery, declare: Declare, monkeypatch: Patch
) -> None:
    """The worker notes the longest ttl before its pool is forked: the children inherit it."""
    declare(lock_hold_for=HOUR)
    declare(lock_rate="2/d")
    asked: list[float] = []
    monkeypatch.setattr(redlock, "check", lambda ttl: asked.append(ttl) or [])
    monkeypatch.setattr("celery_redlock.worker.parking.consumer.begin", lambda app: None)
    monkeypatch.setattr("celery_redlock.worker.refresh.begin", lambda app: None)
    check(sender=type("Worker", (), {"app": app, "hostname": "w@h"}))
    assert asked == [TTL]


def test_refusal_by_a_young_node_names_the_time_that_hold_for_needs(declare: Declare) -> None:
    with pytest.raises(QuorumUnavailable, match=r"what counts for 3600 s here"):
        declare(lock_hold_for=HOUR)("a")
