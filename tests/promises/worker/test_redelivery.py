"""Messages that the broker delivers twice: never two bodies at once, and each ends once.

What gives a message to another worker is `visibility_timeout`. Any consumer of a Redis broker looks
for messages that are overdue, when it connects and every 100 s; here one looks all the time.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest
from celery import Celery

from celery_redlock.server import start_servers
from tests.support.cluster import Cluster
from tests.support.nodes import with_acl_user
from tests.support.wait import wait_until
from tests.support.worker import Worker

SOON = 2.0
"""Seconds after the death of its first body within which a copy runs."""
VISIBLE = 1.0
"""Seconds to acknowledge a message."""


class Impatience:
    """A consumer that keeps returning messages that are not acknowledged in time to their queue."""

    def __init__(self, cluster: Cluster) -> None:
        self._app = Celery(broker=cluster.broker.url, set_as_current=False)
        self._app.conf.broker_transport_options = {"visibility_timeout": VISIBLE}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Impatience:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()
        self._app.close()

    def _run(self) -> None:
        with self._app.connection() as connection:
            qos = connection.default_channel.qos
            while not self._over.wait(0.2):
                qos.restore_visible(num=100, interval=1)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose broker waits for a second."""
    path, options = tmp_path_factory.mktemp("redelivery"), {"visibility_timeout": VISIBLE}
    with start_servers(6, config=with_acl_user()) as (*nodes, broker):
        conf = {"broker_transport_options": options, "worker_prefetch_multiplier": 1}
        cluster = Cluster(nodes, broker, path, **conf)
        with Impatience(cluster):
            yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def workers(impatient: Cluster) -> Iterator[tuple[Worker, Worker]]:
    """Two with two children each; they end when their worker does."""
    conf = {"redlock_keeper": "process"}
    with impatient.worker("-c", "2", **conf) as one, impatient.worker("-c", "2", **conf) as other:
        yield one, other


@pytest.mark.parametrize("task", [pytest.param("long", marks=pytest.mark.slow), "long_ignored"])
def test_bodies_longer_than_the_visibility_timeout_end_once(
    impatient: Cluster, workers: tuple[Worker, Worker], task: str
) -> None:
    """Including those whose message was given away before they began, and later ones."""
    keys = [f"{task}-{number}" for number in range(6)]
    sent = [impatient.send(task, key, 2.0) for key in keys]

    def ended() -> bool:
        return all(any(run.ended for run in impatient.runs(key)) for key in keys)

    wait_until(ended, 30.0, "every body has ended")
    impatient.settled(20.0)  # and no copy is anywhere any more
    assert [len(impatient.runs(key)) for key in keys] == [1] * len(keys)
    if task == "long":
        assert [impatient.state(one) for one in sent] == ["SUCCESS"] * len(keys)
        assert [impatient.result(one) for one in sent] == [1] * len(keys)
    said = "".join(worker.text for worker in workers)
    assert said.count("is done: this was a second delivery of it") >= 2  # else it is void
    impatient.check(since=0.0)


def only_the_other_takes_it(
    cluster: Cluster, one: Worker, other: Worker, id: str, parent: int
) -> None:
    """Keep one worker from the queue, because kombu on Redis may lose a message to a dying one."""
    if other.process.pid == parent:
        one, other = other, one
    name = re.search(r"(\w+@test) ready", one.text)
    assert name is not None
    cluster.app.control.cancel_consumer("celery", destination=[name[1]], reply=True)
    seen = other.text.count(f"[{id}] received")
    wait_until(
        lambda: other.text.count(f"[{id}] received") >= seen + 4, 20.0, "a copy waits elsewhere"
    )


# The worker's death is the last: nobody else has these two.
@pytest.mark.parametrize("who", ["child", "worker"])
def test_copy_runs_soon_after_the_death_of_its_first_delivery(
    impatient: Cluster, workers: tuple[Worker, Worker], who: str
) -> None:
    key = f"death-of-{who}"
    sent = impatient.send("late", key, 60.0)
    first = impatient.entered(key)
    parent = psutil.Process(first.pid).ppid()
    words = f"[{sent.id}] waits (held"
    wait_until(lambda: any(words in one.text for one in workers), 20.0, "a copy waits")
    if who == "worker":
        only_the_other_takes_it(impatient, *workers, sent.id, parent)
    assert len(impatient.runs(key)) == 1
    os.kill(parent if who == "worker" else first.pid, signal.SIGKILL)
    second = impatient.entered(key, 2)
    first = impatient.runs(key)[0]
    assert 0.0 < second.begin - first.end < SOON
    assert impatient.result(sent) == 2
    # The first's message comes again, too, and finds that it is done.
    impatient.settled(20.0)
    assert len(impatient.runs(key)) == 2
    impatient.check(since=0.0)


@pytest.mark.parametrize("backend", ["disabled://", pytest.param("rpc://", marks=pytest.mark.slow)])
def test_second_delivery_ends_without_a_result_backend(impatient: Cluster, backend: str) -> None:
    """The nodes know of the success; no backend is asked."""
    conf = {"result_backend": backend}
    key, queue = f"no-backend-{backend[:3]}", f"without-{backend[:3]}"
    with (
        impatient.worker("-c", "1", queue=queue, **conf) as one,
        impatient.worker("-c", "1", queue=queue, **conf) as other,
    ):
        sent = impatient.send("late", key, 4.0, queue=queue)
        first = impatient.entered(key)
        words = f"[{sent.id}] waits (held"
        wait_until(lambda: words in one.text + other.text, 20.0, "a copy waits")
        assert not first.ended
        done = f"[{sent.id}] is done: this was a second delivery of it"
        wait_until(lambda: done in one.text + other.text, 20.0, "the copy ends")
        impatient.settled(20.0)
    (run,) = impatient.runs(key)
    assert run.ended
