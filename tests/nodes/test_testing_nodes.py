"""`fake_redlock` does what `redlock_nodes` does: one suite over both, as users see them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, current_app
from celery.contrib.testing.worker import start_worker

from celery_redlock import (
    ConfigurationError,
    LeaseLost,
    QuorumUnavailable,
    Redlock,
    ResourceHeld,
    SingletonTask,
    current_lease,
    locked,
)
from celery_redlock.locking import acquisition
from celery_redlock.testing import (
    assert_free,
    assert_locked,
    assert_reserved,
    assert_skipped,
)
from celery_redlock.testing.nodes import Nodes
from celery_redlock.testing.nodes import fake_redlock as faked
from celery_redlock.testing.nodes import redlock_nodes as real
from tests.support.wait import wait_until

SOON = 20.0
"""Seconds; on a machine that is busy."""


@pytest.fixture(params=["fake", "real"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    if request.param == "fake":
        with faked() as fake:
            yield fake
    else:
        with real(servers=request.getfixturevalue("servers")[:3]) as local:
            yield local


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    app.conf.redlock_wait = 0.05
    app.conf.redlock_retry_backoff = 0.1
    app.conf.redlock_retry_backoff_max = 0.2
    before = current_app._get_current_object()
    app.set_current()
    yield app
    before.set_current()
    app.close()


@pytest.fixture
def lock(nodes: Nodes) -> Iterator[Redlock]:
    """Yield the application's own lock; its nodes do not exist."""
    redlock = Redlock(["redis://127.0.0.1:1/0"], ttl=10.0)
    yield redlock
    redlock.close()


# -- Locks


def test_lock_of_a_key_admits_one_holder_at_a_time(lock: Redlock, nodes: Nodes) -> None:
    with lock.lock("order:1"):
        assert nodes.redlock.try_acquire("order:1") is None
        assert nodes.redlock.try_acquire("order:2") is not None
    assert nodes.redlock.acquire("order:1", wait=SOON).remaining() > 0


def test_holder_is_returned_and_named_in_the_refusal(lock: Redlock, nodes: Nodes) -> None:
    with nodes.hold("order:1") as lease:
        holder = lock.holder("order:1")
        assert holder is not None and holder.owner is not None
        assert holder.owner.host == "another-host" and holder.nodes >= holder.quorum
        with pytest.raises(ResourceHeld, match="another-host"):
            lock.acquire("order:1")
        assert not lease.lost
    # A quorum has freed it when the block is left; the last of the real nodes a moment later.
    wait_until(lambda: lock.holder("order:1") is None, SOON, "nobody holds it")


@pytest.mark.parametrize("resource", ["order:1", ["order:1", "order:3"]])
def test_waiter_is_woken_by_the_release(
    lock: Redlock, nodes: Nodes, resource: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "RETRY_AFTER_S", (600.0, 600.0))  # not by itself
    entered = threading.Event()

    def wait() -> None:
        with nodes.redlock.lock(resource, wait=600.0):
            entered.set()

    # A waiter that is not woken looks when the holder's ttl is over.
    lease = lock.acquire("order:1", ttl=600.0)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not entered.wait(0.5)  # by then it has looked for how long the holder's ttl lasts
    lock.release(lease)
    assert entered.wait(SOON)
    thread.join(SOON)


# -- Trouble


def test_lock_without_a_quorum_is_unavailable(lock: Redlock, nodes: Nodes) -> None:
    assert lock.try_acquire("order:0") is not None
    nodes.partition(0, 2)
    with pytest.raises(QuorumUnavailable):
        lock.acquire("order:1")
    nodes.heal()
    assert wait_until(lambda: lock.acquire("order:1", wait=SOON), SOON, "a quorum is back")


def test_lock_released_while_a_node_was_away_is_freed_when_it_is_back(
    lock: Redlock, nodes: Nodes
) -> None:
    lease = lock.acquire("order:1", ttl=600.0)
    nodes.partition(0)
    lock.release(lease)
    nodes.heal()
    # Were it still held on node 0, one more that is away would leave no quorum.
    nodes.partition(1)

    def granted() -> bool:
        other = nodes.redlock.try_acquire("order:1")
        return other is not None and nodes.redlock.release(other)

    wait_until(granted, SOON, "the node that was away has freed it")


def on_all_nodes(lock: Redlock) -> None:
    """Wait until the last node has the key, too; a quorum is enough for the grant."""

    def there() -> bool:
        holder = lock.holder("order:1")
        return holder is not None and holder.nodes == 3

    wait_until(there, SOON, "all nodes have it")


@pytest.mark.parametrize("how", ["steal", "forget"])
def test_holder_of_a_stolen_lock_is_notified_of_its_loss(
    lock: Redlock, nodes: Nodes, how: str
) -> None:
    told: list[Any] = []
    with lock.lock("order:1", on_lost=told.append) as held:
        on_all_nodes(lock)
        if how == "steal":
            nodes.steal("order:1")
        else:
            nodes.forget()
            other = nodes.redlock.acquire("order:1")
            nodes.extend()
            assert other.remaining() > 0
        wait_until(lambda: told, SOON, "the holder is told")
        assert held.lost
        with pytest.raises(LeaseLost):
            held.ensure()
    assert nodes.redlock.holder("order:1") is not None, "the loser freed what is another's"


