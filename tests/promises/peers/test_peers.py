"""Where celery-once, celery-singleton and celery-heimdall leave a lock behind, lose a task or run
two: one test a row, in the order of the table in docs/migrating.md.

In each the outcome is right, no two bodies overlap (the oracle, after every test), and afterwards
neither a lock nor a reservation is left on any node.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from kombu.exceptions import OperationalError

from celery_redlock import Skipped
from tests.promises.peers.project import SHORT
from tests.promises.peers.site import Site
from tests.support import bodies, forked
from tests.support.cluster import SOON
from tests.support.machine import stalled
from tests.support.wait import died, wait_until
from tests.support.worker import ROOT, Worker

LONG = 30.0
"""Seconds that a body lasts which does not come to its end by itself."""


def begun(site: Site, key: str, task: str = "work", *args: Any, **options: Any) -> Any:
    """Publish a task and wait for its body; a second call meanwhile returns the first."""
    published = getattr(site.task, task)
    sent = published.apply_async((key, *(args or (LONG,))), **options)
    site.entered(key)
    assert site.reserved(key)
    assert published.delay(key).id == sent.id
    return sent


# -- endings -----------------------------------------------------------------------------------


def test_killed_pool_child_leaves_nothing_reserved(site: Site, worker: Worker, key: str) -> None:
    sent = begun(site, key)
    os.kill(site.runs(key)[0].pid, signal.SIGKILL)
    died(site.runs(key)[0].pid)
    site.nothing_left(key)
    assert site.state(sent) == "FAILURE"
    site.as_new(key)


def test_killed_worker_leaves_its_key_for_a_ttl_at_most(
    site: Site, worker: Worker, key: str
) -> None:
    """Its message is acknowledged, so only the ttl of the body's lock is left to free it."""
    with site.worker("-c", "1", queue="doomed") as doomed:
        begun(site, key, "brief", queue="doomed")
        os.kill(doomed.process.pid, signal.SIGKILL)
        doomed.ended()
    site.as_new(key, within=SHORT + SOON, most=len(site.nodes) // 2)


def test_task_revoked_before_its_start_leaves_nothing_reserved(
    site: Site, worker: Worker, key: str
) -> None:
    sent = site.task.work.apply_async((key,), countdown=1.0)
    assert site.reserved(key)
    site.app.control.revoke(sent.id)
    worker.said(f"Tasks flagged as revoked: {sent.id}")
    assert site.state(sent) == "REVOKED"
    assert site.runs(key) == []
    site.as_new(key)


def test_task_terminated_while_it_runs_leaves_nothing_reserved(
    site: Site, worker: Worker, key: str
) -> None:
    sent = begun(site, key)
    site.app.control.revoke(sent.id, terminate=True)
    died(site.runs(key)[0].pid)
    site.nothing_left(key)
    assert site.state(sent) == "REVOKED"
    site.as_new(key)


def test_task_expired_before_its_start_leaves_nothing_reserved(
    site: Site, worker: Worker, key: str
) -> None:
    sent = site.task.work.apply_async(
        (key,), countdown=0.8, expires=0.4, lock={"reserve_ttl": 60.0}
    )
    assert site.reserved(key)
    assert site.state(sent) == "REVOKED"
    assert site.runs(key) == []
    site.as_new(key)


def test_task_at_its_hard_time_limit_leaves_nothing_reserved(
    site: Site, worker: Worker, key: str
) -> None:
    sent = site.task.work.apply_async((key, LONG), time_limit=0.5)
    site.entered(key)
    died(site.runs(key)[0].pid)
    site.nothing_left(key)
    assert site.state(sent) == "FAILURE"
    site.as_new(key)


def test_failed_publication_leaves_nothing_reserved(site: Site, worker: Worker, key: str) -> None:
    once = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    with socket.socket() as nobody, site.sender(broker_transport_options=once) as task:
        nobody.bind(("127.0.0.1", 0))
        task.work.app.conf.broker_url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        with pytest.raises(OperationalError):
            task.work.apply_async((key,), retry=False)
        site.as_new(key)


def test_task_retried_twice_stays_reserved_between_its_tries(
    site: Site, worker: Worker, key: str
) -> None:
    sent = site.task.tries.delay(key)
    assert site.task.tries.delay(key).id == sent.id

    def another() -> Any:
        published = site.task.tries.delay(key)
        return published if published.id != sent.id else None

    after = wait_until(another, 20.0, "another is published", every=0.01)  # three tries later
    assert len(site.runs(key, sent)) == 3, "another was published between two tries"
    assert site.result(sent) == site.result(after) == 2
    assert len(site.runs(key)) == 6
    site.as_new(key)


# -- canvas ------------------------------------------------------------------------------------


def test_chain_of_the_same_task_twice_runs_both(site: Site, worker: Worker, key: str) -> None:
    work, sink = site.task.work, site.task.sink
    sent = chain(work.si(key, 0.2), work.si(key, 0.2), sink.si("end")).apply_async()
    assert site.result(sent) == "end"
    assert len(site.runs(key)) == 2
    site.as_new(key)


def test_chain_whose_head_is_a_duplicate_goes_on(site: Site, worker: Worker, key: str) -> None:
    """The head ends with the marker of a skipped task."""
    first = begun(site, key)
    sent = chain(site.task.work.s(key), site.task.sink.s()).apply_async()
    marker = Skipped.of(site.result(sent))
    assert marker and first.id in marker["holder"]
    site.tell(key)
    assert site.result(first) == "done"
    assert len(site.runs(key)) == 1
    site.as_new(key)


def test_chord_of_the_same_task_twice_ends(site: Site, worker: Worker, key: str) -> None:
    work, sink = site.task.work, site.task.sink
    sent = chord([work.s(key, 0.5), work.s(key, 0.5)], sink.s()).apply_async()
    results = site.result(sent)
    assert len(results) == 2
    assert results.count("done") == len(site.runs(key)) >= 1
    assert all(result == "done" or Skipped.of(result) for result in results)
    site.as_new(key)


# -- other ways to run a task --------------------------------------------------------------------


def test_plain_call_neither_takes_nor_needs_a_reservation(
    site: Site, worker: Worker, key: str
) -> None:
    assert site.task.work(key) == "done"
    site.nothing_left(key, within=0.1)
    sent = site.task.work.apply_async((key,), queue="parked")
    assert site.task.work(key) == "done"
    assert site.task.work.delay(key).id == sent.id
    site.unpark()
    assert site.result(sent) == "done"
    assert len(site.runs(key)) == 3
    site.as_new(key)


def test_task_sent_twice_by_name_runs_once(site: Site, worker: Worker, key: str) -> None:
    """The sender makes no reservation, so the duplicate is found at run time."""
    first = site.app.send_task("peers.work", (key, 0.5))
    site.entered(key)
    second = site.app.send_task("peers.work", (key, 0.5))
    assert Skipped.of(site.result(second))
    assert site.result(first) == "done"
    assert len(site.runs(key)) == 1
    site.as_new(key)


def test_same_id_delivered_twice_while_it_runs_runs_once(
    site: Site, worker: Worker, key: str
) -> None:
    """The copy neither runs beside the first nor, as that one succeeds, after it."""
    sent = site.task.late.delay(key, 0.6)
    site.entered(key)
    deliver_again(site, sent.id)
    wait_until(
        lambda: worker.text.count(f"peers.late[{sent.id}] received") == 2, 5.0, "the copy is there"
    )
    assert site.result(sent) == "done"
    site.settled()
    assert len(site.runs(key)) == 1
    assert sent.state == "SUCCESS"
    site.as_new(key)


def deliver_again(site: Site, task_id: str) -> None:
    """Deliver again, as a broker does that received no acknowledgement in time."""
    raw = [json.loads(line)[0] for line in site.client.hvals("unacked")]
    (message,) = [one for one in raw if one["headers"]["id"] == task_id]
    message["properties"]["delivery_tag"] = str(uuid.uuid4())
    message["properties"]["delivery_info"]["redelivered"] = True
    site.client.lpush("celery", json.dumps(message))


def test_body_longer_than_the_ttl_runs_once(site: Site, worker: Worker, key: str) -> None:
    sent = site.task.brief.apply_async((key, 2.5 * SHORT), lock={"reserve_ttl": SHORT})
    run = site.entered(key)
    late = run.begin + 2.0 * SHORT
    wait_until(lambda: time.monotonic() > late, 5.0, "both ttls are over twice")
    assert site.task.brief.delay(key).id == sent.id
    assert Skipped.of(site.result(site.app.send_task("peers.brief", (key,))))
    assert site.result(sent) == "done"
    assert len(site.runs(key)) == 1
    site.as_new(key)


def test_duplicate_discarded_at_run_time_leaves_the_holder_alone(
    site: Site, worker: Worker, key: str
) -> None:
    """The holder's keys on the nodes stay as they are."""
    first = begun(site, key)
    before = site.taken(key)
    assert len(before) == 2 * len(site.nodes)
    for _ in range(2):
        duplicate = site.app.send_task("peers.work", (key,))
        assert Skipped.of(site.result(duplicate))
        assert site.taken(key) == before
    assert site.task.work.delay(key).id == first.id
    site.tell(key)
    assert site.result(first) == "done"
    assert len(site.runs(key)) == 1
    site.as_new(key)


# -- arguments ---------------------------------------------------------------------------------


def published(site: Site, mark: str, *calls: Any) -> list[str]:
    """Publish calls at once, check that all run and nothing is left; return their ids."""
    call = site.task.call
    sent = [call.apply_async((mark, *args), kwargs, queue="parked") for args, kwargs in calls]
    assert site.taken(mark)
    site.unpark()
    for one in sent:
        assert mark in site.result(one)
    site.nothing_left(mark)
    return [one.id for one in sent]


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def test_position_and_keyword_are_one_key(site: Site, worker: Worker, mark: str) -> None:
    first, second = published(site, mark, ((1,), {}), ((), {"a": 1}))
    assert first == second


def test_default_left_out_and_given_are_one_key(site: Site, worker: Worker, mark: str) -> None:
    first, second = published(site, mark, ((1,), {}), ((1, 2), {}))
    assert first == second


def test_number_and_text_are_two_keys(site: Site, worker: Worker, mark: str) -> None:
    first, second = published(site, mark, ((1,), {}), (("1",), {}))
    assert first != second


def test_tuple_is_one_key_and_is_freed(site: Site, worker: Worker, mark: str) -> None:
    """It reaches the worker as a list."""
    first, second = published(site, mark, (((1, 2),), {}), (([1, 2],), {}))
    assert first == second


def test_dict_with_a_number_for_a_key_is_freed(site: Site, worker: Worker, mark: str) -> None:
    """It reaches the worker with a text as key."""
    first, second = published(site, mark, (({1: 2},), {}), (({1: 2},), {}))
    assert first == second


def test_uuid_and_datetime_arguments_make_one_key(site: Site, worker: Worker, mark: str) -> None:
    one, moment = uuid.uuid4(), datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
    ids = published(site, mark, ((one, moment), {}), ((one,), {"b": moment}), ((moment, one), {}))
    assert ids[0] == ids[1] != ids[2]


# -- beat --------------------------------------------------------------------------------------


def test_two_beats_of_one_entry_send_each_tick_once(
    site: Site, worker: Worker, tmp_path: Path
) -> None:
    """One tick of each second is published, and run."""
    with two_beats(site, tmp_path):
        before = len(site.runs("beaten"))
        site.entered("beaten", before + 4)
        times = [run.begin for run in site.runs("beaten")[before:]]
        for early, later in itertools.pairwise(times):
            assert later - early > 0.5 - stalled(early - 1.0, later), times
    site.nothing_left("beaten")
    site.settled()


@contextlib.contextmanager
def two_beats(site: Site, path: Path) -> Iterator[None]:
    """Both are up, and have each had a tick."""
    environment = {
        **os.environ,
        "TEST_CONF": json.dumps({**site.conf, "redlock_ttl": 2.0}),
        bodies.VARIABLE: site.log,
        "PYTHONPATH": str(ROOT),
    }
    logs = [path / "one", path / "two"]
    beats = []
    for output in logs:
        command = forked.celery(site.tasks, "beat", "--pidfile=", "-s", f"{output}.schedule")
        with open(output, "wb") as file:
            beats.append(forked.start(command, cwd=ROOT, env=environment, output=file))
    try:
        wait_until(lambda: all("tick" in one.read_text() for one in logs), 30.0, "both have ticked")
        yield
    finally:
        for beat in beats:
            beat.kill()
            beat.wait(10.0)
