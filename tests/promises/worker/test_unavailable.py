"""Too few nodes answer: by default nothing runs unlocked, and all of it runs when one is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_redlock import QuorumUnavailable
from tests.support.cluster import Cluster
from tests.support.wait import wait_until
from tests.support.worker import Worker


@pytest.fixture
def majority_dead(cluster: Cluster, worker: Worker) -> Iterator[None]:
    for node in cluster.nodes[:3]:
        node.kill()
    yield
    revive(cluster)


def revive(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.start()

    def locks() -> bool:
        try:
            cluster.free("revived")
        except QuorumUnavailable:
            return False
        return True

    wait_until(locks, 10.0, "the nodes are reached again")


def test_on_unavailable_run_takes_the_lock_where_a_quorum_answers(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The option concerns a missing quorum, not a lock that another holds."""
    with cluster.redlock.lock(f"k:{key}"):
        sent = cluster.send("unavailable_run", key)
        worker.said(f"unavailable_run[{sent.id}] waits (held, attempt 1")
        assert cluster.runs(key) == []
    assert cluster.result(sent) == {"retries": 0, "id": sent.id}


def test_tasks_wait_for_a_quorum_and_run_when_it_is_back(
    cluster: Cluster, worker: Worker, key: str, majority_dead: None
) -> None:
    with cluster.states() as states:
        sent = [cluster.send("conflict_retry", f"{key}{i}") for i in range(4)]

        def all_retried() -> bool:
            return all(states.get(one.id, []).count("RETRY") >= 2 for one in sent)

        wait_until(all_retried, 10.0, "all were sent again twice")
        assert not any(cluster.runs(f"{key}{i}") for i in range(4))  # nothing ran unlocked
        cluster.nodes[0].start()  # three of five
        for one in sent:
            assert cluster.result(one) == {"retries": 0, "id": one.id}
    for i, one in enumerate(sent):
        (line,) = cluster.lines("attempts", f"k:{key}{i}")
        assert line.detail["unavailable"] >= 2
        assert line.detail["held"] == 0
        assert len(cluster.runs(f"{key}{i}", one)) == 1
    assert f"conflict_retry[{sent[0].id}] waits (unavailable, attempt 1" in worker.text
    cluster.settled()


def test_on_unavailable_raise_and_run_act_without_a_quorum(
    cluster: Cluster, worker: Worker, key: str, majority_dead: None
) -> None:
    sent = cluster.send("unavailable_raise", key)
    with pytest.raises(QuorumUnavailable) as raised:
        cluster.result(sent)
    for node in cluster.nodes[:3]:  # it names each node's reason
        assert f"127.0.0.1:{node.port} silent (" in str(raised.value)
    assert cluster.runs(key) == []
    worker.said(f"unavailable_raise[{sent.id}] raised expected: QuorumUnavailable(")
    lines = [line for line in worker.text.splitlines() if sent.id in line]
    assert [line.split(": ", 1)[1].split("/")[0] for line in lines[1:]] == ["WARNING", "INFO"]
    assert f"[{sent.id}] fails, because it cannot be locked: k:{key}: " in lines[1]
    assert "Traceback" not in worker.text.partition(sent.id)[2]
    sent = cluster.send("unavailable_run", key)
    assert cluster.result(sent) == {"retries": 0, "id": sent.id}
    assert len(cluster.runs(key)) == 1
    worker.said(f"unavailable_run[{sent.id}] runs WITHOUT its lock")
