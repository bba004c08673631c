"""Publishing under a reservation: over fake nodes, and a broker in memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, Task
from celery.canvas import Signature
from celery.result import AsyncResult, EagerResult

from celery_redlock import (
    ConfigurationError,
    DuplicateTask,
    QuorumUnavailable,
    ResourceHeld,
    Skipped,
    locked,
)
from celery_redlock.messages.headers import ATTEMPTS, MAX_ID_CHARS, RESERVATION
from celery_redlock.messages.reservation import MONTH, UNSENT_TTL_S, Reservation
from celery_redlock.messages.results import stored_end
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import Holder, Owner, token_digest
from tests.support.delivering import RESERVED, Box, declare, take
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

# -- the message ---------------------------------------------------------------------------------


def test_reservation_travels_in_a_header(redlock: FakeRedlock, charge: Any, box: Box) -> None:
    sent = charge.delay(1)
    header = box.header()
    assert header["resources"] == ["order:1"]
    assert (header["scope"], header["on_duplicate"]) == ("until_executed", "existing")
    assert redlock.tokens(RESERVED) == {header["token"]}
    owner = Owner.of(header["token"])
    assert owner is not None and owner.task_id == sent.id
    assert redlock.driver.rounds == ["acquire", "renew"]  # one round trip, and no lock
    assert redlock.watchdog.watched == {}


YEAR = 365 * 86_400.0
NOW = datetime.now(timezone.utc)
TIMES: dict[str, tuple[dict[str, Any], dict[str, Any], float, float]] = {
    # name: options of the task, of the call, how long it is reserved from its ETA on, and from now
    "nothing said": ({}, {}, 3600.0, 3600.0),
    "countdown": ({}, {"countdown": 60}, 3600.0, 3660.0),
    "eta": ({}, {"eta": NOW + timedelta(seconds=600)}, 3600.0, 4200.0),
    "naive eta": ({}, {"eta": NOW.replace(tzinfo=None) + timedelta(seconds=60)}, 3600.0, 3660.0),
    "eta in the past": ({}, {"eta": NOW - timedelta(hours=5)}, 3600.0, 3600.0),
    "eta as text": ({}, {"eta": (NOW + timedelta(seconds=60)).isoformat()}, 3600.0, 3660.0),
    "expires": ({}, {"expires": 100}, 100.0, 100.0),
    "expires, of the task": ({"expires": 100}, {}, 100.0, 100.0),
    "expires, of neither": ({"expires": 100}, {"expires": None}, 3600.0, 3600.0),
    "expires at a time": ({}, {"expires": NOW + timedelta(seconds=90)}, 90.0, 90.0),
    "expires as text": ({}, {"expires": (NOW + timedelta(seconds=90)).isoformat()}, 90.0, 90.0),
    "expires long after": ({}, {"countdown": 10, "expires": 9000}, 9000.0, 9000.0),
    "reserve_ttl": ({"lock_reserve_ttl": 30}, {}, 30.0, 30.0),
    "reserve_ttl of the call": ({}, {"lock": {"reserve_ttl": 30}}, 30.0, 30.0),
    "reserve_ttl and countdown": ({"lock_reserve_ttl": 30}, {"countdown": 60}, 30.0, 90.0),
    "expires before": ({"lock_reserve_ttl": 30}, {"expires": 10}, 30.0, 30.0),
    "expires after": ({"lock_reserve_ttl": 30}, {"expires": 100}, 30.0, 30.0),
    "eta in many years": ({}, {"eta": NOW + timedelta(days=9000)}, 3600.0, MONTH),
    "countdown of many years": ({}, {"countdown": 1e9}, 3600.0, MONTH),
    "expires in many years": ({}, {"expires": 1e9}, MONTH, MONTH),
    "reserve_ttl of the call, a month": ({}, {"lock": {"reserve_ttl": MONTH}}, MONTH, MONTH),
    "a year, declared": ({"lock_reserve_ttl": YEAR}, {}, YEAR, YEAR),
    "a year, of both": (
        *({"lock_reserve_ttl": YEAR}, {"lock": {"reserve_ttl": YEAR}, "countdown": 1e9}),
        *(YEAR, YEAR),
    ),
    "for less than seconds": ({"lock_reserve_ttl": 2}, {}, 2.0, 2.0),
}


@pytest.mark.parametrize("name", TIMES)
def test_reservation_lasts_as_long_as_its_options_say(
    redlock: FakeRedlock, app: Celery, box: Box, name: str
) -> None:
    of_task, of_call, ttl, lasts = TIMES[name]
    late = (datetime.now(timezone.utc) - NOW).total_seconds() + 2.0
    declare(app, **of_task).apply_async((1,), **of_call)
    # The time that has gone by since this module was imported counts for moments, not for spans.
    message = box.message()
    assert ttl - late <= message.headers[RESERVATION]["ttl"] <= ttl
    if "expires" not in name:  # it does not expire because of it
        assert message.headers["expires"] is None
    redlock.clock.advance(max(0.0, lasts - late))
    assert not redlock.free(RESERVED)
    redlock.clock.advance(late + 0.001)
    assert redlock.free(RESERVED)


@pytest.fixture
def meanwhile(charge: Any, monkeypatch: Patch) -> Any:
    """A way to have something done while a message is being sent."""
    send_task = charge.app.send_task

    def meanwhile(do: Callable[[], object]) -> None:
        def send(*args: Any, **options: Any) -> Any:
            do()
            return send_task(*args, **options)

        monkeypatch.setattr(charge.app, "send_task", send)

    return meanwhile


@pytest.mark.parametrize(("seconds", "lasts"), [(-0.1, True), (0.1, False)])
def test_reservation_is_short_until_its_message_is_out(
    redlock: FakeRedlock, charge: Any, box: Box, meanwhile: Any, seconds: float, lasts: bool
) -> None:
    """A producer that is killed before it has sent blocks its key for no longer.

    One that has ended is not set again: its message may have come to its end as well.
    """
    meanwhile(lambda: redlock.clock.advance(UNSENT_TTL_S + seconds))
    charge.delay(1)
    assert box.header()["token"]
    assert redlock.driver.rounds == ["acquire", "renew"]  # nobody waits for the second
    redlock.clock.advance(3500.0 if lasts else 0.0)
    assert redlock.free(RESERVED) is not lasts


def test_invalid_or_past_expiry_of_a_call_is_left_to_celery(
    redlock: FakeRedlock, charge: Any, box: Box
) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        charge.apply_async((1,), expires=object())
    assert redlock.free(RESERVED)
    assert box.messages() == []
    charge.apply_async((1,), expires=-5)
    assert box.header()["token"]


@pytest.mark.parametrize("more", [{}, {"task_id": "member", "group_id": "group"}])
@pytest.mark.parametrize("name", ["eta", "expires"])
def test_call_with_a_text_that_is_no_time_is_refused_and_reserves_nothing(
    redlock: FakeRedlock, charge: Any, box: Box, name: str, more: dict[str, Any]
) -> None:
    """A worker would drop such a message as invalid."""
    with pytest.raises(ConfigurationError, match=f"{name} is 'tomorrow', which is no time"):
        charge.apply_async((1,), **{name: "tomorrow"}, **more)
    assert redlock.free(RESERVED)
    assert box.messages() == []
    charge.apply_async((1,), **{name: "2999-01-31T12:00:00+00:00"}, **more)
    assert box.header()["token"]


# -- a duplicate ---------------------------------------------------------------------------------


def test_duplicate_call_gets_what_its_policy_says(
    redlock: FakeRedlock, charge: Any, box: Box
) -> None:
    take(redlock, "first")
    existing = charge.delay(1)
    assert isinstance(existing, AsyncResult) and existing.id == "first"
    with pytest.raises(DuplicateTask, match="order:1 is reserved by task first") as raised:
        charge.apply_async((1,), lock={"on_duplicate": "raise"})
    assert raised.value.task_id == "first"
    skipped = charge.apply_async((1,), lock={"on_duplicate": "skip"})
    assert isinstance(skipped, EagerResult) and Skipped.of(skipped.get()) is not None
    assert box.messages() == []
    assert charge.delay(2).id != "first"
    assert len(box.messages()) == 1


@pytest.fixture
def ends(monkeypatch: Patch) -> Any:
    """A way to say in which state a task has ended, and how long it has to free its key."""

    def ends(state: Any, patience: float = 0.0) -> None:
        state_of = state if callable(state) else lambda *_: state
        monkeypatch.setattr("celery_redlock.messages.results.state_of", state_of)
        monkeypatch.setattr("celery_redlock.messages.publication.PATIENCE_S", patience)

    return ends


@pytest.mark.parametrize("policy", ["existing", "raise", "skip", "replace"])
def test_reservation_of_an_ended_task_is_waited_for_a_moment(
    redlock: FakeRedlock, charge: Any, box: Box, ends: Any, policy: str
) -> None:
    asked: list[str] = []

    def state_of(_task: Any, task_id: str) -> str:
        asked.append(task_id)
        for node in redlock.fakes if len(asked) == 3 else ():
            node.held.clear()
        return "SUCCESS"

    ends(state_of, 0.5)
    take(redlock, "first")
    second = charge.apply_async((1,), lock={"on_duplicate": policy})
    assert asked == ["first"] * 3
    assert box.message().headers["id"] == second.id


@pytest.mark.parametrize("state", ["SUCCESS", "FAILURE", "REVOKED"])
def test_reservation_that_an_ended_task_kept_gives_way_unless_the_task_runs(
    redlock: FakeRedlock, charge: Any, box: Box, ends: Any, monkeypatch: Patch, state: str
) -> None:
    """Its process died before it could free the key; or no worker has seen that it was revoked."""
    ends(state, 0.0 if state == "REVOKED" else 0.05)
    take(redlock, "first")
    second = charge.delay(1)
    assert second.id != "first"
    assert redlock.tokens(RESERVED) == {box.header()["token"]}
    redlock.acquire("order:1", owner=Owner("there", 7, second.id))
    assert charge.delay(1).id == second.id
    redlock.driver.dead = {0, 1, 2}  # nobody knows whether it runs
    refused = ResourceHeld("held", holder=Holder("order:1", Owner("there", 7, second.id), 3, 3))
    monkeypatch.setattr("celery_redlock.messages.reservation.take", lambda *_: refused)
    assert charge.delay(1).id == second.id
    assert box.messages() == []


def test_task_id_used_again_is_not_taken_for_its_ended_namesake(
    charge: Any, box: Box, ends: Any
) -> None:
    """The stored result is that of its previous run."""
    ends("FAILURE")
    first = charge.apply_async((1,), task_id="daily")
    assert charge.apply_async((1,), task_id="daily").id == first.id
    assert len(box.messages()) == 1


@pytest.mark.parametrize("given", ["first", ["other", "first"], ("first",)])
def test_reservation_of_a_task_revoked_here_gives_way_at_once(
    redlock: FakeRedlock, charge: Any, box: Box, monkeypatch: Patch, given: Any
) -> None:
    """No worker needs to have received the revocation, and no result backend is needed."""
    monkeypatch.setattr("celery_redlock.messages.revokes._revoked", OrderedDict())
    take(redlock, "first")
    charge.app.control.revoke(given, destination=["one@worker"])  # the others would run it
    assert charge.delay(1).id == "first"
    charge.app.control.revoke(given)
    assert charge.delay(1).id != "first"
    assert len(box.messages()) == 1


def test_remembered_revokes_are_bounded(charge: Any, monkeypatch: Patch) -> None:
    remembered: OrderedDict[str, bool] = OrderedDict()
    monkeypatch.setattr("celery_redlock.messages.revokes._revoked", remembered)
    monkeypatch.setattr("celery_redlock.messages.revokes.MAX_REVOKED", 3)
    for number in range(5):
        charge.app.control.revoke(str(number))
    charge.app.control.revoke("4", terminate=True)
    charge.app.control.revoke("4")
    assert remembered == {"2": False, "3": False, "4": True}


def test_reservation_kept_until_it_expires_is_not_waited_for(
    redlock: FakeRedlock, app: Celery, box: Box, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("celery_redlock.messages.results.state_of", None)
    task = declare(app, lock_scope="until_expired")
    take(redlock, "first")
    assert task.delay(1).id == "first"


@pytest.mark.parametrize("running", [False, True])
def test_policy_replace_revokes_a_queued_call_and_leaves_a_running_one_alone(
    redlock: FakeRedlock, charge: Any, box: Box, monkeypatch: Patch, running: bool
) -> None:
    revoked: list[Any] = []
    monkeypatch.setattr(
        charge.app.control, "broadcast", lambda *_, **given: revoked.append(given["arguments"])
    )
    take(redlock, "first")
    (queued,) = map(str, redlock.tokens(RESERVED))
    if running:
        redlock.acquire("order:1", owner=Owner("there", 7, "first"))
    second = charge.apply_async((1,), lock={"on_duplicate": "replace"})
    assert (second.id == "first") is running
    assert [one["digest"] for one in revoked] == ([] if running else [token_digest(queued)])
    tokens = {message.headers[RESERVATION]["token"] for message in box.messages()}
    assert tokens == (set() if running else redlock.tokens(RESERVED))


@pytest.mark.parametrize("running", [False, True])
def test_policy_replace_does_not_revoke_a_call_under_its_own_id(
    redlock: FakeRedlock, charge: Any, box: Box, monkeypatch: Patch, caplog: Log, running: bool
) -> None:
    """Both are in the queue then, and a log line reports it."""
    monkeypatch.setattr(charge.app.control, "revoke", None)
    take(redlock, "mine")
    if running:
        redlock.acquire("order:1", owner=Owner("there", 7, "mine"))
    sent = charge.apply_async((1,), task_id="mine", lock={"on_duplicate": "replace"})
    assert sent.id == "mine"
    tokens = {message.headers[RESERVATION]["token"] for message in box.messages()}
    assert tokens == (set() if running else redlock.tokens(RESERVED))
    assert ("queued twice under the id mine" in caplog.text) is not running


def test_replace_revokes_no_task_of_which_nobody_knows_if_it_runs(
    redlock: FakeRedlock, charge: Any, box: Box, monkeypatch: Patch
) -> None:
    async def peek(*_args: Any, **_options: Any) -> Any:
        raise QuorumUnavailable("order:1: too few", resource="order:1", votes=())

    revoked: list[Any] = []
    monkeypatch.setattr(charge.app.control, "broadcast", lambda *_, **given: revoked.append(given))
    take(redlock, "first")
    monkeypatch.setattr(redlock.client, "peek", peek)
    assert charge.apply_async((1,), lock={"on_duplicate": "replace"}).id == "first"
    assert revoked == []
    assert box.messages() == []


@pytest.mark.parametrize("stored", [{}, {"store_errors_even_if_ignored": True}])
def test_result_backend_is_not_asked_about_a_task_that_stores_none(
    redlock: FakeRedlock, app: Celery, box: Box, ends: Any, stored: dict[str, bool]
) -> None:
    """A hanging result backend would delay the producer, and all entries of a beat."""
    asked: list[str] = []
    ends(lambda _task, task_id: asked.append(task_id), 0.0)
    task = declare(app, ignore_result=True, **stored)
    take(redlock, "first")
    assert task.delay(1).id == "first"
    assert asked == ["first"] * bool(stored)


def test_end_of_a_task_unknown_here_is_unknown(charge: Any) -> None:
    """Such a task may be in a queue that `purge` looks through."""
    assert stored_end(charge.app.tasks.get("shop.unknown"), "first") is None


def test_call_is_published_without_a_reservation_if_no_quorum_agrees(
    redlock: FakeRedlock, charge: Any, box: Box, caplog: Log
) -> None:
    """Twice in the queue is better than not at all: the lock decides."""
    take(redlock, "one", nodes=2)
    redlock.driver.dead = {4}
    sent = charge.delay(1)
    assert sent.id != "one"
    assert "token" not in box.header()
    assert "published without a reservation" in caplog.text
    redlock.driver.dead = set()
    charge.delay(1)  # the two nodes with the rest of another's attempt cannot prevent it
    assert "token" in box.header()


def test_foreign_key_in_the_place_of_a_reservation_keeps_no_call_back(
    redlock: FakeRedlock, charge: Any, box: Box, caplog: Log
) -> None:
    claim = Claim(RESERVED, "something", 100.0, 5)
    for node in redlock.fakes:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())
    charge.delay(1)
    assert "token" not in box.header()
    assert "another program's key" in caplog.text


@pytest.mark.parametrize("policy", ["existing", "skip", "raise", "replace"])
def test_call_of_another_task_with_the_same_key_is_no_duplicate(
    redlock: FakeRedlock, app: Celery, box: Box, caplog: Log, policy: str
) -> None:
    """Otherwise the call would never run, or the one it replaces would not, without any message."""
    first = declare(app).delay(1)
    sent = declare(app, lock_on_duplicate=policy).delay(1)
    assert sent.id != first.id
    messages = {message.headers["id"]: message.headers[RESERVATION] for message in box.messages()}
    assert messages.keys() == {first.id, sent.id}
    assert "token" in messages[first.id] and "token" not in messages[sent.id]
    assert "which is another task: give each a template of its own" in caplog.text


@pytest.mark.parametrize("policy", ["retry", "run", "raise"])
def test_call_without_a_quorum_is_published_or_refused_by_its_policy(
    redlock: FakeRedlock, app: Celery, box: Box, caplog: Log, policy: str
) -> None:
    task = declare(app, lock_on_unavailable=policy)
    redlock.driver.dead = {0, 1, 2}
    if policy == "raise":
        with pytest.raises(QuorumUnavailable):
            task.delay(1)
        assert box.messages() == []
    else:
        task.delay(1)
        assert "token" not in box.header()
        assert "published without a reservation" in caplog.text
        caplog.clear()
        task.apply_async((1,), headers={ATTEMPTS: {"unavailable": 1}})  # sent again: it has said so
        assert len(box.messages()) == 1
        assert not [one for one in caplog.records if one.levelname == "WARNING"]
    assert redlock.free(RESERVED)


def test_duplicate_of_a_task_with_a_shortened_id_is_skipped(
    redlock: FakeRedlock, charge: Any, box: Box
) -> None:
    charge.apply_async((1,), task_id="x" * (MAX_ID_CHARS + 1))
    assert box.header()["token"]
    second = charge.delay(1)
    assert isinstance(second, EagerResult) and Skipped.of(second.get()) is not None
    assert charge.apply_async((1,), lock={"on_duplicate": "replace"}).state == "SUCCESS"
    assert box.messages() == []


# -- what must be sent ---------------------------------------------------------------------------

FROZEN: list[dict[str, Any]] = [
    {"task_id": "mine", "reply_to": "someone"},
    {"task_id": "mine", "group_id": "g"},
    {"task_id": "mine", "root_id": "r"},
    {"task_id": "mine", "chord": {"task": "celery.chord"}},
    {"task_id": "mine", "chain": [{"task": "t", "args": [], "kwargs": {}, "options": {}}]},
    {"root_id": "r"},
    {"parent_id": "p"},
    {"link": [{"task": "t", "args": [], "kwargs": {}, "options": {}}]},
    {"link_error": [{"task": "t", "args": [], "kwargs": {}, "options": {}}]},
]


@pytest.mark.parametrize("options", FROZEN)
def test_call_that_others_wait_for_is_published_in_any_case(
    redlock: FakeRedlock, charge: Any, box: Box, options: dict[str, Any]
) -> None:
    take(redlock, "first")
    for policy in ("existing", "raise", "skip", "replace"):
        sent = charge.apply_async((1,), lock={"on_duplicate": policy}, **options)
        assert sent.id == options.get("task_id", sent.id) != "first"
        header = box.header()
        assert "token" not in header
        assert header["on_duplicate"] == policy
    charge.apply_async((2,), **options)
    assert "token" in box.header()


def test_task_id_given_by_the_caller_does_not_exempt_a_call(
    redlock: FakeRedlock, charge: Any, box: Box
) -> None:
    take(redlock, "first")
    assert charge.apply_async((1,), task_id="mine").id == "first"
    assert charge.apply_async((2,), task_id="mine").id == "mine"
    assert Owner.of(box.header()["token"]).task_id == "mine"  # type: ignore[union-attr]


def test_signatures_carry_the_lock_options_of_a_call(
    redlock: FakeRedlock, charge: Any, box: Box
) -> None:
    take(redlock, "first")
    signature = charge.s(1).set(lock={"on_duplicate": "raise"})
    json.dumps(signature)
    with pytest.raises(DuplicateTask):
        signature.delay()
    with pytest.raises(DuplicateTask):
        Signature.from_dict(json.loads(json.dumps(signature)), app=charge.app).apply_async()


# -- what takes none -----------------------------------------------------------------------------


def test_tasks_without_a_reserving_scope_are_published_as_usual(
    redlock: FakeRedlock, app: Celery, box: Box
) -> None:
    @app.task(name="plain")
    def plain(order_id: int) -> None: ...

    declare(app, lock_scope="while_executing").delay(1)
    plain.delay(1)
    assert [message.headers.get(RESERVATION) for message in box.messages()] == [None, None]
    assert redlock.driver.rounds == []


def test_producer_without_reservations_needs_no_nodes(app: Celery, box: Box) -> None:
    """Only its workers have the nodes."""
    app.conf.redlock_nodes = None  # and the broker is no Redis
    declare(app, lock_scope="while_executing").delay(1)
    assert box.header() is None
    with pytest.raises(ConfigurationError, match="redlock_nodes is not set"):
        declare(app).delay(1)


@pytest.mark.parametrize("setting", [{"task_always_eager": True}, {"redlock_enabled": False}])
def test_eager_tasks_and_disabled_locks_reserve_nothing(
    redlock: FakeRedlock, charge: Any, box: Box, setting: dict[str, bool]
) -> None:
    charge.app.conf.update(setting)
    take(redlock, "first")
    before = redlock.tokens(RESERVED)
    result = charge.apply_async((1,), lock={"on_duplicate": "raise"})
    assert result.id != "first"
    assert [message.headers.get(RESERVATION) for message in box.messages()] in ([], [None])
    assert redlock.tokens(RESERVED) == before


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("typing", [True, False])
def test_arguments_that_do_not_fit_are_refused_by_celery(
    redlock: FakeRedlock, app: Celery, box: Box, typing: bool
) -> None:
    task = declare(app, typing=typing)
    if typing:
        with pytest.raises(TypeError, match=r"charge\(\) missing 1 required positional argument"):
            task.delay()
    else:
        task.delay()
        assert box.header() is None
    assert redlock.driver.rounds == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("until_executed", "lock= takes a mapping"),
        ({"ttl": 5}, "a call can be given scope, on_duplicate, reserve_ttl"),
        ({"scope": "always"}, "scope must be one of"),
        ({"on_duplicate": "ignore"}, "on_duplicate must be one of"),
        ({"reserve_ttl": -1}, "reserve_ttl must be"),
        ({"scope": "until_expired", "on_duplicate": "replace"}, "no task takes its place"),
        ({"scope": "while_executing", "on_duplicate": "skip"}, "makes none"),
    ],
)
def test_invalid_lock_options_of_a_call_are_refused(
    charge: Any, box: Box, given: Any, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        charge.apply_async((1,), lock=given)
    with pytest.raises(ConfigurationError, match=r"no call reads lock_ttl; .* lock=\{'scope'"):
        charge.apply_async((1,), lock_ttl=5)
    with pytest.raises(ConfigurationError, match="order_id"):  # nor an argument without a text
        charge.delay(object())
    assert box.messages() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": "until_executed", "limit": 2}, "use 'until_and_while_executing'"),
        ({"scope": "until_executing", "limit": 2}, "use 'until_and_while_executing'"),
        ({"scope": "until_expired", "on_duplicate": "replace"}, "no task takes its place"),
        ({"scope": "while_executing", "on_duplicate": "skip"}, "lock_on_duplicate applies to"),
        ({"scope": "while_executing", "reserve_ttl": 5}, "lock_reserve_ttl applies to"),
        ({"scope": "until_done"}, "lock_scope must be one of"),
    ],
)
def test_contradictory_scope_options_are_refused_when_declared(
    app: Celery, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        bool(declare(app, **{f"lock_{name}": value for name, value in options.items()}))


def test_lock_option_in_a_call_of_a_task_without_a_lock_is_refused(app: Celery) -> None:
    @app.task(name="plain")
    def plain() -> None: ...

    with pytest.raises(ConfigurationError, match="plain takes no lock"):
        plain.apply_async(lock={"scope": "until_executed"})


def test_lock_option_of_a_task_sent_by_its_name_is_refused(app: Celery) -> None:
    given = {"on_duplicate": "skip"}
    unknown = app.signature("elsewhere.charge", (1,)).set(lock=given)
    for send in (lambda: app.send_task("elsewhere.charge", (1,), lock=given), unknown.delay):
        with pytest.raises(ConfigurationError, match=r"elsewhere\.charge is sent by its name"):
            send()
    stamped = {"stamped_headers": ["lock"], "lock": "of a door"}
    assert app.send_task("elsewhere.charge", (1,), **stamped).id


# -- what goes wrong -----------------------------------------------------------------------------


class Strike(BaseException):
    """Strikes anywhere."""


@pytest.mark.parametrize("error", [ConnectionError("the broker is away"), Strike()])
def test_failed_publication_leaves_no_reservation(
    redlock: FakeRedlock, charge: Any, meanwhile: Any, error: BaseException
) -> None:
    def fail() -> None:
        assert not redlock.free(RESERVED)
        raise error

    meanwhile(fail)
    with pytest.raises(type(error)):
        charge.delay(1)
    assert redlock.free(RESERVED)


def test_interrupt_between_reservation_and_message_leaves_no_reservation(
    redlock: FakeRedlock, charge: Any, box: Box, monkeypatch: Patch
) -> None:
    run = redlock.driver.run

    def struck(operation: Any) -> Any:
        monkeypatch.setattr(redlock.driver, "run", run)
        run(operation)
        raise Strike

    monkeypatch.setattr(redlock.driver, "run", struck)
    with pytest.raises(Strike):
        charge.delay(1)
    assert redlock.free(RESERVED)
    assert box.messages() == []


# -- the seam ------------------------------------------------------------------------------------


def test_functions_under_locked_are_reserved_too(
    redlock: FakeRedlock, app: Celery, box: Box
) -> None:
    @app.task(name="under", bind=True)
    @locked("order:<order_id>", scope="until_executed")
    def under(self: Task, order_id: int) -> None: ...

    @locked("order:<order_id>", scope="until_executed")
    @app.task(name="over")
    def over(order_id: int) -> None: ...

    for order, task in enumerate((under, over)):
        first = task.delay(order)
        assert box.header()["resources"] == [f"order:{order}"]
        assert task.delay(order_id=order).id == first.id
        assert box.messages() == []


# -- what a message says -------------------------------------------------------------------------

GOOD = Reservation(("k",), "until_executed", "skip", 5.0, Owner("h", 1, "id").token("n"))


def test_reservation_header_is_read_back_as_it_was_written() -> None:
    for note in (
        GOOD,
        Reservation(("a", "b"), "until_expired", "raise", 1.0),
        Reservation(("k",), "until_executing", "existing", 1.0, begun=True),
    ):
        assert Reservation.of(json.loads(json.dumps(note.header())), "id") == note
    assert "n" not in repr(GOOD).split("token")[-1][:3]


BAD: list[Any] = [
    None, 1, "text", [], {}, {"resources": "k"},
    {"resources": []}, {"resources": [1]}, {"resources": [""]}, {"resources": ["k" * 513]},
    {"resources": [f"k{n}" for n in range(101)]}, {"resources": ["k#done"]}, {"resources": None},
    {"scope": "always"}, {"scope": ["until_executed"]}, {"scope": None},
    {"on_duplicate": "no"}, {"on_duplicate": {}},
    {"ttl": "5"}, {"ttl": None}, {"ttl": True}, {"ttl": float("nan")}, {"ttl": float("inf")},
    {"token": 5}, {"token": ["t"]}, {"token": "x" * 1001},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_malformed_reservation_header_counts_as_none(bad: Any) -> None:
    whole = {**GOOD.header(), **bad} if isinstance(bad, dict) and bad else bad
    assert Reservation.of(whole, "id") is None


@pytest.mark.parametrize("task_id", ["other", None, 5, ["id"]])
def test_token_of_a_reservation_header_for_another_task_id_is_dropped(task_id: Any) -> None:
    """Such a token is in headers that a task has passed on."""
    note = Reservation.of(GOOD.header(), task_id)
    assert note is not None and note.token == ""


def test_reservation_header_of_another_message_is_not_sent_on(
    redlock: FakeRedlock, charge: Any, box: Box
) -> None:
    charge.delay(1)
    headers = box.message().headers
    charge.apply_async(
        (2,), headers={RESERVATION: headers[RESERVATION], "theirs": 1}, task_id="mine"
    )
    message = box.message()
    assert message.headers["theirs"] == 1
    assert message.headers[RESERVATION]["resources"] == ["order:2"]
