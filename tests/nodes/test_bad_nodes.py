"""Nodes that are unwell. A minority of them costs nothing; a majority is an error with reasons.

Each ailment is given to one of three nodes, then to two. The other nodes are healthy servers.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from celery_redlock import QuorumUnavailable, Redlock, ResourceHeld
from celery_redlock.protocol.values import Vote
from celery_redlock.server import LocalServer
from tests.support.machine import brief
from tests.support.nodes import admin
from tests.support.proxy import Proxy, close
from tests.support.wait import wait_until

CANARY = "s3cr3t-canary"
PATIENCE = 1.0
"""Seconds: a tenth of the ttl, long enough for a healthy node on a busy machine."""

Ailing = Callable[[ExitStack], "str | Proxy"]
"""Makes one bad node: its URL, or a proxy that falls ill once it is connected."""


def unreachable(stack: ExitStack) -> str:
    # Bound and not listening: nobody else can take the port meanwhile.
    bound = stack.enter_context(socket.socket())
    bound.bind(("127.0.0.1", 0))
    return f"redis://:{CANARY}@127.0.0.1:{bound.getsockname()[1]}/0"


def wrong_password(stack: ExitStack) -> str:
    server = stack.enter_context(LocalServer(password="another"))
    return f"redis://lock:{CANARY}@127.0.0.1:{server.port}/0"


def no_password(stack: ExitStack) -> str:
    server = stack.enter_context(LocalServer(password=CANARY))
    return f"redis://127.0.0.1:{server.port}/0"


def loading(stack: ExitStack) -> str:
    # It loads for longer than any test takes.
    config = ["--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024"]
    server = stack.enter_context(LocalServer(config=config))
    with admin(server) as client:
        pipe = client.pipeline(transaction=False)
        for number in range(5000):
            pipe.set(f"key {number}", "x" * 100)
        pipe.execute()
        client.save()
    server.kill()
    server._spawn()  # start() would wait until all is loaded

    def answers() -> bool:
        with contextlib.suppress(redis.ConnectionError), admin(server) as client:
            return bool(client.info("persistence")["loading"])
        return False

    wait_until(answers, 10.0, "the server answers, and loads")
    return server.url


def out_of_memory(stack: ExitStack) -> str:
    return stack.enter_context(LocalServer(config=["--maxmemory", "1"])).url


def not_permitted(stack: ExitStack) -> str:
    server = stack.enter_context(LocalServer())
    with admin(server) as client:
        client.execute_command(*("ACL", "SETUSER", "lock", "on", f">{CANARY}", "~other:*", "+@all"))
    return f"redis://lock:{CANARY}@127.0.0.1:{server.port}/0"


def proxied(mode: str, delay: float = 0.0) -> Ailing:
    def make(stack: ExitStack) -> Proxy:
        server = stack.enter_context(LocalServer())
        return stack.enter_context(Proxy(server.port, then=mode, delay=delay))

    return make


@contextlib.contextmanager
def redlock_with(
    ailment: Ailing, count: int, healthy: list[LocalServer], ttl: float = 10 * PATIENCE
) -> Iterator[Redlock]:
    """A lock over `count` bad nodes and some healthy ones."""
    with ExitStack() as stack:
        bad = [ailment(stack) for _ in range(count)]
        redlock = stack.enter_context(redlock_over([*bad, *healthy], ttl))
        redlock.connect()
        nodes = redlock.client.driver.nodes
        wait_until(lambda: all(n.channel.up or n.channel.down for n in nodes), 5, "it has tried")
        for node in bad:
            if isinstance(node, Proxy):
                node.mode = node.then
        yield redlock


def no_redis(stack: ExitStack) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    stack.callback(close, listener)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _address = listener.accept()
                with client, contextlib.suppress(OSError):
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    return f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


AILMENTS: dict[str, tuple[Ailing, str]] = {
    "unreachable": (unreachable, "onnect"),
    "wrong password": (wrong_password, "WRONGPASS|AUTH"),
    "no password": (no_password, "NOAUTH|AUTH"),
    "loading": (loading, "LOADING"),
    "out of memory": (out_of_memory, "OOM"),
    "not permitted": (not_permitted, "NOPERM"),
    "cut in mid-reply": (proxied("cut"), "onnection"),
    "answers nothing": (proxied("mute"), "no answer"),
    "answers after the decision": (proxied("late", 4 * PATIENCE), "no answer"),
    "answers rubbish": (proxied("rubbish"), "no valid reply"),
    "is no Redis": (no_redis, "another program"),
}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """All of it, and no password in it."""
    caplog.set_level(logging.DEBUG)
    yield caplog
    for record in caplog.get_records("call"):
        assert CANARY not in record.getMessage()
        assert CANARY not in repr(record.__dict__)


def about(log: pytest.LogCaptureFixture, name: str) -> list[str]:
    """Return the log lines about a node that users would see."""
    return [
        record.getMessage()
        for record in log.records
        if record.levelno >= logging.INFO and name in record.getMessage()
    ]


@contextlib.contextmanager
def redlock_over(nodes: Iterable[Any], ttl: float = 10 * PATIENCE) -> Iterator[Redlock]:
    urls = [getattr(node, "url", node) for node in nodes]
    with contextlib.closing(Redlock(urls, ttl=ttl, node_timeout=PATIENCE)) as redlock:
        assert CANARY not in repr(redlock)
        yield redlock


@pytest.mark.parametrize("ailment", AILMENTS)
def test_unwell_minority_costs_nothing_and_is_logged_once(
    ailment: str, servers: list[LocalServer], log: pytest.LogCaptureFixture
) -> None:
    make, _reason = AILMENTS[ailment]
    with redlock_with(make, 1, servers[:2]) as redlock:
        times = []
        begin = time.monotonic()
        for attempt in range(9):
            begun = time.monotonic()
            lease = redlock.acquire(f"r{attempt}")
            extended = redlock.extend(lease)
            assert redlock.release(extended) is True
            times.append(time.monotonic() - begun)
        brief(sorted(times)[len(times) // 2], PATIENCE / 4, "a lock's life", since=begin)
        # It may fail in each of three ways, and say each once.
        said = [" ".join(text.split()[:6]) for text in about(log, redlock.nodes[0])]
        assert len(said) == len(set(said)), said
        assert len(said) <= 4, said
        for healthy in redlock.nodes[1:]:
            assert about(log, healthy) == []


@pytest.mark.parametrize("ailment", AILMENTS)
def test_unwell_majority_is_unavailable_and_the_error_has_the_reason_of_each_node(
    ailment: str, servers: list[LocalServer], log: pytest.LogCaptureFixture
) -> None:
    make, reason = AILMENTS[ailment]
    took = []
    with redlock_with(make, 2, servers[:1]) as redlock:

        def says_why() -> bool:
            """Acquire once; on a busy machine a node may at first be silent for another reason."""
            begun = time.monotonic()
            with pytest.raises(QuorumUnavailable) as raised:
                redlock.acquire(f"r{len(took)}")
            took.append(time.monotonic() - begun)
            error = raised.value
            assert [vote.node for vote in error.votes] == list(redlock.nodes)
            assert [vote.vote for vote in error.votes][:2] == [Vote.SILENT] * 2
            for vote in error.votes[:2]:
                assert f"{vote.node} silent ({vote.detail})" in str(error)
            assert CANARY not in str(error) + repr(error) + repr(error.votes)
            whys = [vote.detail for vote in error.votes[:2]]
            return all(any(part in why for part in reason.split("|")) for why in whys)

        begin = time.monotonic()
        for _ in range(3):
            wait_until(says_why, 20.0, f"each bad node says {reason!r}")
        brief(min(took), PATIENCE + 0.3, "to be refused", since=begin)
        # Nothing is left of it on the node that had said yes.
        with admin(servers[0]) as client:
            wait_until(lambda: not client.keys("redlock:*"), 5, "it is undone")


def test_threads_of_ours_do_not_touch_the_random_state_of_the_application(
    servers: list[LocalServer], log: pytest.LogCaptureFixture
) -> None:
    """The threads try again at random times.

    An application that has seeded `random` must not notice.
    """
    with redlock_with(no_redis, 1, servers[:2]) as redlock:
        with redlock.lock("r"), pytest.raises(ResourceHeld):
            redlock.acquire("r", wait=0.01)  # it listens from now on
        state = random.getstate()
        node = redlock.client.driver.nodes[0]
        said = "sends no notifications"
        connects, listens = node.failures, log.text.count(said)
        wait_until(lambda: node.failures >= connects + 3, 10, "it has tried to connect")
        wait_until(lambda: log.text.count(said) >= listens + 2, 10, "and to listen")
        assert random.getstate() == state


def test_node_that_comes_back_is_logged(
    servers: list[LocalServer], log: pytest.LogCaptureFixture
) -> None:
    with redlock_over(servers[:3]) as redlock:
        redlock.release(redlock.acquire("r"))
        name = redlock.nodes[0]
        servers[0].kill()
        for _ in range(5):
            redlock.release(redlock.acquire("r"))
        wait_until(lambda: about(log, name), 5, "it is said to be unreachable")
        assert "unreachable" in about(log, name)[0]
        servers[0].start()

        def back() -> list[str]:
            # Where a connection broke before it was of any use, "back" is said of an answer.
            redlock.release(redlock.acquire("r"))
            return [line for line in about(log, name) if "is back" in line]

        wait_until(back, 10, "it is said to be back")
        for _ in range(5):
            redlock.release(redlock.acquire("r"))
        assert len(back()) == 1
        assert "is back" in about(log, name)[-1]


def test_release_frees_a_late_node_that_does_not_know_the_script_yet(
    servers: list[LocalServer], admins: list[redis.Redis]
) -> None:
    """To the digest of a script that it does not know, a node answers no more than NOSCRIPT."""
    for client in admins:
        client.script_flush()
    with redlock_over(servers, ttl=20.0) as redlock:
        lease = redlock.acquire("r")
        servers[4].pause()
        assert redlock.release(lease)
        servers[4].resume()
        wait_until(lambda: not admins[4].exists("redlock:r"), 2.0, "the late node has freed it")
