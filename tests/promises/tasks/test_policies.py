"""Conflict policies that wait, reject, replace or ask, and what happens at a deadline.

Over fake nodes, by Celery's own tracer; see test_task.py, whose fixtures these are.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import states
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded

from celery_redlock import (
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
    SingletonTask,
    Skipped,
)
from celery_redlock.config.options import TASK, TaskOptions
from celery_redlock.messages.conflict import end
from celery_redlock.messages.headers import ATTEMPTS, RECEIPT
from celery_redlock.messages.policy import (
    Action,
    backoff,
    decide,
    decide_reserved,
    is_split,
    parks,
    set_parking,
)
from celery_redlock.messages.revokes import END
from celery_redlock.protocol.values import Holder, Owner, token_digest
from celery_redlock.worker.startup import check
from tests.support.delivering import Waits, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

HOLDER = "the-holder"


@pytest.fixture
def revoked(app: Any, monkeypatch: Patch) -> list[Any]:
    """Record requests for revocation instead of sending them."""
    found: list[Any] = []
    monkeypatch.setattr(
        app.control, "broadcast", lambda command, arguments: found.append((command, arguments))
    )
    return found


@pytest.fixture
def declare(app: Any) -> Callable[..., Any]:
    def declare(policy: Any, **options: Any) -> Any:
        @app.task(name=f"t{len(app.tasks)}", base=SingletonTask, lock_key="k",
                  lock_on_conflict=policy, **options)  # fmt: skip
        def task() -> str:
            return "ran"

        return task

    return declare


@pytest.fixture
def held(redlock: FakeRedlock) -> Any:
    """Another task has the lock."""
    return redlock.acquire("k", owner=Owner("there", 1, task_id=HOLDER))


def rejected(result: Any) -> None:
    assert isinstance(result, Reject)
    assert result.requeue is False
    assert f"held by task {HOLDER}" in str(result.reason)


def ends(found: tuple[Any, Any], how: str, caplog: Log) -> None:
    """Check that the task gave up in the way `on_deadline` demands."""
    result, info = found
    assert "gives up after" in caplog.text
    if how == "raise":
        assert isinstance(result, ResourceHeld)
        assert info.state == states.FAILURE
    elif how == "skip":
        skipped = Skipped.of(result)
        assert skipped is not None
        assert HOLDER in skipped["holder"]
    else:
        rejected(result)


FEW, HELD = QuorumUnavailable("few"), ResourceHeld("held")


@pytest.mark.parametrize(
    ("declared", "refusal", "attempts", "action"),
    [
        ({}, HELD, None, Action("retry", 0.5)),
        ({}, FEW, None, Action("retry")),
        ({"retry_deadline": 5.0}, HELD, {"stuck": 4.9}, Action("retry", 0.5, "raise", 5.0)),
        ({"retry_deadline": 5.0}, FEW, {"stuck": 5.0}, Action("raise", gives_up=True)),
        ({"retry_deadline": 5.0}, FEW, {"stuck": 5.0, "copy": True}, Action("retry")),
        ({"on_conflict": "skip"}, HELD, {"copy": True}, Action("retry", 0.5)),
        ({"on_conflict": "wait", "on_deadline": "skip"}, HELD, None, Action("wait", 7.0, "skip")),
        ({"on_conflict": print}, HELD, None, Action("ask")),
        ({"on_conflict": print}, FEW, None, Action("retry")),
        ({"on_unavailable": "run"}, FEW, {"copy": True}, Action("run")),
    ],
)
def test_policy_and_attempts_decide_the_action_of_a_refusal(
    declared: Any, refusal: Any, attempts: Any, action: Action
) -> None:
    """A worker and `celery redlock explain` decide by the same function."""
    every = {name: option.default for name, option in TASK.items()}
    options = TaskOptions(**{**every, **declared}, waits={"retry": 0.5, "skip": 0.0, "wait": 7.0})
    assert decide(options, refusal, attempts) == action


@pytest.mark.parametrize(
    ("declared", "parked"),
    [
        ({}, True),
        ({"limit": 2}, True),
        ({"on_conflict": "skip"}, False),
        ({"on_conflict": print}, False),
        ({"scope": "until_executing"}, False),
    ],
)
def test_delivery_can_be_parked_by_its_policy_and_scope_where_a_worker_parks(
    monkeypatch: Patch, declared: Any, parked: bool
) -> None:
    monkeypatch.setattr("celery_redlock.messages.policy._parking", [False])
    every = {name: option.default for name, option in TASK.items()}
    options = TaskOptions(**{**every, **declared}, waits={})
    for parking in (False, True, False):
        set_parking(parking)
        assert parks(options) is (parking and parked)


def test_tasks_put_off_until_a_moment_are_spread_after_it() -> None:
    """Otherwise all of them would come at the same moment."""
    options = TaskOptions(**{name: option.default for name, option in TASK.items()}, waits={})
    away = QuorumUnavailable("few", retry_after=40.0)
    pauses = [backoff(options, away, {"unavailable": 1}, False, 5.0) for _ in range(99)]
    assert 40.1 <= min(pauses) < 40.4 and 40.7 < max(pauses) <= 41.0


@pytest.mark.parametrize(
    ("end", "late", "freed", "successor", "step"),
    [
        (None, False, False, False, "duplicate"),
        (None, False, False, True, "wait"),  # published by the one that has it: about to end
        (None, True, False, True, "duplicate"),
        (states.SUCCESS, False, False, False, "wait"),  # about to free it
        (states.SUCCESS, True, False, False, "free"),
        (states.FAILURE, True, True, False, "duplicate"),
        (states.REVOKED, False, False, False, "free"),  # nobody is about to
        (states.REVOKED, True, True, True, "duplicate"),
    ],
)
def test_reservation_of_another_call_decides_the_next_step(
    end: Any, late: bool, freed: bool, successor: bool, step: str
) -> None:
    assert decide_reserved(end, late=late, freed=freed, successor=successor) == step


@pytest.mark.parametrize("policy", ["skip", "raise", "wait", "reject", "retry"])
def test_holder_whose_result_is_stored_is_waited_for_a_moment(
    redlock: FakeRedlock, held: Any, declare: Any, waits: Waits, policy: str, monkeypatch: Patch
) -> None:
    """The holder may be a member of the group whose chord's body this is.

    With "retry" it tries again.
    """

    def state_of(_task: Any, task_id: str) -> str:
        assert task_id == HOLDER
        redlock.release(held)
        return states.SUCCESS

    monkeypatch.setattr("celery_redlock.messages.results.state_of", state_of)
    result, _info = deliver(declare(policy, acks_late=True))
    assert (result == "ran") is (policy != "retry")


def test_lock_held_on_purpose_after_its_body_is_not_waited_for(
    held: Any, declare: Any, waits: Waits, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("celery_redlock.messages.results.state_of", lambda *_asked: states.SUCCESS)
    assert Skipped.of(deliver(declare("skip", lock_hold_for=60.0))[0]) is not None
    assert waits == [0.0]


@pytest.mark.parametrize("how", ["raise", "skip", "reject"])
@pytest.mark.parametrize("policy", ["wait", "replace"])
def test_waiting_policy_waits_in_its_slot_and_then_obeys_on_deadline(
    held: Any,
    declare: Any,
    sent: Any,
    revoked: Any,
    waits: Waits,
    policy: str,
    how: str,
    caplog: Log,
) -> None:
    task = declare(policy, lock_wait=0.05, lock_on_deadline=how, acks_late=True)
    ends(deliver(task), how, caplog)
    assert all(0 <= wait <= 0.05 for wait in waits)
    assert (waits[0] == 0.0) is (policy == "replace")
    assert (len(revoked), sent) == (policy == "replace", [])


def test_policy_reject_rejects_the_message_without_requeueing_it(
    held: Any, declare: Any, sent: list[Any], waits: Waits
) -> None:
    result, info = deliver(declare("reject", acks_late=True))
    assert info.state == states.REJECTED
    rejected(result)
    assert (waits, sent) == ([0.0], [])


@pytest.mark.parametrize("option", ["on_conflict", "on_deadline"])
def test_policy_reject_without_acks_late_stops_the_worker(
    app: Any, option: str, caplog: Log, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("celery_redlock.messages.policy._parking", [False])
    app.conf.redlock_retry_deadline = 60

    @app.task(name="early", base=SingletonTask, **{f"lock_{option}": "reject"})
    def task() -> None: ...

    worker = SimpleNamespace(app=app)
    with pytest.raises(SystemExit):
        check(worker)
    assert f"early: {option} is 'reject'" in caplog.text
    assert "set acks_late=True" in caplog.text
    task.acks_late = True
    check(worker)


@pytest.mark.parametrize("how", ["raise", "skip", "reject"])
def test_policy_retry_ends_as_on_deadline_says(
    held: Any, redlock: FakeRedlock, declare: Any, sent: list[Any], how: str, caplog: Log
) -> None:
    holder = redlock.holder("k")
    assert holder is not None
    task = declare("retry", lock_retry_deadline=5, lock_on_deadline=how, acks_late=True)
    before = {"held": 3, "unavailable": 3, "pause": 1.0, "holder": holder.digest}
    assert isinstance(deliver(task, **{ATTEMPTS: {**before, "stuck": 3.0}})[0], Retry)
    ends(deliver(task, **{ATTEMPTS: {**before, "stuck": 4.5}}), how, caplog)
    redlock.driver.dead.update({0, 1, 2})
    result, _info = deliver(task, **{ATTEMPTS: {**before, "stuck": 4.5}})
    assert "3 are needed" in str(result.reason if how == "reject" else result)
    assert isinstance(result, {"raise": QuorumUnavailable, "reject": Reject}.get(how, dict))
    assert len(sent) == 1


# -- replace --------------------------------------------------------------------------------------


def test_policy_replace_revokes_its_holder_once_and_takes_over(
    held: Any, redlock: FakeRedlock, declare: Any, revoked: list[Any], waits: Waits
) -> None:
    """It takes over when the lock is free, which is when the holder is dead."""
    waits.then = lambda _wait: len(waits) == 4 and redlock.release(held)  # type: ignore[method-assign]
    assert deliver(declare("replace"))[0] == "ran"
    of = {"task_id": HOLDER, "digest": token_digest(held.token), "terminate": True}
    assert revoked == [(END, of)]  # a second one would be a second signal
    assert (len(waits), waits[0]) == (4, 0.0)


def test_policy_replace_also_revokes_a_faster_successor(
    held: Any, redlock: FakeRedlock, declare: Any, revoked: list[Any], waits: Waits
) -> None:
    leases = [held]

    def then(wait: float | None) -> None:
        if wait:
            redlock.release(leases.pop())
            if len(revoked) == 1:
                leases.append(redlock.acquire("k", owner=Owner("there", 2, task_id="faster")))

    waits.then = then  # type: ignore[method-assign]
    assert deliver(declare("replace"))[0] == "ran"
    assert [of["task_id"] for _command, of in revoked] == [HOLDER, "faster"]


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        ({}, "is no task"),
        (None, "is no task"),  # another program's key
        ({"task_id": "the-id", "retries": 1}, "has the id of this very task"),
        ({"task_id": "x" * 201 + "#0123456789abcdef"}, "has an id too long"),
    ],
)
def test_policy_replace_does_not_revoke_a_holder_that_is_no_other_task(
    redlock: FakeRedlock,
    declare: Any,
    revoked: Any,
    waits: Waits,
    owner: Any,
    words: str,
    caplog: Log,
) -> None:
    if owner is not None:
        redlock.acquire("k", owner=Owner("there", 1, **owner))
    for node in redlock.fakes if owner is None else ():
        node.occupy("k")
    task = declare("replace", lock_wait=60, lock_on_deadline="skip")
    assert Skipped.of(deliver(task)[0]) is not None
    assert f"cannot replace its holder, which {words}" in caplog.text
    assert (revoked, waits) == ([], [0.0])


def test_policy_replace_does_not_revoke_a_holder_of_less_than_a_quorum(
    redlock: FakeRedlock, declare: Any, revoked: list[Any], waits: Waits
) -> None:
    """The other has tried to acquire it, as this task did; it does not hold the lock."""
    for index, node in enumerate(redlock.fakes[:4]):
        token = Owner("there", 1, task_id=f"t{index % 2}").token("0" * 32)
        node.held["k"] = (token, redlock.clock() + 60)
    deliver(declare("replace", lock_wait=0.01))
    assert revoked == []


def test_policy_replace_goes_on_when_the_broker_is_away(
    held: Any, redlock: FakeRedlock, declare: Any, app: Any, monkeypatch: Patch, caplog: Log
) -> None:
    def revoke(*_args: Any, **_options: Any) -> None:
        redlock.release(held)  # it ends by itself
        raise OSError("away")

    monkeypatch.setattr(app.control, "broadcast", revoke)
    assert deliver(declare("replace"))[0] == "ran"
    assert f"cannot revoke task {HOLDER}: OSError('away')" in caplog.text


# -- a function -----------------------------------------------------------------------------------


def test_policy_function_is_called_with_holder_and_request_at_a_conflict(
    held: Any, redlock: FakeRedlock, declare: Any
) -> None:
    asked: list[Any] = []

    def decide(holder: Any, request: Any) -> str:
        asked.append((holder, request.id, request.retries))
        return "skip"

    task = declare(decide)
    assert Skipped.of(deliver(task, retries=2)[0]) is not None
    redlock.release(held)
    assert deliver(task)[0] == "ran"
    ((holder, *request),) = asked
    assert isinstance(holder, Holder)
    assert holder.owner is not None and holder.owner.task_id == HOLDER
    assert request == ["the-id", 2]


@pytest.mark.parametrize(
    ("policy", "waited"),
    # To wait is to wait for a ttl: whatever a dead machine has left is free then.
    [("retry", 0.5), ("skip", 0.0), ("raise", 0.0), ("wait", 10.0), ("reject", 0.0)],
)
@pytest.mark.parametrize("own", [None, 3.0])
def test_answer_of_a_policy_function_acts_like_a_declared_policy(
    held: Any,
    declare: Any,
    sent: list[Any],
    waits: Waits,
    app: Any,
    policy: str,
    waited: float,
    own: float | None,
) -> None:
    app.conf.redlock_wait = 0.5
    options = {"lock_ttl": 10, "acks_late": True, **({"lock_wait": own} if own else {})}
    asked, _info = deliver(declare(lambda *_asked: policy, **options))
    assert waits == [0.0, waited if own is None else own]  # asked at once
    declared, _info = deliver(declare(policy, **options))
    assert waits[2:] == waits[1:2]
    assert type(asked) is type(declared)
    assert len(sent) == 2 * (policy == "retry")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *(
            (said, "decide, must return one of 'retry', 'skip'")
            for said in ("wate", None, 5, ["skip"])
        ),
        ("reject", "set acks_late=True"),
        *((error, f"decide, failed: {error!r}") for error in (KeyError("x"), Retry("x"))),
        (ResourceHeld("x"), "decide, failed: ResourceHeld('x')"),
        (SoftTimeLimitExceeded(1), "SoftTimeLimitExceeded"),  # and that it stays
    ],
    ids=repr,
)
def test_policy_function_that_fails_or_answers_nonsense_fails_its_task(
    held: Any, declare: Any, sent: list[Any], said: Any, words: str
) -> None:
    def decide(_holder: Any, _request: Any) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    result, info = deliver(declare(decide))
    assert (info.state, sent) == (states.FAILURE, [])
    assert words in str(result)
    if isinstance(said, SoftTimeLimitExceeded):
        assert result is said
        return
    assert type(result) is RedlockError and "on_conflict" in str(result)
    if isinstance(said, Exception):
        assert result.__cause__ is said
        assert f"held by task {HOLDER}" in str(result)
    elif said != "reject":
        assert f"it returned {said!r}" in str(result)


# -- what is sent again ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "serializer"),
    [("application/x-python-serialize", "pickle"), ("application/x-yaml", "yaml"),
     ("application/x-nobody-knows", None), (5, None), (None, None)],
)  # fmt: skip
def test_message_is_sent_again_with_the_serializer_it_came_with(
    held: Any, declare: Any, sent: list[Any], content_type: Any, serializer: Any
) -> None:
    deliver(declare("retry"), **{RECEIPT: {"content_type": content_type}})
    (again,) = sent
    assert again.options.get("serializer") == serializer
    deliver(declare("retry"), **{RECEIPT: "forged"})
    assert sent[1].options.get("serializer") is None


@pytest.mark.parametrize("throws", [(), (KeyError,), KeyError])
def test_only_the_refusal_of_a_delivery_is_logged_without_traceback(throws: Any) -> None:
    """A refusal of another lock that the body wanted keeps its traceback in the log."""
    task = SimpleNamespace(throws=throws)
    for kind in (ResourceHeld, QuorumUnavailable):
        refusal = kind("r is held")
        with pytest.raises(kind):
            end(SimpleNamespace(task=task, called="t[1]"), "raise", refusal)  # type: ignore[arg-type]
        assert isinstance(refusal, task.throws)
        assert isinstance(pickle.loads(pickle.dumps(refusal)), task.throws)
        assert not isinstance(kind("another is held"), task.throws)
    assert not isinstance(ValueError(), task.throws)
    assert isinstance(KeyError(), task.throws) is (throws != ())


@pytest.mark.parametrize(
    ("name", "given"),
    [("compression", "no such"), ("compression", 7), ("argsrepr", ["x"]), ("properties", "x"),
     ("properties", {"delivery_mode": "9", "correlation_id": 7, "timestamp": True})],
)  # fmt: skip
def test_forged_message_options_are_not_taken_over_by_a_retry(
    busy: Any, sent: list[Any], name: str, given: Any
) -> None:
    deliver(busy(), **{name: given})
    (again,) = sent
    options = {"compression", "argsrepr", "delivery_mode", "correlation_id", "timestamp"}
    assert not options & set(again.options)


@pytest.mark.parametrize(
    ("nodes", "expires_in", "split"), [(1, 5.0, True), (2, 5.0, False), (1, math.inf, False)]
)
def test_votes_are_split_if_no_holder_has_a_quorum_and_all_will_give_way(
    nodes: int, expires_in: float, split: bool
) -> None:
    holder = Holder("r", None, nodes, 2, expires_in)
    assert is_split(ResourceHeld("r", holder=holder)) is split
