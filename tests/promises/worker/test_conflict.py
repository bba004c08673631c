"""A task whose lock is held: it waits its turn, is skipped, or fails."""

from __future__ import annotations

import time

from celery import chain, chord

from tests.support.cluster import TASKS, Cluster
from tests.support.wait import wait_until
from tests.support.worker import Worker


def test_conflicting_task_waits_its_turn_and_keeps_id_and_retries(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """It is sent again in state RETRY, its retries unspent; `max_retries` is 0."""
    with cluster.states() as states:
        with cluster.redlock.lock(f"k:{key}"):
            sent = cluster.send("conflict_retry", key)
            wait_until(lambda: "RETRY" in states.get(sent.id, []), 5.0, "a retry")
            assert cluster.runs(key) == []
        assert cluster.result(sent) == {"retries": 0, "id": sent.id}
        wait_until(lambda: states[sent.id][-1] == "SUCCESS", 10.0, "SUCCESS was announced")
    assert set(states[sent.id]) == {"RETRY", "SUCCESS"}
    (line,) = cluster.lines("attempts", f"k:{key}")
    assert line.detail["held"] == states[sent.id].count("RETRY")
    assert line.detail["unavailable"] == 0
    assert 0 < time.time() - line.detail["since"] < 10
    assert len(cluster.runs(key, sent)) == 1
    cluster.settled()


def test_final_state_is_not_hidden_by_an_earlier_retry(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """A slow process, between sending a message again and its end, does not store RETRY late."""
    with cluster.redlock.lock(f"k:{key}"):
        sent = cluster.send("slow_to_say", key)
        worker.said(f"slow_to_say[{sent.id}] waits (held, attempt 1")
    assert cluster.state(sent) == "FAILURE"
    cluster.tell(key)
    worker.said(f"slow_to_say[{sent.id}] retry: in ")
    assert cluster.state(sent) == "FAILURE"
    cluster.settled()


def test_crowd_takes_turns_by_every_way_to_declare_a_lock(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """Three children work on one resource."""
    ways = ["under", "over", "shared_under", "shared_over", "by_class", "conflict_retry"]
    sent = [cluster.send(way, key, 0.02) for way in ways for _ in range(3)]
    for one in sent:
        cluster.result(one, timeout=30.0)
    cluster.settled()
    assert len(cluster.runs(key)) == len(sent)
    assert {result for one in sent[:-3] if (result := one.result)} == {f"k:{key}"}
    cluster.free(key)


def test_error_callbacks_wait_for_their_turn(cluster: Cluster, worker: Worker, key: str) -> None:
    """The tasks: one that raises, one whose process dies (its worker calls), and a chord."""
    callback = cluster.signature("compensate", key)
    failing = [(f"{key}-{how}", 0.01, how) for how in ("raise", "SIGKILL")]
    with cluster.redlock.lock(f"k:{key}"):
        sent = [cluster.send("work", *args, link_error=callback) for args in failing]
        body = cluster.signature("total").on_error(callback)
        chord([cluster.signature("work", f"{key}-member", 0.01, "raise")])(body)
        assert [cluster.state(one) for one in sent] == ["FAILURE"] * 2
        line = "compensate, the error callback of "
        wait_until(lambda: worker.text.count(line) >= 3, 10.0, "three callbacks were sent")
        assert cluster.lines("compensated", f"k:{key}") == []
    name = f"k:{key}"
    wait_until(lambda: len(cluster.lines("compensated", name)) == 3, 10.0, "three have run")
    found = {line.detail[1]: line for line in cluster.lines("compensated", name)}
    work = f"{TASKS}.work"
    assert found["ValueError"].detail == [work, "ValueError", list(failing[0])]
    assert found["WorkerLostError"].detail == [work, "WorkerLostError", list(failing[1])]
    assert found["ChordError"].detail[0] == f"{TASKS}.total"
    cluster.settled()


# -- the predecessor rule ------------------------------------------------------------------------


def test_chain_link_waits_for_its_predecessor(cluster: Cluster, worker: Worker, key: str) -> None:
    """In `chain(t(x), t(x))` the second is published while the first has their key."""
    with cluster.states() as states:
        last = chain(
            [cluster.signature("link", key).set(immutable=True) for _ in range(3)]
        ).apply_async()
        links = [last.parent.parent, last.parent, last]

        def done() -> bool:
            return all(states.get(one.id, [""])[-1] == "SUCCESS" for one in links)

        wait_until(done, 10.0, "all links have succeeded")
    assert [states[one.id] for one in links] == [["SUCCESS"]] * 3  # and no RETRY
    assert len(cluster.runs(key)) == 3


def test_retry_waits_for_its_predecessor(cluster: Cluster, worker: Worker, key: str) -> None:
    with cluster.states() as states:
        sent = cluster.send("slow_after_retry", key)
        assert cluster.result(sent) == 1
    assert states[sent.id].count("RETRY") == 1  # the user's; none for want of the lock
    assert len(cluster.runs(key, sent)) == 2
