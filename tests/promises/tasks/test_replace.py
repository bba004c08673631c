"""A call that takes the place of a queued one: over fake nodes, and a broker in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_redlock import SingletonTask, Skipped
from celery_redlock.messages import reservation
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.reservation import HOUR, Reservation
from celery_redlock.messages.revokes import END
from celery_redlock.protocol.values import Owner
from tests.support.delivering import RESERVED, Box, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch

SCOPES = ["until_executing", "until_and_while_executing", "until_executed"]


class Stage:
    """A task whose calls replace each other.

    Attributes:
        revoked: The ids that were revoked.
        ran: The texts of the bodies that ran.
        sending: Called while a message is being sent.
        working: Called by each body.
    """

    def __init__(self, app: Celery, box: Box, redlock: FakeRedlock, patch: Patch) -> None:
        self._app, self._box, self._redlock = app, box, redlock
        self.revoked: list[str] = []
        self.ran: list[str] = []
        self.sending: Callable[[], object] = lambda: None
        self.working: Callable[[], object] = lambda: None
        send_task = app.send_task

        def send(*args: Any, **options: Any) -> Any:
            self.sending()
            return send_task(*args, **options)

        patch.setattr(app, "send_task", send)
        patch.setattr(app.control, "broadcast", self._broadcast)

    def _broadcast(self, command: str, arguments: dict[str, Any]) -> None:
        assert command == END and not arguments["terminate"]
        self.revoked.append(arguments["task_id"])

    def declare(self, scope: str, **options: Any) -> Any:
        @self._app.task(
            base=SingletonTask,
            name=f"notify{len(self._app.tasks)}",
            lock_key="order:<order_id>",
            lock_scope=scope,
            lock_on_duplicate="replace",
            **options,
        )
        def notify(order_id: int, text: str) -> str:
            self.ran.append(text)
            self.working()
            return text

        return notify

    def call(self, task: Any, text: str, **options: Any) -> Any:
        """Publish a call, and return its message."""
        task.apply_async((1, text), countdown=10, **options)
        return self.message()

    def message(self) -> Any:
        """Return what was published since."""
        return self._box.message()

    def messages(self) -> list[Any]:
        """Return all that was published since."""
        return self._box.messages()

    def run(self, task: Any, message: Any, *, again: bool = False) -> Any:
        """Deliver a message as a worker does that knows of no revoke; return its result."""
        headers = message.headers
        given = {"id": headers["id"], RESERVATION: headers[RESERVATION]}
        text = message.payload[0][1]
        result, _ = deliver(task, 1, text, delivery_info={"redelivered": again}, **given)
        return result

    def holder(self) -> str:
        """The task that has the reservation on all nodes; empty if no node has any."""
        (token,) = self._redlock.tokens(RESERVED)
        owner = Owner.of(token) if token else None
        return owner.task_id if owner else ""

    def left(self) -> float:
        """Seconds until its reservation ends."""
        node = self._redlock.fakes[0]
        return node.held[RESERVED][1] - self._redlock.clock()


@pytest.fixture
def stage(app: Celery, box: Box, redlock: FakeRedlock, monkeypatch: Patch) -> Stage:
    return Stage(app, box, redlock, monkeypatch)


class Strike(BaseException):
    """Strikes anywhere."""


def fail(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


# -- A call that cannot be published -------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionError("the broker is away"), Strike()])
@pytest.mark.parametrize("scope", SCOPES)
def test_replacement_that_cannot_be_published_leaves_the_queued_call_as_it_was(
    stage: Stage, scope: str, error: BaseException
) -> None:
    task = stage.declare(scope)
    first = stage.call(task, "first")
    stage.sending = fail(error)
    with pytest.raises(type(error)):
        stage.call(task, "second")
    assert stage.revoked == []
    assert stage.holder() == first.headers["id"]
    assert stage.left() > HOUR  # its countdown is not over
    assert stage.run(task, first) == "first"
    assert stage.holder() == ""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_call_that_begins_while_it_is_replaced_runs_and_leaves_no_reservation(
    stage: Stage, scope: str, fails: bool
) -> None:
    """Its reservation was freed for the other call; if restored then, it would block its key."""
    task = stage.declare(scope)
    first = stage.call(task, "first")

    def begin() -> None:
        assert stage.run(task, first) == "first"
        if fails:
            raise ConnectionError("the broker is away")

    stage.sending = begin
    if fails:
        with pytest.raises(ConnectionError):
            stage.call(task, "second")
        assert stage.holder() == ""
    else:
        second = stage.call(task, "second")
        assert stage.holder() == second.headers["id"]
        assert stage.run(task, second) == "second"


def test_replacement_that_is_out_is_published_though_revoking_fails(
    stage: Stage, app: Celery, monkeypatch: Patch, caplog: Any
) -> None:
    task = stage.declare("until_and_while_executing")
    first = stage.call(task, "first")
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: fail(ConnectionError("away"))())
    second = stage.call(task, "second")
    assert stage.holder() == second.headers["id"]
    assert "could not be revoked" in caplog.text
    assert Skipped.of(stage.run(task, first)) is not None  # the nodes know it as well


@pytest.mark.parametrize("fails", [False, True])
def test_last_of_two_concurrent_replacements_runs_alone(stage: Stage, fails: bool) -> None:
    task = stage.declare("until_and_while_executing")
    messages = [stage.call(task, "first")]

    def meanwhile() -> None:
        stage.sending = lambda: None
        messages.append(stage.call(task, "third"))
        if fails:
            raise ConnectionError("the broker is away")

    stage.sending = meanwhile
    if fails:
        with pytest.raises(ConnectionError):
            stage.call(task, "second")
    else:
        messages.append(stage.call(task, "second"))
    assert stage.holder() == messages[1].headers["id"]
    for message in messages:
        stage.run(task, message)
    assert stage.ran == ["third"]


# -- A call that was replaced --------------------------------------------------------------------


@pytest.mark.parametrize(("left", "published"), [(HOUR, False), (5.0, True)])
@pytest.mark.parametrize("scope", SCOPES)
def test_replaced_call_stays_replaced_though_others_take_the_freed_place(
    stage: Stage, redlock: FakeRedlock, monkeypatch: Patch, scope: str, left: float, published: bool
) -> None:
    """Other calls take the place first, again and again: `left` says whether their messages are
    out. If they are not, this call is sent, as they may never be."""
    notify = stage.declare(scope)
    first = stage.call(notify, "first").headers["id"]
    free_by_id = reservation.free_by_id
    others: list[str] = []

    def outrun(*args: Any) -> Any:
        freed = free_by_id(*args)
        others.append(f"other{len(others)}")
        token = Owner("host", 1, others[-1], task=notify.name).token("a" * 32, redlock.clock())
        for node in redlock.fakes:
            node.held[RESERVED] = (token, redlock.clock() + left)
        return freed

    monkeypatch.setattr(reservation, "free_by_id", outrun)
    result = notify.apply_async((1, "last"), countdown=10)
    assert stage.holder() == others[-1]
    assert set(stage.revoked) == {first, *others[:-1]}
    if published:
        assert stage.message().payload[0][1] == "last"
    else:
        assert result.id == others[-1] and not stage.messages()


@pytest.mark.parametrize(("again", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("scope", SCOPES)
def test_replaced_calls_do_not_run_in_whichever_order_they_come_back(
    stage: Stage, scope: str, order: tuple[int, ...], again: bool, late: bool
) -> None:
    """Such calls come back to a worker that was started after they were revoked."""
    task = stage.declare(scope, acks_late=late)
    messages = [stage.call(task, text) for text in ("one", "two", "three")]
    for number in order:
        stage.run(task, messages[number], again=again)
    assert stage.ran == ["three"]
    assert stage.holder() == ""


def test_call_that_has_begun_runs_again_though_another_is_queued(stage: Stage) -> None:
    """Its worker died, and the message is acknowledged late."""
    task = stage.declare("until_and_while_executing", acks_late=True)
    first = stage.call(task, "first")
    stage.working = fail(MemoryError())
    stage.run(task, first)
    stage.working = lambda: None
    second = stage.call(task, "second")
    stage.run(task, first, again=True)
    stage.run(task, second)
    assert stage.ran == ["first", "first", "second"]


def test_node_that_lies_about_a_ttl_does_not_make_an_unsent_replacement_count(
    stage: Stage, redlock: FakeRedlock
) -> None:
    task = stage.declare("until_and_while_executing")
    first = stage.call(task, "first")

    def begin() -> None:
        node = redlock.fakes[0]
        node.held[RESERVED] = node.held[RESERVED][0], redlock.clock() + HOUR
        stage.run(task, first)
        raise ConnectionError("the broker is away")

    stage.sending = begin
    with pytest.raises(ConnectionError):
        stage.call(task, "second")
    assert stage.ran == ["first"]


def test_id_that_is_used_again_is_not_taken_for_the_call_that_was_replaced(stage: Stage) -> None:
    task = stage.declare("until_and_while_executing")
    stage.call(task, "one", task_id="daily")
    stage.run(task, stage.call(task, "two"))
    stage.run(task, stage.call(task, "three", task_id="daily"))
    assert stage.ran == ["two", "three"]


def test_call_is_published_while_the_body_before_it_has_its_lock(
    stage: Stage, redlock: FakeRedlock
) -> None:
    """The body before it is about to free its reservation: no newer call may be lost."""
    task = stage.declare("until_and_while_executing")
    first = stage.call(task, "first")
    note = Reservation.of(first.headers[RESERVATION], first.headers["id"])
    assert note is not None
    redlock.acquire("order:1", owner=Owner("there", 7, first.headers["id"]))
    second = stage.call(task, "second")
    assert second.headers["id"] != first.headers["id"]


# -- A call that is published without a reservation ----------------------------------------------


def unreserved(stage: Stage, redlock: FakeRedlock, task: Any, text: str, **options: Any) -> Any:
    """Publish a call while too few nodes answer, and return its message."""
    redlock.driver.dead = {0, 1, 2}
    message = stage.call(task, text, **options)
    redlock.driver.dead = set()
    assert "token" not in message.headers[RESERVATION]
    return message


@pytest.mark.parametrize("scope", SCOPES)
def test_unreserved_call_runs_though_an_older_one_has_the_reservation(
    stage: Stage, redlock: FakeRedlock, scope: str
) -> None:
    task = stage.declare(scope)
    old = stage.call(task, "old")
    new = unreserved(stage, redlock, task, "new")
    assert stage.run(task, new) == "new"
    assert stage.holder() == old.headers["id"]
    assert stage.run(task, old) == "old"
    assert stage.holder() == ""


@pytest.mark.parametrize("scope", SCOPES)
def test_unreserved_call_that_retries_runs_again_though_another_is_reserved(
    stage: Stage, redlock: FakeRedlock, scope: str
) -> None:
    task = stage.declare(scope)
    old = stage.call(task, "old")
    new = unreserved(stage, redlock, task, "new")

    def retry() -> None:
        raise task.retry(countdown=10)

    stage.working = retry
    stage.run(task, new)
    stage.working = lambda: None
    again = stage.message()
    assert again.headers["id"] == new.headers["id"]
    assert stage.run(task, again) == "new"
    assert stage.run(task, old) == "old"


def test_unreserved_group_member_is_skipped_if_another_call_is_reserved(
    stage: Stage, redlock: FakeRedlock
) -> None:
    task = stage.declare("until_and_while_executing")
    stage.call(task, "old")
    new = unreserved(stage, redlock, task, "new", task_id="member", group_id="group")
    assert Skipped.of(stage.run(task, new)) is not None


@pytest.mark.parametrize("policy", ["existing", "skip", "raise"])
def test_unreserved_call_that_replaces_nothing_is_skipped_if_another_is_reserved(
    stage: Stage, redlock: FakeRedlock, policy: str
) -> None:
    task = stage.declare("until_and_while_executing")
    stage.call(task, "old")
    new = unreserved(stage, redlock, task, "new", lock={"on_duplicate": policy})
    stage.run(task, new)
    assert stage.ran == []
