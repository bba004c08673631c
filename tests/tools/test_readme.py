"""The examples in the README, run as they stand; only the addresses are those of local servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import _state
from celery.contrib.testing.worker import start_worker

from celery_redlock import LeaseLost, Redlock, ResourceHeld
from celery_redlock.server import LocalServer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
FIRST = PYTHON[0]
(EXAMPLE,) = [text for text in PYTHON if "redlock_nodes = " in text]
PRINTED = next(text for language, text in BLOCKS if not language).splitlines()
ADDRESS = re.compile(r"10\.0\.0\.(\d):6379")


@pytest.fixture
def nobody_else() -> Iterator[None]:
    """Apps and their tasks are forgotten afterwards."""
    state: Any = _state
    before = state._tls.current_app, state.default_app
    shared = set(state._on_app_finalizers)  # tasks go to every app to come, unless that is undone
    yield
    state._on_app_finalizers.intersection_update(shared)
    state._tls.current_app, state.default_app = before


@pytest.fixture
def three(servers: list[LocalServer]) -> list[LocalServer]:
    return servers[:3]


@pytest.fixture
def example(nobody_else: None, three: list[LocalServer]) -> Iterator[dict[str, Any]]:
    """The example's names, its tasks eager: they need no broker and no worker."""

    def local(address: re.Match[str]) -> str:
        number = int(address[1])
        return f"127.0.0.1:{three[number - 1].port}" if number <= 3 else address[0]

    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(ADDRESS.sub(local, EXAMPLE), "README.md", "exec"), names)
    app = names["app"]
    app.conf.task_always_eager = True
    app.conf.redlock_wait = 0  # nobody frees what these tests wait for
    yield names
    Redlock.from_app(app).close()
    app.close()


@pytest.fixture
def other(three: list[LocalServer]) -> Iterator[Redlock]:
    """Somebody else, on the same nodes."""
    redlock = Redlock([server.url for server in three])
    yield redlock
    redlock.close()


def keys(servers: list[LocalServer]) -> list[list[str]]:
    found = []
    for server in servers:
        with redis.Redis(port=server.port, decode_responses=True) as client:
            found.append(sorted(client.keys("*")))
    return found


def test_first_readme_example_prints_what_the_page_shows(
    nobody_else: None, server: LocalServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Calls for one order run one at a time, and those for another order beside them."""
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(FIRST.replace("redis://localhost", server.url), "README.md", "exec"), names)
    app, charge = names["app"], names["charge"]
    calls = re.findall(r"`charge\.delay\((\d), (\d+)\)`", README)
    assert len(calls) == 3
    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
        for result in [charge.delay(int(order), int(amount)) for order, amount in calls]:
            result.get(timeout=20)
    Redlock.from_app(app).close()
    # Two threads may print on one line: `print` writes its end apart.
    printed = re.findall(r"order \d: charg(?:ing|ed) \d+", capfd.readouterr().out)
    of_seven = [line for line in printed if line.startswith("order 7")]
    assert sorted(printed) == sorted(PRINTED)
    assert [line.split()[2] for line in of_seven] == ["charging", "charged"] * 2
    assert printed.index("order 8: charging 10") < printed.index(of_seven[1])


def test_readme_example_runs_and_leaves_nothing(
    example: dict[str, Any], three: list[LocalServer]
) -> None:
    assert example["rebuild"].delay(1).get() == "1.en"
    assert example["charge"].delay(7, 50).get() == "order 7: 50"
    assert example["charge"](7, 60) == "order 7: 60"
    assert keys(three) == [[], [], []]


def test_readme_example_runs_once_at_a_time_per_order(
    example: dict[str, Any], other: Redlock
) -> None:
    with other.lock("order:7"):
        result = example["charge"].delay(7, 50)
        assert result.state == "FAILURE"
        assert isinstance(result.result, ResourceHeld)
        with pytest.raises(ResourceHeld, match="order:7 is held by"):
            example["charge"](7, 50)
        assert example["charge"](8, 50) == "order 8: 50"
    assert example["charge"](7, 50) == "order 7: 50"


def test_ensure_in_the_readme_example_stops_a_body_with_a_short_lease(
    example: dict[str, Any],
) -> None:
    app = example["app"]
    charge = app.task(name="short")(example["locked"]("order:<order_id>", ttl=4)(_charge(example)))
    with pytest.raises(LeaseLost):
        charge(7, 50)


def _charge(example: dict[str, Any]) -> Any:
    return example["charge"].run.__wrapped__
