"""The prefetch window on RabbitMQ, set by threads that do not read the connection."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.promises.worker.parking import goes_back
from tests.support.brokers import own_queue, settings_of
from tests.support.cluster import Cluster
from tests.support.proxy import Proxy
from tests.support.worker import pool

pytestmark = pytest.mark.slow  # at once: unit/test_prefetch.py


@pytest.mark.parametrize("name", [pool("gevent")])
def test_parked_tasks_go_back_over_amqp_when_the_pool_is_full(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path, name: str
) -> None:
    """With greenlets the timer's one returns it, while the main one reads the connection."""
    with own_queue(cluster, tmp_path, settings_of("classic", rabbitmq)) as other:
        goes_back(other, key, other.queue, "-P", name)


def test_threads_go_on_after_each_cut_of_the_connection(
    cluster: Cluster, rabbitmq: str, key: str, tmp_path: Path
) -> None:
    """Celery restores its window in the pool's threads, and the main thread widens it."""
    port = urlsplit(rabbitmq).port
    assert port is not None
    settings = settings_of("classic", rabbitmq)
    settings["worker_enable_remote_control"] = False  # its queue may still be the cut connection's
    with Proxy(port) as proxy, own_queue(cluster, tmp_path, settings) as other:
        through = rabbitmq.replace(f":{port}/", f":{proxy.port}/")
        with other.worker("-P", "threads", "-c", "4", broker_url=through) as worker:
            for cut in range(1, 9):
                sent = [other.send("work", f"{key}-{cut}-{n % 6}", 0.1) for n in range(36)]
                other.entered(f"{key}-{cut}-0")
                proxy.reset()
                worker.said("Connection to broker lost")
                assert {other.state(one, 10.0) for one in sent} == {"SUCCESS"}, f"cut {cut}"
