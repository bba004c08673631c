"""The page of docs/recipes on RabbitMQ: nothing is lost with a worker that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

from celery import Celery

from celery_redlock.server import LocalServer
from tests.support.brokers import needs_quorum_queues
from tests.support.recipes import POLLED, celery, code, value
from tests.support.wait import wait_until

WORK = """def pay(order_id, amount):
    import os, pathlib, time
    with open("begun", "a") as file:
        file.write(f"{order_id} {amount} {os.getpid()}\\n")
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
"""


@needs_quorum_queues
def test_recipe_rabbitmq_loses_nothing_with_a_killed_worker(
    server: LocalServer, rabbitmq: str, tmp_path: Path
) -> None:
    """Running tasks, tasks that wait for a lock and tasks that wait for a slot all run."""
    changes = {
        "amqp://localhost": rabbitmq,
        "def pay(order_id, amount): ...": WORK,
        # RabbitMQ keeps delayed messages in 28 queues; classic ones cost it less.
        '    task_default_queue_type="quorum",\n': '    task_default_queue_type="quorum",\n'
        '    task_default_queue="recipes",\n'
        '    broker_native_delayed_delivery_queue_type="classic",\n'
        "    redlock_ttl=2.0,\n",
    }
    text = code("rabbitmq", server, changes)
    (tmp_path / "shop.py").write_text(text)
    names: dict[str, object] = {"__name__": "shop"}
    exec(text, names)
    app = names["app"]
    assert isinstance(app, Celery) and POLLED in app.conf.result_backend
    charge = app.tasks["shop.charge"]

    def begun() -> list[list[str]]:
        file = tmp_path / "begun"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    arguments = ("worker", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle")
    with celery(tmp_path, "first", *arguments) as first:
        first.said(" ready.", 60.0)
        sent = [charge.delay(*call) for call in ((7, 50), (7, 20), (8, 10))]
        wait_until(lambda: len(begun()) == 1, 20.0, "one has begun")
        first.said("waits (parked) for order:7")
        first.kill()
    assert begun()[0][:2] == ["7", "50"]
    (tmp_path / "go").touch()
    with celery(tmp_path, "second", *arguments) as second:
        assert [value(one, 60.0) for one in sent] == [None] * 3, second.text
        assert sorted(line[:2] for line in begun()) == [
            ["7", "20"],
            *[["7", "50"]] * 2,
            ["8", "10"],
        ]
        second.signal(signal.SIGTERM)
    app.close()
