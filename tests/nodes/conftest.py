"""Nodes under one contract, and peers that a test plays."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.locks import lock, lock_over, never_by_itself  # noqa: F401
from tests.support.peer_world import world  # noqa: F401
from tests.support.published import published
from tests.support.subjects import (
    Etcd,
    Fake,
    Plain,
    Postgres,
    Real,
    Subject,
    _etcd,
    _plain,
    _postgres,
    _real,
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Real]:
    yield from _real(None)


@pytest.fixture(scope="module")
def debian() -> Iterator[Real]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("there is no redis-server on PATH: this row needs Debian's Redis 7.0")
    yield from _real(binary)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Postgres]:
    yield from _postgres()


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    yield from _etcd()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    directory = tmp_path_factory.mktemp("own_store")
    with published("sqlite", "tests.support.sqlite_store:KIND", directory):
        yield from _plain(directory)


REDIS = ["fake", "valkey", "debian"]


@pytest.fixture(params=[*REDIS, "postgresql", "etcd", "plain"])
def node(request: pytest.FixtureRequest) -> Subject:
    """A node that is empty."""
    return _empty(request)


@pytest.fixture(params=REDIS)
def redis_node(request: pytest.FixtureRequest) -> Subject:
    """The same, of those that are one of several; and where something else may be under a name."""
    return _empty(request)


@pytest.fixture(params=[*REDIS, "postgresql"])
def proposing(request: pytest.FixtureRequest) -> Subject:
    """The same, of those whose fencing token is what its holder proposes, at least."""
    return _empty(request)


def _empty(request: pytest.FixtureRequest) -> Subject:
    if request.param == "fake":
        return Fake()
    subject: Real | Postgres | Etcd | Plain = request.getfixturevalue(request.param)
    subject.flush()
    return subject
