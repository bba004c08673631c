"""A page over five real nodes, and a client for it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jinja2 import BytecodeCache, Environment
from jinja2.bccache import Bucket
from werkzeug.test import Client, TestResponse

from celery_redlock import Redlock
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from celery_redlock.web import make_app, sources, wsgi
from celery_redlock.web.wsgi import Page
from tests.support.nodes import all_connected, told_all
from tests.tools.web import browser

SECRET = "a-token-of-an-operator"
Holds = Callable[..., Any]


class Compiled(BytecodeCache):
    """Templates as Jinja has compiled them, for all pages of this process."""

    def __init__(self) -> None:
        self._code: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self._code:
            bucket.bytecode_from_string(self._code[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._code[bucket.key] = bucket.bytecode_to_string()


@pytest.fixture(scope="session", autouse=True)
def _templates_are_compiled_once() -> Iterator[None]:
    """Not for each page that a test makes: that is a third of what these tests compute."""
    with pytest.MonkeyPatch.context() as patch:
        made = functools.partial(Environment, bytecode_cache=Compiled())
        patch.setattr(wsgi, "Environment", made)
        yield


@pytest.fixture(autouse=True)
def _a_look_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the first one takes longer than a reader is kept waiting."""
    monkeypatch.setattr(sources, "PAGE_WAIT_S", 30.0)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Yield one browser for all tests: its start costs more than the tests do."""
    if browser.missing():
        pytest.skip(browser.missing())
    with browser.browser() as driver:
        yield driver


@pytest.fixture
def redlock(servers: list[LocalServer]) -> Iterator[Redlock]:
    made = Redlock([server.url for server in servers], restart_guard="off")
    yield all_connected(made)
    made.close()


@pytest.fixture
def serve_app() -> Iterator[Callable[..., Client]]:
    """Makes pages that look only when they are asked, and closes them."""
    pages: list[Page] = []

    def made(*app: Any, **options: Any) -> Client:
        pages.append(make_app(*app, idle=None, **options))
        return Client(pages[-1])

    yield made
    for page in pages:
        page.close()


@pytest.fixture
def serve(redlock: Redlock, serve_app: Callable[..., Client]) -> Callable[..., Client]:
    """The same of five nodes."""
    return functools.partial(serve_app, redlock=redlock)


@pytest.fixture
def page(serve: Callable[..., Client]) -> Page:
    """Operators can free locks here."""
    return serve(token=SECRET).application  # type: ignore[return-value]


@pytest.fixture
def client(page: Page) -> Client:
    return Client(page)


@pytest.fixture
def holds(redlock: Redlock) -> Iterator[Holds]:
    """Acquires a lock for a task of that name."""
    leases = []

    def hold(
        resource: str, task: str = "shop.tasks.pay", host: str = "worker-a", **more: Any
    ) -> Any:
        owner = Owner(host, 4001, "6f1c2b", 0, "stamp", task)
        leases.append(redlock.acquire(resource, owner=owner, ttl=600, **more))
        told_all(redlock)
        return leases[-1]

    yield hold
    for lease in leases:
        redlock.release(lease)


def sign_in(client: Client) -> TestResponse:
    return client.post("/login", data={"token": SECRET})


def proof(answer: TestResponse) -> str:
    """Return the proof in the forms of a page."""
    found = re.search(r'name="proof" value="([0-9a-f]+)"', answer.text)
    assert found, "no form on the page"
    return found[1]
