"""A password in the addresses, a token in each lease: neither is ever shown, whatever fails.

Each fault is made at level DEBUG; then all that was logged, sent to listeners, raised, pickled or
printed is searched for both.
"""

from __future__ import annotations

import logging
import pickle
import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from celery_redlock import NotAcquired, Redlock, RedlockError
from celery_redlock.events import Listener, subscribe, unsubscribe
from celery_redlock.server import LocalServer, start_servers
from tests.support.names import Locks, Log, Servers
from tests.support.nodes import TOKEN
from tests.support.wait import wait_until

CANARY = "s3cr3t-c4n4ry"


class Everything(Listener):
    """A listener that records each argument as it might print it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def _note(self, *args: object) -> None:
        self.told += [f"{arg!r} {arg}" for arg in args]

    acquired = held = unavailable = extended = lost = released = _note


class Catch:
    """Context that records an error in every form in which errors travel."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.kinds: set[str] = set()

    def __enter__(self) -> Catch:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert isinstance(error, RedlockError), error
        self.kinds.add(kind.__name__)
        pickled = pickle.dumps(error)
        self.seen += [
            str(error),
            repr(error),
            repr(error.args),
            repr(vars(error)),
            "".join(map(str, getattr(error, "votes", ()))),
            "".join(traceback.format_exception(error)),
            pickled.decode("latin-1"),
            repr(vars(pickle.loads(pickled))),
        ]
        return True


@pytest.fixture
def shown(caplog: Log) -> Iterator[list[str]]:
    """Collect the output of a test, and search it at the end with the whole log and all events."""
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    listener = Everything()
    subscribe(listener)
    yield seen
    unsubscribe(listener)
    records = caplog.get_records("call")
    assert listener.told or records or seen, "nothing was shown: the test is void"
    for record in records:
        seen += [logging.Formatter().format(record), repr(record.__dict__)]
    for text in [*seen, *listener.told]:
        assert CANARY not in text
        assert not TOKEN.search(text), text


def show(seen: list[str], redlock: Redlock) -> None:
    seen += [repr(redlock), str(redlock.nodes), repr(redlock.client.addresses)]


def test_password_and_token_are_not_shown_at_a_loss(
    shown: list[str], lock_over: Locks, caplog: Log
) -> None:
    with start_servers(3, password=CANARY) as servers:
        redlock = lock_over(servers, ttl=1.0)
        catch = Catch()
        told = threading.Event()

        def fails(lease: object) -> None:
            told.set()
            raise ValueError("as asked")

        with redlock.lock("r", on_lost=fails) as lease:
            for server in servers[:2]:
                with redis.Redis(port=server.port, password=CANARY) as client:
                    client.set("redlock:r", "a thief", px=3000)
            assert told.wait(5)
            with catch:
                lease.ensure()
            shown += [repr(lease), repr(lease.loss()), repr(lease.loss().lease)]
            for server in servers:
                server.pause()
            with catch:
                redlock.acquire("s")
        assert catch.kinds == {"LeaseLost", "QuorumUnavailable"}
        shown += catch.seen
        wait_until(lambda: "its on_lost raised an error" in caplog.text, 5, "it is logged")
        assert "lost the lock r" in caplog.text


class Provider(redis.CredentialProvider):
    """A provider of credentials that fails and puts the secret into its error."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def get_credentials(self) -> tuple[str]:
        raise self.error(f"https://tokens.example/?secret={CANARY}")


def bad_nodes(stack: ExitStack) -> dict[str, Any]:
    """Return an address of each kind that does not work; each contains the password.

    test_bad_nodes.py has more, and looks for the password as well.
    """
    other = stack.enter_context(LocalServer(password="another"))
    plain = stack.enter_context(LocalServer())
    with redis.Redis(port=plain.port) as client:
        client.execute_command("ACL", "SETUSER", "lock", "on", f">{CANARY}", "~none:*", "+@all")
    host = {"host": "127.0.0.1"}
    return {
        "unknown user": f"redis://{CANARY}:{CANARY}@127.0.0.1:{other.port}/0",
        "in the query": f"redis://127.0.0.1:{other.port}/0?password={CANARY}",
        "no such host": f"redis://:{CANARY}@no-such-host.invalid:6379/0",
        "TLS to a plain port": f"rediss://:{CANARY}@127.0.0.1:{plain.port}/0",
        "no such socket": f"unix://:{CANARY}@/nowhere/at/all.sock?db=0",
        "no such database": f"redis://lock:{CANARY}@127.0.0.1:{plain.port}/99",
        "mapping": {**host, "port": other.port, "password": CANARY},
        "client": redis.Redis(port=other.port, password=CANARY),
        "provider": {**host, "port": other.port, "credential_provider": Provider(RuntimeError)},
        "its network": {**host, "port": other.port, "credential_provider": Provider(OSError)},
    }


def test_password_and_token_are_not_shown_whatever_a_node_does(
    shown: list[str], lock_over: Locks, caplog: Log
) -> None:
    with ExitStack() as stack:
        nodes = bad_nodes(stack)
        redlocks = {name: lock_over([node], ttl=1.0) for name, node in nodes.items()}
        catch = Catch()
        for redlock in redlocks.values():
            redlock.connect(timeout=0)
        for redlock in redlocks.values():
            show(shown, redlock)
            with catch:
                redlock.acquire("r")
            with catch:
                redlock.acquire("r", wait=0.05)  # it would listen, too
            with catch:
                redlock.holder("r")
            with catch:
                redlock.lock("r").acquire()
        assert "QuorumUnavailable" in catch.kinds
        shown += catch.seen
        for name in ("provider", "its network"):
            words = f"node {redlocks[name].nodes[0]} sends no notifications"
            wait_until(lambda w=words: w in caplog.text, 5, "its listener has failed, too")


@pytest.fixture
def redlock(servers: Servers, lock_over: Locks) -> Redlock:
    return lock_over(servers[:3], ttl=5.0)


def test_token_is_shown_as_a_digest_only(redlock: Redlock) -> None:
    """The digest is the same for all observers, so that lines of two logs can be matched."""
    lease = redlock.acquire("r")
    holder = redlock.holder("r")
    assert holder is not None and re.fullmatch(r"[0-9a-f]{8}", holder.digest)
    assert holder.digest in str(holder) and holder.digest not in lease.token
    with pytest.raises(NotAcquired, match=holder.digest):
        redlock.acquire("r")
    nonce = lease.token.rpartition("|")[2]
    assert nonce not in repr(lease) + repr(holder) + str(holder)


def test_search_for_tokens_finds_one(redlock: Redlock) -> None:
    assert TOKEN.search(f"lost the lock r held by {redlock.acquire('r').token}, after 1 s")
