"""The RabbitMQ of the tests is theirs alone."""

from __future__ import annotations

import ipaddress

import psutil
from kombu import Connection, Queue


def test_it_listens_on_the_loopback_only_as_its_name_server_does(rabbitmq: str) -> None:
    """Whoever reaches Erlang's port, and knows its cookie, runs code here."""
    ours = psutil.Process().children(recursive=True)
    listening = {
        (process.name(), connection.laddr)
        for process in ours
        if process.name() in ("epmd", "beam.smp")
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {name for name, _address in listening} == {"epmd", "beam.smp"}
    assert all(ipaddress.ip_address(address.ip).is_loopback for _name, address in listening)


def test_it_takes_a_message_and_gives_it_back(rabbitmq: str) -> None:
    with Connection(rabbitmq) as connection:
        queue = Queue("test_rabbitmq", channel=connection.default_channel, auto_delete=True)
        queue.declare()
        with connection.Producer() as producer:
            producer.publish({"a": 1}, routing_key=queue.name)
        message = queue.get(no_ack=True)
        assert message is not None
        assert message.payload == {"a": 1}
        queue.delete()
