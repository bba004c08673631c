"""The brokers that the tests of endings, policies and canvases are played on, as data."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest

from celery_redlock.server import start_servers
from tests.support.cluster import Cluster
from tests.support.nodes import with_acl_user

QUORUM = ("topic", "direct")
"""The exchange's type, with quorum queues. RabbitMQ delays what goes through a topic one."""
KINDS = ("redis", "classic", *QUORUM)
ACKS = ("early", "late")
HAS_QUORUM_QUEUES = tuple(map(int, celery.__version__.split(".")[:2])) >= (5, 5)

needs_quorum_queues = pytest.mark.skipif(
    not HAS_QUORUM_QUEUES, reason="Celery 5.4 cannot use quorum queues"
)


def kind_of(kind: str) -> Any:
    """Return the kind as a parameter of tests."""
    return pytest.param(kind, marks=needs_quorum_queues if kind in QUORUM else ())


def settings_of(
    kind: str, url: str, queue: str = "", *others: str, **arguments: Any
) -> dict[str, Any]:
    """The settings of an app on a RabbitMQ, with a queue of its own.

    Args:
        others: More queues.
        arguments: Of quorum queues, with `_` for `-`.
    """
    queue = queue or f"q{uuid.uuid4().hex[:8]}"
    settings: dict[str, Any] = {"broker_url": url, "task_default_queue": queue}
    if kind in QUORUM:
        given = {name.replace("_", "-"): value for name, value in arguments.items()}
        settings |= {
            "task_queues": {
                name: {
                    "exchange": name,
                    "exchange_type": kind,
                    "routing_key": name,
                    "queue_arguments": {"x-queue-type": "quorum", "x-delivery-limit": 20} | given,
                }
                for name in (queue, *others)
            },
            "broker_transport_options": {"confirm_publish": True},
            # What RabbitMQ keeps delayed messages in: 28 queues, and classic ones cost it less.
            "broker_native_delayed_delivery_queue_type": "classic",
        }
    if kind == "topic":
        settings["test_pause"] = 1
    return settings


@contextlib.contextmanager
def cluster_on(
    kind: str, request: pytest.FixtureRequest, path: Path, **conf: Any
) -> Iterator[Cluster]:
    """Lock nodes, and a broker of a kind."""
    if kind != "redis":
        conf = settings_of(kind, request.getfixturevalue("rabbitmq")) | conf
    with start_servers(6, config=with_acl_user()) as (*nodes, store):
        url = conf.pop("broker_url", "")
        cluster = Cluster(nodes, store, path, broker_url=url, **conf)
        try:
            yield cluster
        finally:
            cluster.close()


@contextlib.contextmanager
def own_queue(cluster: Cluster, path: Path, settings: dict[str, Any]) -> Iterator[Cluster]:
    """The same nodes and the same store, with other settings."""
    url = settings.pop("broker_url")
    other = Cluster(cluster.nodes, cluster.broker, path, broker_url=url, **settings)
    try:
        yield other
    finally:
        other.close()
