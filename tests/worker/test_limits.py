"""However many tasks wait in a worker, a process has two connections to a node at most."""

from __future__ import annotations

import redis

from celery_redlock.server import LocalServer
from tests.support.cluster import Cluster
from tests.support.wait import wait_until


def connections(node: LocalServer, since: set[int]) -> list[bool]:
    """Return, for each new connection of locks, if it is one that listens."""
    with redis.Redis.from_url(node.url) as client:
        return sorted(
            int(one["sub"]) > 0
            for one in client.client_list()
            if one["name"] == "celery_redlock" and int(one["id"]) not in since
        )


def known(node: LocalServer) -> set[int]:
    with redis.Redis.from_url(node.url) as client:
        return {int(one["id"]) for one in client.client_list()}


def test_threads_that_wait_share_two_connections_to_a_node(cluster: Cluster, key: str) -> None:
    cluster.redlock.connect()
    for node in cluster.nodes:
        wait_until(lambda n=node: connections(n, set()), 5, "the test's own is connected")
    before = [known(node) for node in cluster.nodes]
    with cluster.worker("-c", "64", "-P", "threads") as worker:
        first = cluster.send("patient", key, 2.0)
        cluster.entered(key)
        rest = [cluster.send("patient", key, 0.001) for _ in range(80)]
        for node, old in zip(cluster.nodes, before, strict=True):
            wait_until(
                lambda n=node, o=old: connections(n, o) == [False, True], 5, "they listen by one"
            )
        assert cluster.result(first) == "done"
        for sent in rest:
            assert cluster.result(sent, timeout=60.0) == "done"
        for node, old in zip(cluster.nodes, before, strict=True):
            assert len(connections(node, old)) <= 2
        worker.terminate()
        assert worker.ended() == 0
    for node, old in zip(cluster.nodes, before, strict=True):
        wait_until(lambda n=node, o=old: connections(n, o) == [], 5, "all are closed")
