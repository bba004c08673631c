"""Purging a queue: what its messages had reserved is free, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from celery.bin import purge as celerys
from celery.bin.base import CLIContext
from celery.signals import before_task_publish
from click.testing import CliRunner, Result
from kombu.exceptions import EncodeError

from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.messages import purge as purging
from celery_redlock.messages.purge import wrap_command
from celery_redlock.server import start_servers
from tests.promises.worker.reserving import Reservations, declare
from tests.support.brokers import settings_of
from tests.support.cluster import Cluster
from tests.support.wait import wait_until

Call = Callable[..., Result]


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Five nodes and a broker, without a worker."""
    conf: dict[str, Any] = {}
    if request.param == "rabbitmq":
        conf = settings_of("classic", request.getfixturevalue("rabbitmq"))
    with start_servers(6) as (*nodes, server):
        cluster = Cluster(nodes, server, tmp_path_factory.mktemp("purge"), **conf)
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def reservations(broker: Cluster) -> Iterator[Reservations]:
    made = Reservations(broker)
    yield made
    made.close()


@pytest.fixture
def call(broker: Cluster) -> Call:
    """Calls the command with an app as an operator has it."""
    app = Celery("tests.promises.worker.operator", set_as_current=False)
    app.conf.update(broker.conf)
    declare(app, lambda *_: None)
    return lambda *arguments, **how: CliRunner().invoke(
        group, ["purge", "-Q", broker.queue, *arguments], obj=Site(app=app), **how
    )


def publish(reservations: Reservations, *keys: str) -> list[str]:
    """Publish a message for each key, with one of three scopes in turn; return the ids."""
    scopes = ("until_executed", "until_executing", "until_expired")
    return [reservations.tasks[scopes[number % 3]].delay(key).id for number, key in enumerate(keys)]


