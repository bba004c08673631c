"""One cluster for all rows, and one worker for all that do not kill it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_redlock.server import start_servers
from tests.promises.peers.site import Site
from tests.support.nodes import refused_by, with_acl_user
from tests.support.worker import Worker


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Five lock nodes with the user of the docs' ACL rule, a broker, a sender."""
    with start_servers(6, config=with_acl_user()) as (*nodes, broker):
        site = Site(nodes, broker, tmp_path_factory.mktemp("peers"))
        yield site
        site.close()
        for node in nodes:
            assert refused_by(node) == set(), "the ACL rule in docs/acl.md is not enough"


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    """A prefork worker with three children."""
    with site.worker("-c", "3") as worker:
        yield worker


@pytest.fixture(autouse=True)
def _no_overlap(site: Site) -> Iterator[None]:
    """After every test: the oracle."""
    begin = time.monotonic()
    yield
    site.check(since=begin)