# -- Tasks


def test_eager_tasks_lock(nodes: Nodes, app: Celery) -> None:
    app.conf.task_always_eager = True

    @app.task(shared=False, base=SingletonTask, name="shop.rebuild")
    def rebuild(report: int) -> int:
        assert_locked(rebuild, report)
        assert_free(rebuild, report + 1)
        return report

    @app.task(shared=False, name="shop.charge")
    @locked("order:<order_id>", fencing=True)
    def charge(order_id: int) -> int | None:
        assert_locked("order:7", by=current_lease())
        return current_lease().fencing_token

    assert rebuild.delay(1).get() == 1
    assert_free(rebuild, 1)
    first, second = charge.delay(7).get(), charge.delay(7).get()
    assert first < second
    with nodes.hold(charge, 7):
        assert isinstance(charge.delay(7).result, ResourceHeld)
        assert isinstance(charge.apply([7]).result, ResourceHeld)


def test_body_whose_lease_is_lost_is_stopped(nodes: Nodes, app: Celery) -> None:
    @app.task(shared=False, base=SingletonTask, name="shop.rebuild")
    def rebuild() -> str:
        nodes.steal(rebuild)
        time.sleep(SOON)
        return "not stopped"

    with pytest.raises(LeaseLost):
        rebuild()


def test_nodes_of_the_stage_pass_the_check_of_a_starting_worker(nodes: Nodes, app: Celery) -> None:
    redlock = Redlock.from_app(app)
    assert redlock.check() == []
    assert redlock.client.answering == len(nodes)


def test_worker_in_the_process_of_the_test_locks(nodes: Nodes, app: Celery) -> None:
    entered, go_on = threading.Event(), threading.Event()

    @app.task(shared=False, base=SingletonTask, name="shop.rebuild", lock_on_conflict="skip")
    def rebuild(report: int) -> int:
        if report == 1:
            entered.set()
            assert go_on.wait(SOON)
        return report

    @app.task(shared=False, base=SingletonTask, name="shop.export", lock_scope="until_executed")
    def export(report: int) -> int:
        return report

    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        first = rebuild.delay(1)
        assert entered.wait(SOON)
        assert_locked(rebuild, 1, by=first)
        assert_free(rebuild, 2)
        skipped = assert_skipped(rebuild.delay(1), within=SOON)
        assert first.id in skipped["holder"]
        go_on.set()
        assert first.get(timeout=SOON, interval=0.01) == 1
        assert_free(rebuild, 1, within=SOON)
        with nodes.hold(rebuild, 2):
            assert_skipped(rebuild.delay(2), within=SOON)
        assert rebuild.delay(2).get(timeout=SOON, interval=0.01) == 2
        with nodes.hold(export, 3):
            waits = export.delay(3)
            assert export.delay(3).id == waits.id
        assert waits.get(timeout=SOON, interval=0.01) == 3
        assert_free(export, 3, within=SOON)


class Timed(Task):
    """A task class as apps have them: it calls the body through Celery's own `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def test_lock_under_a_custom_call_is_freed_in_a_test_worker(nodes: Nodes, app: Celery) -> None:
    """Such a worker is not optimized: Celery's `__call__` pushes a copy of the request."""

    @app.task(shared=False, base=Timed, name="shop.timed")
    @locked("timed:<report>")
    def timed(report: int) -> bool:
        assert_locked(f"timed:{report}")
        return current_lease() is not None

    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False):
        assert timed.delay(1).get(timeout=SOON, interval=0.01) is True
        assert_free("timed:1", within=SOON)


def test_reservation_of_a_task_can_be_asserted(nodes: Nodes, app: Celery) -> None:
    @app.task(shared=False, base=SingletonTask, name="shop.export", lock_scope="until_executed")
    def export(report: int) -> int:
        return report

    first = export.delay(1)
    assert_reserved(export, 1, by=first)
    assert export.delay(1).id == first.id
    with pytest.raises(AssertionError, match=rf"reserved by .*{first.id}"):
        assert_free(export, 1, within=0)
    with pytest.raises(AssertionError, match="not locked"):
        assert_locked(export, 1, within=0)


def test_redirected_locks_are_as_before_after_the_block(
    request: pytest.FixtureRequest, app: Celery
) -> None:
    mine = Redlock(["redis://127.0.0.1:1/0"], restart_guard="uptime")
    before = dict(vars(mine))
    for stage in (faked, lambda: real(servers=request.getfixturevalue("servers")[:3])):
        with stage() as nodes:  # type: ignore[operator]
            made_inside = Redlock(["redis://127.0.0.1:2/0"])
            assert Redlock.from_app(app).nodes == made_inside.nodes
            assert mine.nodes == made_inside.nodes == nodes.redlock.nodes
            with mine.lock("order:1"):
                assert made_inside.try_acquire("order:1") is None
        assert vars(mine) == before
        with pytest.raises(ConfigurationError, match="the broker is no Redis"):
            Redlock.from_app(app)
        assert made_inside.nodes == ("127.0.0.1:2",)
        with pytest.raises(QuorumUnavailable):
            made_inside.acquire("order:1")
        made_inside.close()
    mine.close()
