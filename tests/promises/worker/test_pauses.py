"""Paused keys: no body of theirs begins, none of their tasks is lost, and all go on afterwards."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock import Redlock
from celery_redlock.locking import pauses
from celery_redlock.server import start_servers
from tests.promises.worker.parking import Sent
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import SOON, Cluster
from tests.support.machine import in_time
from tests.support.nodes import lock_url, with_acl_user
from tests.support.postgres_sites import empty_server, new_database
from tests.support.wait import wait_until
from tests.support.worker import Worker, often

KNOWN_S = 2.0
"""Within which every worker knows of a pause."""
WHO = "alice@web-1"
numbers = itertools.count()


@contextlib.contextmanager
def paused(cluster: Cluster, pattern: str, seconds: float = 60.0) -> Iterator[float]:
    """Pause it for a block; yields when that was, once every worker must know."""
    begun = time.monotonic()
    pauses.begin(cluster.redlock, pattern, seconds, WHO, "a bad release")
    try:
        held = False
        while not held:  # a probe with a key of its own: it ends, or is held back
            probe = cluster.send("work", f"{pattern[2:-1]}probe{next(numbers)}", 0.0)
            state = functools.partial(cluster.app.backend.get_task_meta, probe.id)
            ends = time.monotonic() + 1.0  # a busy worker has taken it up by then
            while time.monotonic() < ends and state()["status"] in ("PENDING", "RETRY"):
                time.sleep(0.05)
            held = state()["status"] in ("PENDING", "RETRY")
            in_time(begun, time.monotonic(), KNOWN_S + 5.0, "from a pause to a task held back")
        wait_until(lambda: time.monotonic() >= begun + KNOWN_S, KNOWN_S + 5.0, "all know")
        yield begun
    finally:
        pauses.resume(cluster.redlock, pattern)


def passed_by(cluster: Cluster) -> None:
    """Wait until a task of another key has run: earlier messages have reached the worker."""
    for _ in range(3):
        assert cluster.state(cluster.send("work", f"other{next(numbers)}", 0.0)) == "SUCCESS"


def go_on(cluster: Cluster, sent: Sent, within: float = SOON) -> None:
    """The pause is over: all of these begin."""
    begun = time.monotonic()
    wait_until(
        lambda: {one.id for one in sent} <= {line.task for line in cluster.lines("enter")},
        within + 20.0,
        "all have begun",
    )
    in_time(begun, time.monotonic(), within, "from the end of a pause until all have begun")
    assert {cluster.state(one) for one in sent} == {"SUCCESS"}


def none_ran(cluster: Cluster, sent: Sent) -> None:
    began = {line.task for line in cluster.lines("enter")}
    assert not began & {one.id for one in sent}


KINDS = ("prefork", "threads", "gevent")
WORKERS = {
    "prefork": ("-c", "2"),
    "threads": ("-P", "threads", "-c", "2"),
    "gevent": ("-P", "gevent", "-c", "2"),
    "postgresql": ("-c", "2"),
    "unparked": ("-c", "2"),
}


@pytest.fixture(scope="module", params=[*map(often, KINDS), "postgresql", "unparked"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Worker]]:
    """A worker of each kind, over three Redis nodes or PostgreSQL."""
    kind = request.param
    conf: dict[str, Any] = {"redlock_parking": False} if kind == "unparked" else {}
    with contextlib.ExitStack() as stack:
        *nodes, broker = stack.enter_context(start_servers(4, config=with_acl_user()))
        if kind == "postgresql":
            conf["redlock_nodes"] = [new_database(stack.enter_context(empty_server()))]
        cluster = Cluster(nodes, broker, tmp_path_factory.mktemp(kind), **conf)
        urls = conf.get("redlock_nodes") or [lock_url(node) for node in nodes]
        cluster.redlock.close()
        cluster.redlock = Redlock(urls, ttl=30.0, restart_guard="off")
        with cluster.worker(*WORKERS[kind]) as worker:
            yield cluster, worker
        cluster.close()


def test_paused_tasks_do_not_begin_and_go_on_within_a_second(place: tuple[Cluster, Worker]) -> None:
    """Whatever the policy: running bodies end, parked deliveries wait, and others pass."""
    cluster, worker = place
    key = f"all{next(numbers)}-"
    running = cluster.send("until_told_retry", f"{key}1")
    cluster.entered(f"{key}1")
    waiting = cluster.send("work", f"{key}1", 0.0)
    with paused(cluster, f"k:{key}*"):
        tasks = ("work", "conflict_skip", "conflict_raise", "late", "under", "policy_replace")
        sent = [
            cluster.send(task, f"{key}{task}", *([0.0] if task in ("work", "late") else []))
            for task in tasks
        ]
        sent.append(cluster.send("move", f"free{key}", f"{key}second", 0.0))
        sent.append(cluster.send("work", f"{key}eta", 0.0, countdown=0.2))
        cluster.tell(f"{key}1")
        cluster.tell(f"{key}policy_replace")
        assert cluster.state(running) == "SUCCESS"
        passed_by(cluster)
        none_ran(cluster, [*sent, waiting])
        if "redlock_parking" not in cluster.conf:
            worker.said(f"k:{key}* is paused by {WHO} until ")
            assert "UTC: a bad release; tasks of its keys wait" in worker.text
            assert worker.text.count(f"k:{key}* is paused by") >= 1
        else:
            worker.said("waits (paused, attempt 1, next in ")
    go_on(cluster, [*sent, waiting], 2.0 if "redlock_parking" in cluster.conf else SOON)
    cluster.settled()


def test_paused_task_in_the_queue_of_the_pool_does_not_begin(place: tuple[Cluster, Worker]) -> None:
    """The pool received it before the pause, and has a slot for it only afterwards."""
    cluster, _worker = place
    key = f"pool{next(numbers)}-"
    busy = [f"busy{next(numbers)}" for _ in range(2)]
    for one in busy:
        cluster.send("until_told_retry", one)
        cluster.entered(one)
    sent = [cluster.send("work", f"{key}{number}", 0.0) for number in range(3)]
    # A full pool of greenlets stops its worker: it has the first of them only.
    wait_until(lambda: cluster.queued() < 3, 10.0, "the worker has them")
    pauses.begin(cluster.redlock, f"k:{key}*", 60.0, WHO)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + KNOWN_S, 10.0, "every worker must know")
    for one in busy:
        cluster.tell(one)
    passed_by(cluster)
    none_ran(cluster, sent)
    pauses.resume(cluster.redlock, f"k:{key}*")
    go_on(cluster, sent, 2.0 if "redlock_parking" in cluster.conf else SOON)
    cluster.settled()


def at_work(cluster: Cluster, key: str) -> int:
    """Return the number of bodies of a key with a limit that are at work."""
    return len(cluster.lines("in", key)) - len(cluster.lines("out", key))


@pytest.mark.parametrize("place", ["prefork", "unparked", "postgresql"], indirect=True)
def test_limit_lowered_while_tasks_run_is_obeyed(place: tuple[Cluster, Worker]) -> None:
    """From two to one: the second waits until none runs, and then one runs at a time."""
    cluster, worker = place
    key = f"limit{next(numbers)}"
    begun = time.monotonic()
    pauses.begin(cluster.redlock, f"crowd:{key}", 60.0, WHO, "slow", 1)
    worker.said(f"crowd:{key} is limited to 1 at a time by {WHO} until")
    worker.said("UTC: slow; further tasks that declare a limit wait")
    wait_until(lambda: time.monotonic() > begun + KNOWN_S, 10.0, "every worker must know")
    sent = [cluster.send("crowd", key, 0.6) for _ in range(3)]
    for number in range(1, 3):
        wait_until(lambda n=number: len(cluster.lines("in", key)) >= n, 20.0, "it begins")
        assert at_work(cluster, key) == 1
    pauses.resume(cluster.redlock, f"crowd:{key}")
    worker.said(f"the operator's limit for crowd:{key} has ended; declared limits apply")
    assert {cluster.state(one, 20.0) for one in sent} == {"SUCCESS"}
    more = [cluster.send("crowd", key, 3.0) for _ in range(2)]
    wait_until(lambda: at_work(cluster, key) == 2, 20.0, "two are at work again")
    assert {cluster.state(one, 20.0) for one in more} == {"SUCCESS"}
    cluster.settled()


@pytest.mark.parametrize("place", ["prefork"], indirect=True)
def test_raised_limit_lets_more_parked_tasks_begin_at_once(place: tuple[Cluster, Worker]) -> None:
    """The third of three parked tasks has waited for one of two."""
    cluster, _worker = place
    key = f"raised{next(numbers)}"
    with cluster.worker("-c", "3", queue="raised") as _other:
        sent = [cluster.send("crowd", key, 8.0, queue="raised") for _ in range(3)]
        wait_until(lambda: at_work(cluster, key) == 2, 20.0, "two are at work")
        raised = time.monotonic()
        pauses.begin(cluster.redlock, f"crowd:{key}", 60.0, WHO, "", 3)
        wait_until(lambda: at_work(cluster, key) == 3, 7.0, "the third begins before they end")
        in_time(raised, time.monotonic(), KNOWN_S + 2.0, "from the new limit to the third")
        pauses.resume(cluster.redlock, f"crowd:{key}")
        assert {cluster.state(one, 20.0) for one in sent} == {"SUCCESS"}


@pytest.mark.parametrize("place", ["prefork"], indirect=True)
def test_duplicate_is_refused_during_a_pause_as_before(place: tuple[Cluster, Worker]) -> None:
    cluster, _worker = place
    reservations = Reservations(cluster)
    key = f"reserved{next(numbers)}-"
    with paused(cluster, f"k:{key}*"):
        first = reservations.until_executed.delay(f"{key}1")
        assert reservations.until_executed.delay(f"{key}1").id == first.id
        copy = cluster.send("until_executed", f"{key}1")  # by a program that reserves nothing
        passed_by(cluster)
        none_ran(cluster, [first, copy])
        assert reservations.of(f"{key}1") == first.id
    assert cluster.state(first) == "SUCCESS"
    assert cluster.state(copy) == "SUCCESS"
    assert len(cluster.runs(f"{key}1", first)) == 1
    reservations.freed(f"{key}1")
    reservations.close()


@pytest.mark.parametrize("place", ["prefork"], indirect=True)
def test_paused_task_can_be_revoked_and_goes_to_another_worker(
    place: tuple[Cluster, Worker],
) -> None:
    """It goes when its own worker stops; the other one has the pause from its start on."""
    cluster, _worker = place
    key = f"stops{next(numbers)}-"
    with cluster.worker("-c", "1", queue="stops") as first, paused(cluster, f"k:{key}*"):
        stamp = {"stamped_headers": ["who"], "who": key}
        kept, revoked, stamped = (
            cluster.send("work", f"{key}{number}", 0.0, queue="stops", **options)
            for number, options in enumerate(({}, {}, stamp))
        )
        for number, one in enumerate((kept, revoked, stamped)):
            first.said(f"work[{one.id}] waits (paused) for k:{key}{number}")
        revoked.revoke()
        cluster.app.control.revoke_by_stamped_headers({"who": key})
        assert cluster.state(revoked) == "REVOKED"
        assert cluster.state(stamped) == "REVOKED"
        first.terminate()
        first.ended()
        assert f"work[{revoked.id}]\n" in first.text.split("Discarding revoked task")[1]
        with cluster.worker("-c", "1", queue="stops") as second:
            second.said(f"work[{kept.id}] waits", 20.0)
            none_ran(cluster, [kept])
            pauses.resume(cluster.redlock, f"k:{key}*")
            go_on(cluster, [kept], 2.0)
    cluster.settled()


@pytest.mark.parametrize("place", ["prefork"], indirect=True)
def test_retry_deadline_does_not_run_during_a_pause(place: tuple[Cluster, Worker]) -> None:
    """A task may wait 0.6 s for one holder; during the pause there is no holder."""
    cluster, _worker = place
    key = f"deadline{next(numbers)}-"
    with paused(cluster, f"k:{key}*"):
        sent = [cluster.send("conflict_deadline", f"{key}1", 0.3) for _ in range(2)]
        time.sleep(1.5)  # longer than its deadline
    assert {cluster.state(one) for one in sent} == {"SUCCESS"}
