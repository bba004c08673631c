"""Readers and writers over several nodes: side by side, alone, in turn, and after a death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from celery_redlock import ConfigurationError, Redlock, ResourceHeld
from celery_redlock.server import LocalServer
from tests.support.beside import Beside
from tests.support.nodes import all_connected
from tests.support.wait import wait_until

READER = """
import sys
from celery_redlock import Redlock
from tests.support.machine import end_with_parent
end_with_parent()
redlock = Redlock(sys.argv[1:], ttl=1.0, restart_guard="off")
with redlock.lock("r", shared=True):
    print("reads", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def make(servers: list[LocalServer], lock_over: Callable[..., Redlock]) -> Callable[[], Redlock]:
    return lambda: all_connected(lock_over(servers[:3], ttl=20.0, node_timeout=5.0))


def test_readers_hold_a_key_together_and_a_writer_alone(make: Callable[[], Redlock]) -> None:
    one, two = make(), make()
    first, second = one.acquire("r", shared=True), two.acquire("r", shared=True)
    with pytest.raises(ResourceHeld) as refused:
        one.acquire("r")
    holder = refused.value.holder
    assert holder is not None and holder.owner is not None
    assert holder.owner.shared
    assert holder.nodes >= 2
    assert "a reader" in str(refused.value)
    assert "another program" not in str(refused.value)
    seen = two.holder("r")
    assert seen is not None and seen.owner is not None and seen.owner.shared
    assert one.extend(first).remaining() > 15
    assert one.release(first)
    with pytest.raises(ResourceHeld):
        one.acquire("r")
    assert two.release(second)
    writer = one.acquire("r")
    with pytest.raises(ResourceHeld) as refused:
        two.acquire("r", shared=True)
    assert refused.value.holder is not None and refused.value.holder.owner is not None
    assert not refused.value.holder.owner.shared
    one.release(writer)
    wait_until(lambda: one.holder("r") is None, 10, "all nodes have heard of it")


class Reading:
    """Readers that come one after the other, so that there always is one."""

    def __init__(self, make: Callable[[], Redlock], section: float) -> None:
        self.section = section
        self.ended = False
        self.grants = 0
        self.inside = 0
        self._count = threading.Lock()
        self.errors: list[BaseException] = []
        self.locks = [make(), make()]
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(6)]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        time.sleep(number * self.section / len(self.threads))  # they overlap
        try:
            while not self.ended:
                with self.locks[number % 2].lock("r", shared=True, wait=30.0):
                    with self._count:
                        self.grants += 1
                        self.inside += 1
                    time.sleep(self.section)
                    with self._count:
                        self.inside -= 1
        except BaseException as error:
            self.errors.append(error)

    def end(self) -> None:
        self.ended = True
        for thread in self.threads:
            thread.join()
        assert self.errors == []


@pytest.fixture
def reading(make: Callable[[], Redlock]) -> Iterator[Reading]:
    readers = Reading(make, 0.3)
    yield readers
    readers.end()


def test_writer_gets_in_while_readers_keep_coming(
    make: Callable[[], Redlock], reading: Reading
) -> None:
    writer = make()
    wait_until(lambda: reading.inside > 1, 10, "they overlap")
    for _ in range(3):
        before, began = reading.grants, time.monotonic()
        with writer.lock("r", wait=30.0):
            waited = time.monotonic() - began
            assert reading.inside == 0
            # Those that hold it end; none of their next ones came in between, but for a call lost.
            assert reading.grants - before <= 3 * len(reading.threads)
            assert waited < reading.section + 5.0  # a busy machine; it is 0.3 s on a free one
            time.sleep(0.05)
            assert reading.inside == 0
        wait_until(lambda: reading.inside > 1, 10, "readers go on behind it")


def test_readers_waiting_behind_a_writer_all_go_when_it_ends(make: Callable[[], Redlock]) -> None:
    writer, locks = make(), [make(), make(), make()]
    lease = writer.acquire("r")
    inside = threading.Barrier(len(locks) + 1)

    def read(lock: Redlock) -> None:
        with lock.lock("r", shared=True, wait=30.0):
            inside.wait(20)

    threads = [threading.Thread(target=read, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    writer.release(lease)
    inside.wait(20)  # all of them are in there together
    for thread in threads:
        thread.join()


def test_lock_of_a_killed_reader_ends_with_its_ttl(
    servers: list[LocalServer], make: Callable[[], Redlock]
) -> None:
    urls = [server.url for server in servers[:3]]
    with Beside("-c", READER, *urls) as process:
        assert process.line() == "reads"
        writer = make()
        with pytest.raises(ResourceHeld):
            writer.acquire("r", wait=1.5)  # it is extended
    lease = writer.acquire("r", wait=20.0)
    assert writer.release(lease)


def test_writer_killed_while_it_waits_keeps_no_reader_out(
    servers: list[LocalServer], make: Callable[[], Redlock]
) -> None:
    one, two = make(), make()
    lease = one.acquire("r", shared=True)
    code = READER.replace('lock("r", shared=True)', 'lock("r", wait=60.0)')
    urls = [server.url for server in servers[:3]]

    def refused() -> bool:
        found = two.try_acquire("r", shared=True)
        if found is not None:
            two.release(found)
        return found is None

    with Beside("-c", code, *urls):
        wait_until(refused, 20, "a writer waits")
    wait_until(lambda: not refused(), 10, "a reader is let in beside the first one")
    assert one.extend(lease).remaining() > 15


def test_block_inside_a_shared_one_may_share_it_and_not_ask_for_more(
    make: Callable[[], Redlock],
) -> None:
    redlock = make()
    alone = pytest.raises(ConfigurationError, match="inside a shared one")
    with redlock.lock("r", shared=True), redlock.lock("r", shared=True), alone:
        redlock.lock("r").__enter__()
    with redlock.lock("r"), redlock.lock("r", shared=True):
        pass


@pytest.mark.parametrize("more", [{"limit": 2}, {"fencing": True}, {"resource": ["a", "b"]}])
def test_shared_with_limit_fencing_or_several_keys_is_refused(
    make: Callable[[], Redlock], more: object
) -> None:
    options = {"resource": "r", **more}  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="a shared lock is of one resource"):
        make().lock(shared=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["postgresql://127.0.0.1/locks", "etcd://127.0.0.1:2379"])
def test_store_without_shared_locks_is_refused(lock_over: Callable[..., Redlock], url: str) -> None:
    with pytest.raises(ConfigurationError, match="shared=True needs Redis nodes"):
        lock_over([url]).lock("r", shared=True)
