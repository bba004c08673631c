"""Deliveries and publications over fake nodes, for the tests of messages.

Deliveries are made by Celery's own tracer in this process, over a broker in memory.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, _state
from celery.app.trace import build_tracer
from celery.canvas import Signature
from kombu.utils.uuid import uuid

from celery_redlock import Redlock, SingletonTask
from celery_redlock.locking.held import HeldLease
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import Owner
from celery_redlock.runtime.complaints import Once
from celery_redlock.worker.parking.admission import AdmissionQueue
from celery_redlock.worker.parking.consumer import Parking
from celery_redlock.worker.parking.memory import ParkingMemory
from celery_redlock.worker.parking.notices import WaitReports
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log as Log
from tests.support.names import Patch

RESERVED = "order:1#reserved"


@pytest.fixture
def redlock(monkeypatch: Patch) -> FakeRedlock:
    fake = FakeRedlock(monkeypatch)
    monkeypatch.setattr("celery_redlock.messages.conflict.unavailable", Once())
    monkeypatch.setattr(Redlock, "from_app", staticmethod(lambda app: fake))
    return fake


@pytest.fixture
def app(redlock: FakeRedlock, monkeypatch: Patch) -> Any:
    # Tasks are shared with every app to come, unless that is undone.
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    monkeypatch.setattr(_state, "_apps", weakref.WeakSet())
    app = Celery("unit", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
    app.conf.redlock_wait = 0
    yield app
    app.close()


def deliver(task: Any, *args: Any, **request: Any) -> tuple[Any, Any]:
    """Handle a message as a pool child does; return the result and the tracer's account."""
    given = {
        "id": "the-id",
        "task": task.name,
        "args": list(args),
        "kwargs": {},
        "is_eager": False,
        "called_directly": False,
        "delivery_info": {},
        "hostname": "here",
        **request,
    }
    traced = build_tracer(task.name, task, app=task.app)("the-id", list(args), {}, given)
    return traced.info.retval if traced.info else traced.retval, traced.info


@pytest.fixture
def sent(monkeypatch: Patch) -> list[Any]:
    """Signatures that were sent, rather than sending them."""
    found: list[Any] = []
    monkeypatch.setattr(Signature, "apply_async", lambda self, *_a, **_k: found.append(self))
    return found


@pytest.fixture
def busy(app: Any, redlock: FakeRedlock) -> Any:
    """A way to declare a task whose lock another has."""
    redlock.acquire("k")

    def declare(**options: Any) -> Any:
        name = f"busy{len(app.tasks)}"
        ran: list[int] = []

        @app.task(name=name, base=SingletonTask, lock_key="k", max_retries=0, **options)
        def task(*args: Any) -> str:
            ran.append(1)
            return "ran"

        task.ran = ran
        return task

    return declare


class Box:
    """The messages that were published."""

    def __init__(self, app: Celery) -> None:
        app.conf.task_default_queue = uuid()  # the memory of this broker is that of all apps
        self._app = app

    def messages(self) -> list[Any]:
        found = []
        with self._app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self._app.conf.task_default_queue)
            while queue.qsize():
                message = queue.get_nowait()
                message.ack()
                found.append(message)
        return found

    def message(self) -> Any:
        (message,) = self.messages()
        return message

    def header(self) -> Any:
        return self.message().headers.get(RESERVATION)


@pytest.fixture
def box(app: Celery) -> Box:
    return Box(app)


def declare(app: Celery, **options: Any) -> Any:
    options = {
        "base": SingletonTask,
        "lock_key": "order:{order_id}",
        "lock_scope": "until_executed",
        **options,
    }

    @app.task(name=f"charge{len(app.tasks)}", **options)
    def charge(order_id: Any, note: Any = None) -> None: ...

    return charge


@pytest.fixture
def charge(app: Celery, box: Box) -> Any:
    return declare(app)


def take(redlock: FakeRedlock, task_id: str, nodes: int = 5, task: str = "") -> None:
    """Reserve it for another message, on so many nodes; of the same task, if none is named."""
    owner = Owner("there", 7, task_id, task=task)
    claim = Claim(RESERVED, owner.token(uuid()), 100.0, 5)
    for node in redlock.fakes[:nodes]:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())


