"""The ACL rule in the docs allows every operation and contains nothing superfluous."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import redis

from celery_redlock import Redlock, RedlockError, ResourceHeld
from celery_redlock.server import LocalServer
from tests.support.nodes import ACL_RULE, SHARED_RULE
from tests.support.wait import wait_until

RULE = ACL_RULE
GRANTED = [word for word in RULE if word.startswith("+")]
OTHERS = ["on", ">SECRET", "~redlock:*", "&redlock:*"]


@pytest.fixture
def admin(acl_node: LocalServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=acl_node.port, decode_responses=True) as client:
        client.flushall()
        client.execute_command("ACL", "LOG", "RESET")
        yield client
        client.execute_command("ACL", "DELUSER", "redlock")


def refused(admin: redis.Redis) -> set[str]:
    """The commands that the server has refused to anybody."""
    return {str(entry["object"]) for entry in admin.acl_log()}


def url(acl_node: LocalServer, database: int = 0) -> str:
    return f"redis://redlock:SECRET@127.0.0.1:{acl_node.port}/{database}"


def use_everything(url: str, admin: redis.Redis, wait: float) -> bool:
    """Use each operation once; return True if the waiter was granted the released lock."""
    redlock, other = Redlock([url], ttl=5), Redlock([url], ttl=5)
    granted: list[bool] = []

    def wait_for(names: str | list[str]) -> None:
        with suppress(RedlockError):
            granted.append(other.release(other.acquire(names, wait=wait)))

    def stands_in_line() -> bool:
        return admin.zcard("redlock:order:1#line") > 0

    try:
        lease = redlock.extend(redlock.acquire("order:1"))
        holder = redlock.holder("order:1")
        assert holder is not None and holder.nodes == 1
        assert redlock.try_acquire("order:1") is None
        with suppress(ResourceHeld):
            other.acquire("order:1", wait=0.05)  # in vain
        for names in ("order:1", ["order:1", "order:2"]):
            waiter = threading.Thread(target=wait_for, args=(names,))
            waiter.start()
            wait_until(
                lambda: stands_in_line() or refused(admin) or not waiter.is_alive(),  # noqa: B023
                5,
                "it waits",
            )
            redlock.release(lease)
            waiter.join()
            lease = redlock.acquire("order:1")
        redlock.release(lease)
        redlock.release(redlock.acquire("order:2", fencing=True))
    finally:
        redlock.close()
        other.close()
    return granted == [True, True]


def test_acl_rule_of_the_docs_is_enough_for_every_operation(
    acl_node: LocalServer, admin: redis.Redis
) -> None:
    admin.execute_command("ACL", "SETUSER", "redlock", *RULE)
    assert use_everything(url(acl_node), admin, wait=5)
    assert refused(admin) == set()
    assert admin.keys() == ["redlock:order:2#fence"]


@pytest.mark.parametrize("word", [*GRANTED, *OTHERS])
def test_each_command_of_the_acl_rule_is_needed(
    acl_node: LocalServer, admin: redis.Redis, word: str
) -> None:
    rest = [kept for kept in RULE if kept != word]
    admin.execute_command("ACL", "SETUSER", "redlock", *rest)
    with suppress(RedlockError):
        use_everything(url(acl_node), admin, wait=1)
    if word in GRANTED:
        assert word[1:] in refused(admin)
    else:
        reasons = {entry["reason"] for entry in admin.acl_log()}
        assert reasons & {"~": {"key"}, "&": {"channel"}}.get(word[0], {"auth"})


def read_and_write(url: str, admin: redis.Redis) -> None:
    """Use shared locks: a reader, a writer that waits because it is refused, and its grant."""
    redlock, other = Redlock([url], ttl=5), Redlock([url], ttl=5)
    with suppress(RedlockError):
        reads = redlock.acquire("order:3", shared=True)

        def write() -> None:
            with suppress(RedlockError):
                other.release(other.acquire("order:3", wait=5.0))

        waiter = threading.Thread(target=write)
        waiter.start()
        wait_until(
            lambda: admin.zcard("redlock:order:3#line") > 0 or not waiter.is_alive(), 5, "it waits"
        )
        redlock.try_acquire("order:3", shared=True)
        with suppress(RedlockError):
            redlock.extend(reads)
        redlock.release(reads)
        waiter.join()
    redlock.close()
    other.close()


@pytest.mark.parametrize("lacks", ["", *SHARED_RULE])
def test_shared_locks_need_a_few_more_acl_commands(
    acl_node: LocalServer, admin: redis.Redis, lacks: str
) -> None:
    more = [word for word in SHARED_RULE if word != lacks]
    admin.execute_command("ACL", "SETUSER", "redlock", *RULE, *more)
    read_and_write(url(acl_node), admin)
    assert (lacks[1:] in refused(admin)) if lacks else refused(admin) == set()


def test_another_database_needs_the_acl_command_select(
    acl_node: LocalServer, admin: redis.Redis, lock_over: Callable[..., Redlock]
) -> None:
    admin.execute_command("ACL", "SETUSER", "redlock", *RULE)
    with pytest.raises(RedlockError, match="NOPERM"):
        lock_over([url(acl_node, database=1)]).acquire("order:1")
    admin.execute_command("ACL", "SETUSER", "redlock", "+select")
    redlock = lock_over([url(acl_node, database=1)])
    assert redlock.release(redlock.acquire("order:1"))


@pytest.mark.parametrize(
    "command",
    [("GET", "secret"), ("SET", "secret", "1"), ("DEL", "secret"),
     ("EVAL", "return redis.call('GET', 'secret')", "0"), ("PUBLISH", "secret", "1"),
     ("KEYS", "*"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("CLIENT", "KILL", "TYPE", "normal"),
     ("ACL", "WHOAMI")],
    ids=" ".join,
)  # fmt: skip
def test_acl_rule_allows_no_other_command(
    acl_node: LocalServer, admin: redis.Redis, command: tuple[str, ...]
) -> None:
    admin.execute_command("ACL", "SETUSER", "redlock", *RULE)
    user = redis.Redis(port=acl_node.port, username="redlock", password="SECRET", protocol=2)
    with user, pytest.raises(redis.ResponseError) as refusal:
        user.execute_command(*command)
    assert refused(admin), refusal.value


@pytest.mark.parametrize("word", ["resetkeys", "resetchannels", "nocommands"])
def test_each_reset_word_of_the_acl_rule_is_needed(
    acl_node: LocalServer, admin: redis.Redis, word: str
) -> None:
    before = ["on", "nopass", "~*", "&*", "+@all"]
    probes = {
        "resetkeys": ("GET", "secret"),
        "resetchannels": ("PUBLISH", "secret", "1"),
        "nocommands": ("CONFIG", "GET", "port"),
    }
    for rule, allowed in ((RULE, False), ([kept for kept in RULE if kept != word], True)):
        admin.execute_command("ACL", "SETUSER", "redlock", "reset", *before)
        with suppress(redis.ResponseError):  # Redis wants no second pattern beside "all"
            admin.execute_command("ACL", "SETUSER", "redlock", *rule)
        with redis.Redis(
            port=acl_node.port, username="redlock", password="SECRET", protocol=2
        ) as client:
            if allowed:
                client.execute_command(*probes[word])
            else:
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*probes[word])


def test_every_word_of_the_acl_rule_is_tested() -> None:
    taking = {"resetkeys", "resetchannels", "nocommands"}
    assert set(RULE) == {*GRANTED, *taking, *OTHERS}