def test_purge_command_lists_asks_purges_and_frees_reservations(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    ids = publish(reservations, "a", "b", "c")
    broker.send("work", "d")  # which reserves nothing
    assert broker.queued() == 4
    listed = call("--dry-run")
    assert listed.exit_code == 0 and f"{broker.queue}: 4 messages" in listed.stdout
    assert call().exit_code == 4, "nobody is there to ask"
    assert broker.queued() == 4 and [reservations.of(key) for key in "abc"] == ids
    result = call("--yes")
    assert result.exit_code == 0, result.output
    assert f"[{ids[0]}] is purged: its key k:a is free" in result.stdout
    assert "4 messages purged, 3 reservations freed\n" in result.stdout
    assert broker.queued() == 0 and not any(reservations.tokens(key) for key in "abc")
    result = call("--yes", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["outcome"] == "gone"
    (again,) = publish(reservations, "a")
    assert reservations.of("a") == again
    call("--yes")


def by_control(app: Celery, _queue: str) -> int:
    return int(app.control.purge())


def by_command(app: Celery, queue: str) -> int:
    done = CliRunner().invoke(celerys.purge, ["-f", "-Q", queue], obj=CLIContext(app, False, None))
    assert done.exit_code == 0, done.output
    return int(done.output.split("Purged ")[1].split()[0])


@pytest.mark.parametrize("purge_by", [by_control, by_command])
def test_purge_by_celery_frees_the_reservations(
    broker: Cluster, reservations: Reservations, purge_by: Callable[[Celery, str], int]
) -> None:
    app = Celery("tests.promises.worker.operator", set_as_current=False)
    app.conf.update(broker.conf)
    declare(app, lambda *_: None)
    wrap_command()  # done as the app is loaded, where Celery's command is loaded before
    publish(reservations, "a", "b", "c")
    broker.send("work", "d")
    assert purge_by(app, broker.queue) == 4
    assert broker.queued() == 0 and not any(reservations.tokens(key) for key in "abc")
    (again,) = publish(reservations, "a")
    assert reservations.of("a") == again
    for node in broker.nodes[:3]:
        node.pause()
    try:  # the messages go all the same
        assert purge_by(app, broker.queue) == 1
    finally:
        for node in broker.nodes[:3]:
            node.resume()
    assert broker.queued() == 0
    reservations.forget("a")


def test_purge_frees_a_reservation_that_only_a_quorum_has(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    """The first three answers may be from two nodes that never had it and one that has."""
    publish(reservations, "a")
    for node in broker.nodes[:2]:
        with redis.Redis.from_url(str(node.url)) as admin:
            assert admin.delete("redlock:k:a#reserved") == 1
    broker.nodes[4].pause()
    try:
        result = call("--yes")
    finally:
        broker.nodes[4].resume()
    assert "its key k:a is free" in result.stdout
    reservations.freed("a")


def test_purge_with_a_hung_node_says_that_the_keys_stay_there(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    publish(reservations, "a")
    broker.nodes[4].pause()
    try:
        result = call("--yes")
    finally:
        broker.nodes[4].resume()
    assert result.exit_code == 0
    assert "1 reservation freed; " in result.stdout
    assert f"{broker.redlock.nodes[4]} did not answer: the keys stay there" in result.stdout
    assert "`celery -A APP redlock release KEY --reservation` frees one" in result.stdout
    reservations.freed("a")


def test_purge_leaves_the_reservation_of_another_message_alone(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    """The reservation of the message has ended, and another has taken the key since."""
    publish(reservations, "a")
    reservations.forget("a")
    (other,) = publish(reservations, "a")
    (gone,) = purging.purge(broker.app, broker.queue, 1)
    assert gone.task_id != other and not gone.freed
    assert reservations.of("a") == other and broker.queued() == 1
    call("--yes")


def test_interrupted_purge_leaves_its_message_in_the_queue(
    broker: Cluster, reservations: Reservations, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between the release and the acknowledgement, it keeps the message only."""
    publish(reservations, "a", "b")
    freed = purging._release_reservation

    def interrupted(*arguments: Any) -> Any:
        freed(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(purging, "_release_reservation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(purging.purge(broker.app, broker.queue, 2))
    monkeypatch.undo()
    assert broker.queued() == 2
    assert sorted([bool(reservations.of("a")), bool(reservations.of("b"))]) == [False, True]
    assert call("--yes").exit_code == 0
    assert broker.queued() == 0 and not reservations.tokens("a") and not reservations.tokens("b")


def test_purge_without_a_quorum_leaves_the_rest_in_the_queue(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    publish(reservations, "a", "b")
    for node in broker.nodes[:3]:
        node.pause()
    result = call("--yes")
    for node in broker.nodes[:3]:
        node.resume()
    assert result.exit_code == 3 and "0 messages purged" in result.stdout
    assert broker.queued() == 2
    call("--yes")
    assert broker.queued() == 0 and not reservations.tokens("b")


def test_purge_keeps_the_reservation_of_a_running_body(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    """Its message is delivered again while it runs; that copy is purged."""
    (one,) = publish(reservations, "a")
    with broker.app.connection_for_write() as connection:
        queue = broker.app.amqp.queues[broker.queue](connection.default_channel)
        message = queue.get()
        message.requeue()
    owner = broker.redlock.client.owner
    body = type(owner)(
        owner.host, owner.pid, one, task="tests.promises.worker.tasks.until_executed"
    )
    lease = broker.redlock.acquire("k:a", owner=body)
    result = call("--yes")
    assert "its key k:a is not its own any more" in result.stdout, result.output
    assert broker.queued() == 0 and reservations.of("a") == one
    broker.redlock.release(lease)
    reservations.forget("a")


def test_purge_keeps_the_reservation_of_a_success(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    """The key is reserved for a time; the message came again, before its success or afterwards."""
    for number, again in enumerate((True, False)):
        key = f"success{number}"
        sent = reservations.until_succeeded.delay(key)
        if again:
            with broker.app.connection_for_write() as connection:
                queue = broker.app.amqp.queues[broker.queue](connection.default_channel)
                queue.get().requeue()
        else:
            broker.app.backend.mark_as_done(sent.id, None)
        result = call("--yes")
        assert f"its key k:{key} is not its own any more" in result.stdout, result.output
        assert broker.queued() == 0 and reservations.of(key) == sent.id
        reservations.forget(key)


def test_purge_removes_unreadable_messages(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    if broker.conf["broker_url"] != broker.broker.url:
        pytest.skip("RabbitMQ's messages need not be JSON")
    publish(reservations, "a")
    whole = json.loads(broker.client.lindex(broker.queue, 0))
    odd = [{**whole, "headers": headers} for headers in ([1], "text", 5, None, {"task": [[]]})]
    odd += [{**whole, "properties": properties} for properties in (None, [1], {"delivery_tag": []})]
    odd += [5, "text", [], None, {**whole, "body": 5}]
    broker.client.lpush(broker.queue, b"{no json", b"[" * 100_000, *map(json.dumps, odd))
    result = call("--yes")
    assert result.exit_code == 0 and "16 messages purged, 1 res" in result.stdout, result.output
    assert broker.queued() == 0 and not reservations.tokens("a")


def test_purge_takes_messages_that_kombu_cannot_decompress(
    broker: Cluster, reservations: Reservations, call: Call
) -> None:
    if broker.conf["broker_url"] == broker.broker.url:
        pytest.skip("kombu's Redis has popped such a message, see above")
    publish(reservations, "a")
    with broker.app.connection_for_write() as connection, connection.Producer() as producer:
        for compression in ("none such", "gzip", 5):
            headers = {"compression": compression}
            producer.publish("text", routing_key=broker.queue, headers=headers, retry=True)
    wait_until(lambda: broker.queued() == 4, 10.0, "all are queued")
    result = call("--yes")
    assert result.exit_code == 0 and "4 messages purged, 1 res" in result.stdout, result.output
    assert broker.queued() == 0 and not reservations.tokens("a")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run", "--yes"], "give one of them"),
        (["-Q", " , "], "names no queue"),
    ],
)
def test_contradictory_options_of_purge_are_refused(
    call: Call, arguments: list[str], said: str
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and said in result.output


@pytest.mark.parametrize("purge_by", [by_control, by_command])
def test_message_sent_during_a_purge_stays_with_its_reservation(
    broker: Cluster,
    reservations: Reservations,
    purge_by: Callable[[Celery, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("tests.promises.worker.operator", set_as_current=False)
    app.conf.update(broker.conf)
    declare(app, lambda *_: None)
    wrap_command()
    publish(reservations, "a")
    later: list[str] = []
    freed = purging._release_reservation

    def while_others_publish(*args: Any) -> Any:
        later[:] = later or publish(reservations, "later")
        return freed(*args)

    monkeypatch.setattr(purging, "_release_reservation", while_others_publish)
    assert purge_by(app, broker.queue) == 1
    assert broker.queued() == 1 and reservations.of("later") == later[0]
    assert purge_by(app, broker.queue) == 1
    assert broker.queued() == 0 and not reservations.tokens("later")


def test_purge_during_a_call_that_fails_leaves_nothing_reserved(
    broker: Cluster, reservations: Reservations
) -> None:
    """The call had freed the place of the queued one, and restores it though that is gone."""
    app = Celery("tests.promises.worker.operator", set_as_current=False)
    app.conf.update(broker.conf)
    task = declare(app, lambda *_: None)["until_executing"]
    task.apply_async(("a",), lock={"on_duplicate": "replace"})

    def purge(**_signal: Any) -> None:
        assert app.control.purge() == 1

    before_task_publish.connect(purge)
    try:
        with pytest.raises(EncodeError):
            task.apply_async(("a", object()), lock={"on_duplicate": "replace"})
    finally:
        before_task_publish.disconnect(purge)
    assert not reservations.tokens("a")