class Ran:
    """The locks and reservations that bodies had."""

    def __init__(self, app: Celery, redlock: FakeRedlock) -> None:
        self.app = app
        self.redlock = redlock
        self.locked: list[bool] = []
        self.reserved: list[set[str | None]] = []
        self.then: Any = None

    def task(self, scope: str, **options: Any) -> Any:
        @self.app.task(
            base=SingletonTask,
            name=f"forged{len(self.app.tasks)}",
            lock_key="order:{order_id}",
            lock_scope=scope,
            **options,
        )
        def charge(order_id: Any, note: Any = None) -> str:
            self.locked.append(not self.redlock.free("order:1"))
            self.reserved.append(self.redlock.tokens(RESERVED))
            if self.then is not None:
                self.then()
            return "done"

        return charge


@pytest.fixture
def ran(app: Celery, redlock: FakeRedlock) -> Ran:
    return Ran(app, redlock)


class Waits(list[Any]):
    """The wait that each attempt on a lock was given; none of them waits.

    Attributes:
        then: Called with that before each attempt.
    """

    def then(self, wait: float | None) -> None: ...


@pytest.fixture
def waits(monkeypatch: Patch) -> Waits:
    found, acquire = Waits(), HeldLease.acquire

    def spy(self: HeldLease, wait: float | None = None) -> None:
        found.append(wait)
        found.then(wait)
        acquire(self, 0.0)

    monkeypatch.setattr(HeldLease, "acquire", spy)
    return found


def token_of(task_id: str = "the-id") -> str:
    return Owner("there", 7, task_id).token(uuid())


def header(scope: str, **more: Any) -> dict[str, Any]:
    return {
        "resources": ["order:1"],
        "scope": scope,
        "on_duplicate": "existing",
        "ttl": 60.0,
        **more,
    }


def request_of(task: Any, given: Any, **more: Any) -> Any:
    """Return the request as a worker's main process has it."""
    return SimpleNamespace(
        task=task, app=task.app, id="the-id", name=task.name, content_type="application/json",
        request_dict={RESERVATION: given}, delivery_info={}, args=[1], kwargs={},
        acknowledged=False, time_start=None, stamps={}, **more,
    )  # fmt: skip


class Received(SimpleNamespace):
    """A message, as a worker has received it."""

    def __init__(self, task: Any, header: Any) -> None:
        super().__init__(**vars(request_of(task, header)))
        self.request_dict["delivery_info"] = {"exchange": "", "routing_key": "celery"}
        self.expires = self._apply_result = None
        self.message = SimpleNamespace(body=b"[]")
        self._already_revoked = False
        self.send_event = self.on_success = self.on_failure = self.on_timeout = lambda *_, **__: (
            None
        )

    def __hash__(self) -> int:
        return id(self)


def _parking(app: Celery) -> Any:
    parking: Any = Parking.__new__(Parking)
    nothing = lambda *_: None  # noqa: E731
    parking._app, parking._longest = app, 60.0
    parking._prefetch = SimpleNamespace(most=10, widen=nothing, widens=True, amqp=True)
    parking._full_since = None
    parking.admission = AdmissionQueue()
    parking._memory = ParkingMemory(parking.admission, 2**26)
    parking._reports = WaitReports(parking.admission, events=True)
    running = SimpleNamespace(worker_pid=1, id="running", name="charge")
    parking.admission.arrive(running, ("order:1",), 0.0, since=0.0, until=0.0)
    parking.dispatcher = SimpleNamespace(watch=nothing)
    driver = SimpleNamespace(driver_type="amqp")
    parking._consumer = SimpleNamespace(connection=SimpleNamespace(transport=driver))
    return parking


def rob(redlock: FakeRedlock, resource: str) -> None:
    """Put another's token in the place of the lease's, on a majority of nodes."""
    for node in redlock.fakes[:3]:
        node.occupy(resource)
