"""The bare limits of other stores are locks, as `test_bare.py` shows of that of Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import psycopg
import pytest

from benchmarks.bare_etcd import BareEtcd
from benchmarks.bare_postgresql import TABLE, BarePostgres
from tests.support.etcd import start_etcd
from tests.support.postgres_sites import empty_server
from tests.support.zookeeper import start_zookeeper


@pytest.fixture(scope="module", params=["postgresql", "etcd", "zookeeper"])
def lock(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    with ExitStack() as stack:
        if request.param == "etcd":
            make = partial(BareEtcd, stack.enter_context(start_etcd()).url)
        elif request.param == "zookeeper":
            bare = pytest.importorskip("benchmarks.bare_zookeeper", exc_type=ImportError)
            make = partial(bare.BareZooKeeper, stack.enter_context(start_zookeeper()).url)
        else:
            url = stack.enter_context(empty_server()).url
            stack.enter_context(psycopg.connect(url, autocommit=True)).execute(TABLE)
            make = partial(BarePostgres, url)

        def one() -> Any:
            made = make()
            stack.callback(made.close)
            return made

        yield one


def test_one_holds_it_and_only_the_holder_extends_and_frees_it(lock: Callable[[], Any]) -> None:
    one, other = lock(), lock()
    token = one.acquire("r")
    assert token and other.acquire("r") is None
    assert (other.extend({"r": "not its token"}), one.extend({"r": token})) == (0, 1)
    assert not other.release("r", "not its token") and one.release("r", token)
    assert other.acquire("r")


def test_whoever_waits_is_called_by_the_release(lock: Callable[[], Any]) -> None:
    one, other = lock(), lock()
    token = one.acquire("waited for")
    assert token
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.wait, "waited for", 30.0)
        assert one.give("waited for", token)
        assert waiting.result(20.0)
