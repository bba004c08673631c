"""Servers for all tests. They are started once a module and made as new before each test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import _state
from celery.result import AsyncResult

from celery_redlock import Redlock
from celery_redlock.config.options import GLOBAL
from celery_redlock.locking import stack
from celery_redlock.locking.client import LockClient
from celery_redlock.messages import policy
from celery_redlock.server import LocalServer, start_servers
from celery_redlock.stores.driver import Driver
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import lanes, machine, wanting
from tests.support import rabbitmq as local_rabbitmq

COROUTINE_LASTS = 120.0
"""Seconds until a test that is a coroutine is cancelled."""

PATIENT = 2.0
"""Seconds to wait for a node at most, in this process, where a test does not say otherwise."""

WORKER_LINES = 60
"""Lines of each worker that a failed test shows."""


def pytest_configure(config: pytest.Config) -> None:
    """All that is started here makes its temporary files in one directory, which goes in the end.

    A worker that is killed leaves one behind: billiard's, for what it shares with its children.
    Not in one of pytest's, whose names are too long for the path of a socket.
    """
    # A shell that starts us in the background has us ignore it, and all that we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A result that is collected when its backend has gone unsubscribes: with a Celery before 5.7,
    # for minutes.
    AsyncResult.__del__ = lambda _result: None  # type: ignore[method-assign]
    if hasattr(config, "workerinput"):  # its parent has done it for all lanes
        return
    before = tempfile.gettempdir()
    path = tempfile.mkdtemp(prefix="redlock-tests-")
    os.chmod(path, 0o755)  # an example starts PostgreSQL, as another user where we are root
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", path)
    patch.setattr(tempfile, "tempdir", path)
    patch.setenv("PYTEST_DEBUG_TEMPROOT", os.environ.get("PYTEST_DEBUG_TEMPROOT", before))
    config.add_cleanup(lambda: shutil.rmtree(path, ignore_errors=True))
    config.add_cleanup(patch.undo)
    patch.setenv(machine.VARIABLE, "")
    watcher = machine.watch(os.path.join(path, "stalls"))
    config.add_cleanup(watcher.wait)
    config.add_cleanup(watcher.kill)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not read a file that `make test` leaves to `make test-more`: each lane would."""
    path = (
        f"{collection_path.relative_to(config.rootpath).as_posix()}{'/' * collection_path.is_dir()}"
    )
    return True if "not more" in config.option.markexpr and lanes.is_more(path) else None


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if lanes.is_more(item.nodeid):
            item.add_marker("more")
        if item.nodeid.startswith(lanes.WORKERS):
            item.add_marker("worker")
    if hasattr(config, "workerinput"):  # one of several lanes
        items.sort(key=lambda item: lanes.place(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    lane = getattr(session.config, "workerinput", None)
    alone = lane is None or sys.dont_write_bytecode
    gc.disable()  # what is made here stays: a million objects, to be looked through again and again
    with contextlib.nullcontext() if alone else lanes.in_turn(lane["workerid"]):
        result = yield
    gc.enable()
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if wanting.advice():
        terminalreporter.write_line(wanting.advice(), yellow=True)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.scheduler(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in a loop that says what blocks it or is left pending."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        # By a timer: a task that waited would be one more, and tests look for leftover tasks.
        asyncio.get_running_loop().call_later(COROUTINE_LASTS, task.cancel)
        await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted})

    asyncio.run(main(), debug=True)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """With a failure come the last lines of its workers: it may not happen again."""
    report: Any = yield
    # Not every `cluster` is one with workers.
    path = getattr(getattr(item, "funcargs", {}).get("cluster"), "path", None)
    if report.failed and isinstance(path, Path):
        for log in path.glob("worker-*.log"):
            if log.stat().st_mtime < call.start:
                continue
            lines = log.read_text(errors="replace").splitlines()[-WORKER_LINES:]
            report.sections.append((f"end of {log.name}", "\n".join(lines)))
    return report


@pytest.fixture(autouse=True)
def _servers_just_started_may_vote_and_take_their_time(
    request: pytest.FixtureRequest,
) -> Iterator[None]:
    """The restart guard is off in this process, for locks and apps that do not say otherwise.

    It is on by default, and would let no server vote that the tests have just started. Tests of
    the guard ask for it: `restart_guard="uptime"`. Programs that tests start must say "off". Tests
    of the defaults themselves bear the mark `defaults`.
    """
    with pytest.MonkeyPatch.context() as patch:  # not the test's own, which it may undo
        if not request.node.get_closest_marker("defaults"):
            patch.setitem(Redlock.__init__.__kwdefaults__, "restart_guard", "off")
            patch.setattr(GLOBAL["restart_guard"], "default", "off")
            # And nodes may take their time: on a busy machine, a healthy one is no late one.
            patch.setitem(Redlock.__init__.__kwdefaults__, "node_timeout", PATIENT)
            patch.setattr(GLOBAL["node_timeout"], "default", PATIENT)
            # All of it, however short the ttl: a lock counts its time by its own clock.
            patch.setattr(LockClient, "patience", lambda client, _ttl: client.node_timeout)
            # A request to a node that is not connected yet is never sent.
            *others, _rest = Driver.connect.__defaults__ or ()
            patch.setattr(Driver.connect, "__defaults__", (*others, PATIENT))
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_to_the_next() -> Iterator[None]:
    """Undo what tests change for the whole process.

    An app's tasks go to every app to come, and a worker in this process sets the level of the log.
    A lease that a test does not give back is the current one of those that follow.
    """
    logging.root.setLevel(logging.WARNING)
    tasks = set(_state._on_app_finalizers)
    yield
    policy.set_parking(False)  # as a worker that was started in this process leaves it
    _state._on_app_finalizers.intersection_update(tasks)
    left = stack.leases()
    for lease in left:
        stack.drop(lease)
    assert not left, "it leaves a lease to the next test"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    """Five independent servers: the nodes of a Redlock.

    A test may pause and kill them as it likes; one that changes their configuration starts its own.
    """
    with start_servers(5) as five:
        yield five


@pytest.fixture
def admins(servers: list[LocalServer]) -> Iterator[list[redis.Redis]]:
    """A client for each of the servers, that reads text."""
    clients = [redis.Redis(port=server.port, decode_responses=True) for server in servers]
    yield clients
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """Start one more server, a sixth beside `servers`: a broker, or a single node."""
    with LocalServer() as one:
        yield one


@pytest.fixture(scope="module")
def started_database() -> Iterator[LocalPostgres]:
    """A PostgreSQL with our tables."""
    from tests.support.postgres import start_postgres  # here: it needs a driver

    with start_postgres() as one:
        yield one


@pytest.fixture
def database(started_database: LocalPostgres) -> LocalPostgres:
    """The same, with nothing in its tables."""
    from tests.support import postgres

    postgres.as_new(started_database)
    return started_database


@pytest.fixture(scope="module")
def database_server() -> Iterator[LocalPostgres]:
    """A PostgreSQL without our tables, for databases of a test's own."""
    from tests.support.postgres_sites import empty_server

    with empty_server() as one:
        yield one


@pytest.fixture(params=["the usual server", "redis-server"], scope="module")
def acl_node(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """A server for users of its own, who outlive FLUSHALL."""
    binary = shutil.which("redis-server") if request.param == "redis-server" else None
    if binary is None and request.param == "redis-server":
        pytest.skip("no redis-server is installed")
    with LocalServer(binary=binary) as one:
        yield one


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[str]:
    """The URL of a RabbitMQ. It takes seconds to start: one for all tests, queues of their own."""
    if local_rabbitmq.missing():
        pytest.skip(local_rabbitmq.missing())
    with local_rabbitmq.start_rabbitmq() as url:
        yield url


@pytest.fixture(autouse=True)
def _servers_as_new(request: pytest.FixtureRequest) -> None:
    """Before each test: whatever the last one did, the servers it uses run and are empty."""
    used: list[Any] = []
    if "servers" in request.fixturenames:
        used += request.getfixturevalue("servers")
    if "server" in request.fixturenames:
        used.append(request.getfixturevalue("server"))
    if all(isinstance(one, LocalServer) for one in used):
        as_new(used)
    else:
        from tests.support import stores

        stores.as_new(used)


def as_new(servers: Iterable[LocalServer]) -> None:
    """Resume the paused, start the dead, empty all; restart what refuses to be emptied."""
    for server in servers:
        server.resume()
        server.start()
        if not emptied(server):
            server.restart()


def emptied(server: LocalServer) -> bool:
    """Empty a server; whether it did it. By hand: a client takes ten times as long to be made."""
    secret = (server.password or "").encode()
    log_in = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(secret), secret) if secret else b""
    wanted, heard = b"+OK\r\n" * (2 if secret else 1), b""
    # Two seconds: one that was busy or paused first works off what its clients had sent.
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", server.port), 2.0) as connection,
    ):
        connection.sendall(log_in + b"FLUSHALL\r\n")
        while len(heard) < len(wanted) and (more := connection.recv(64)):
            heard += more
    return heard == wanted


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of this test's own."""
    name: str = request.node.name
    return "".join(letter if letter.isalnum() else "-" for letter in name)
