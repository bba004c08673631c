"""The mark that a delivery leaves on the nodes when its work is done, for copies of its message.

Over fake nodes, by Celery's own tracer and with the signal handlers; see test_task.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import states
from celery.exceptions import Ignore, Reject, Retry

from celery_redlock import SingletonTask, current_lease
from celery_redlock.locking.done_mark import look_up, mark_done
from celery_redlock.messages import consume
from celery_redlock.messages.delivery import Delivery
from celery_redlock.messages.headers import ATTEMPTS, RECEIPT
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import mark_of
from celery_redlock.protocol.replies import DONE
from celery_redlock.protocol.values import Owner
from tests.support.delivering import deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch

MARK = mark_of(Owner("here", 1, "the-id", task="t"), ["k"])
AGAIN = {"delivery_info": {"redelivered": True}}
COPY = {ATTEMPTS: {"copy": True}}


@pytest.fixture
def declare(app: Any) -> Callable[..., Any]:
    def declare(**options: Any) -> Any:
        app.tasks.pop("t", None)
        options = {"name": "t", "lock_key": "k", "acks_late": True, **options}

        @app.task(base=SingletonTask, bind=True, ignore_result=True, **options)
        def task(self: Any, then: Any = None) -> str:
            if isinstance(then, BaseException):
                raise then
            if then == "retry":
                raise self.retry(countdown=1)
            if then == "keep":
                current_lease().keep(0.001)
            return "ran"

        task.backend.forget("the-id")  # the memory of this backend is that of all apps
        return task

    return declare


def marks(redlock: FakeRedlock, name: str = MARK) -> int:
    """Return the number of nodes that have the mark."""
    return [node.token(name, redlock.clock()) for node in redlock.fakes].count(DONE)


def ran(found: tuple[Any, Any]) -> bool:
    """Return True if the body has run, and check that it ended quietly if not."""
    result, info = found
    if result == "ran":
        return True
    assert isinstance(result, Ignore)
    assert info.state == states.IGNORED
    return False


def test_done_mark_is_set_on_a_node_before_its_lock_is_free(
    redlock: FakeRedlock, declare: Any
) -> None:
    """Both happen in one step: a node without the lock has the mark, or never had the lock."""
    freed: list[bool] = []
    for node in redlock.fakes:

        def saw(_name: str, _was: Any, token: str | None, _claim: Claim, node: Any = node) -> None:
            if token is None:
                freed.append(node.token(MARK, redlock.clock()) == DONE)

        node.witness = saw
    assert ran(deliver(declare()))
    assert freed == [True] * 5
    assert redlock.free("k")
    assert redlock.driver.rounds == ["acquire", "release"]  # and it costs no round


def test_copy_waits_while_the_done_mark_of_a_bare_quorum_is_uncertain(
    redlock: FakeRedlock, declare: Any, sent: list[Any]
) -> None:
    """A node that has it is away; if that one comes back without it, the body runs again."""
    task = declare()
    redlock.driver.dead.update({3, 4})
    assert ran(deliver(task))
    redlock.driver.dead = {0}
    assert isinstance(deliver(task, **AGAIN)[0], Retry)
    assert sent.pop().options["headers"][ATTEMPTS]["unavailable"] == 1
    assert redlock.free("k")
    redlock.driver.dead.clear()
    redlock.fakes[0].forget()
    assert ran(deliver(task, **AGAIN))


def test_copy_waits_while_a_release_is_under_way(
    redlock: FakeRedlock, declare: Any, sent: list[Any]
) -> None:
    """The first had nodes 0 to 3, and only two of these are free yet: too few have the mark."""
    task = declare()
    first = Owner("there", 1, task_id="the-id", task="t").token("0" * 32)
    until = redlock.clock() + 60
    for node in redlock.fakes[:2]:
        node.held["k"] = (first, until)
    for node in redlock.fakes[2:4]:
        node.held[MARK] = (DONE, until)
    assert isinstance(deliver(task, **AGAIN)[0], Retry)
    assert len(sent) == 1
    for node in redlock.fakes[:2]:
        del node.held["k"]
        node.held[MARK] = (DONE, until)
    assert not ran(deliver(task, **AGAIN))


@pytest.mark.parametrize(
    "how",
    [
        AGAIN,
        COPY,
        {ATTEMPTS: {"held": 1}},  # sent again: the broker may have both
        {ATTEMPTS: {"unavailable": 1}},
        {RECEIPT: {"at": time.monotonic() - 1801.0}},  # kept for longer than the broker lets it
    ],
)
def test_delivery_that_may_be_a_copy_does_not_run_again_after_success(
    declare: Any, how: Any
) -> None:
    task = declare()
    assert ran(deliver(task))
    assert not ran(deliver(task, **how))
    assert ran(deliver(task))  # new: somebody uses an id again


@pytest.mark.parametrize(
    "then",
    [ValueError("x"), Ignore(), Reject("x"), Reject("x", requeue=True), "retry", "skip"],
    ids=repr,
)
def test_delivery_that_did_not_succeed_is_not_marked_done(
    redlock: FakeRedlock, declare: Any, sent: list[Any], then: Any
) -> None:
    lease = redlock.acquire("k") if then == "skip" else None
    deliver(declare(lock_on_conflict="skip"), then)
    assert marks(redlock) == 0
    if lease is not None:
        redlock.release(lease)
    assert ran(deliver(declare(), **AGAIN))


def test_done_mark_of_a_delivery_does_not_count_for_its_retry(
    redlock: FakeRedlock, declare: Any
) -> None:
    task = declare()
    assert ran(deliver(task, retries=0))
    assert ran(deliver(task, retries=1, **AGAIN))
    assert marks(redlock, MARK.replace(":0:", ":1:")) == 5
    assert not ran(deliver(task, retries=1, **AGAIN))


@pytest.mark.parametrize(
    "other", [{"name": "another"}, {"lock_key": "another"}, {"lock_key": ["then"]}], ids=repr
)
def test_done_mark_of_another_task_or_key_does_not_count(declare: Any, other: Any) -> None:
    """Any publisher can give its message the id of any task."""
    assert ran(deliver(declare(**other)))
    task = declare()
    assert ran(deliver(task, **AGAIN))
    assert not ran(deliver(task, **AGAIN))


def test_done_mark_of_several_resources_needs_all_of_them(declare: Any) -> None:
    task = declare(lock_key=lambda then=None: ["a", f"b:{then}"])
    assert ran(deliver(task))
    assert not ran(deliver(task, **AGAIN))
    assert ran(deliver(task, "another", **AGAIN))


def test_early_acknowledged_delivery_is_marked_done_only_if_redelivered(
    redlock: FakeRedlock, declare: Any
) -> None:
    """A message is delivered again only if its task had not begun.

    Then it counts as late-acknowledged.
    """
    task = declare(acks_late=False)
    assert ran(deliver(task))
    assert marks(redlock) == 0
    assert ran(deliver(task, **AGAIN))
    assert marks(redlock) == 5
    assert not ran(deliver(task, **{RECEIPT: {"at": time.monotonic() - 1801.0}}))


def test_done_mark_lives_for_minutes_and_longer_than_any_backoff(
    redlock: FakeRedlock, declare: Any
) -> None:
    assert ran(deliver(declare()))
    redlock.clock.advance(179)
    assert marks(redlock) == 5
    redlock.clock.advance(2)
    assert marks(redlock) == 0
    assert ran(deliver(declare(lock_retry_backoff_max=600)))
    redlock.clock.advance(1199)
    assert marks(redlock) == 5


def test_kept_lock_is_marked_done_too(redlock: FakeRedlock, declare: Any) -> None:
    lease = redlock.lock("k")
    lease.acquire()
    lease.mark = (MARK, 60.0)
    mark_done(lease)
    assert lease.keep(0.5)
    assert marks(redlock) == 5
    redlock.clock.advance(1.0)
    assert redlock.free("k")
    assert not ran(deliver(declare(), **AGAIN))


def test_copy_asks_again_later_if_too_few_nodes_answer_about_the_done_mark(
    redlock: FakeRedlock, declare: Any, sent: list[Any], monkeypatch: Patch
) -> None:
    """A quorum that has the mark may be among those that do not answer."""
    task, away = declare(), {2, 3, 4}
    peek = redlock.driver._carry

    def carry(round_: Any) -> None:
        if round_.verb.word == "peek":
            redlock.driver.dead.update(away)
        peek(round_)
        redlock.driver.dead.clear()

    monkeypatch.setattr(redlock.driver, "_carry", carry)
    assert isinstance(deliver(task, **AGAIN)[0], Retry)
    (again,) = sent
    assert again.options["headers"][ATTEMPTS]["unavailable"] == 1
    assert redlock.free("k")
    away.remove(4)  # three have answered
    assert ran(deliver(task, **AGAIN))
    away.add(4)
    for policy in ("run", "raise"):  # better twice than never
        for node in redlock.fakes:
            node.held.pop(MARK, None)
        assert ran(deliver(declare(lock_on_unavailable=policy), **AGAIN))
        assert redlock.free("k")


@pytest.mark.parametrize("policy", ["retry", "skip", "raise", "wait", "reject", "replace"])
def test_refused_copy_of_a_done_delivery_ends_quietly_under_every_policy(
    redlock: FakeRedlock, declare: Any, sent: list[Any], policy: str
) -> None:
    """Another task has the lock by now; a skip would be reported for the first delivery."""
    task = declare(lock_on_conflict=policy, lock_wait=0)
    assert ran(deliver(task))
    redlock.acquire("k", owner=Owner("there", 1, task_id="other"))
    assert not ran(deliver(task, **AGAIN))
    assert sent == []


@pytest.mark.parametrize(
    ("holder", "how", "copy"),
    [
        ("other", AGAIN, None),
        # It was kept for so long that the broker gave its message to another worker, too.
        ("the-id", {RECEIPT: {"at": time.monotonic() - 1801.0}}, True),
    ],
)
def test_copy_refused_by_its_first_delivery_is_sent_again_as_a_copy(
    redlock: FakeRedlock, declare: Any, sent: list[Any], holder: str, how: Any, copy: bool | None
) -> None:
    redlock.acquire("k", owner=Owner("there", 1, task_id=holder, task="t"))
    result, _info = deliver(declare(), **how)
    assert isinstance(result, Ignore if copy else Retry)
    (again,) = sent
    assert again.options["headers"][ATTEMPTS].get("copy") is copy


@pytest.mark.parametrize("acks_late", [True, False])
@pytest.mark.parametrize("why", ["held", "paused", "unavailable"])
@pytest.mark.parametrize("order", ["first the old one", "first the new one"])
def test_message_sent_again_and_delivered_again_runs_once(
    redlock: FakeRedlock,
    declare: Any,
    sent: list[Any],
    monkeypatch: Patch,
    acks_late: bool,
    why: str,
    order: str,
) -> None:
    """The worker lost the broker before it could acknowledge the old message."""
    task = declare(acks_late=acks_late)
    with monkeypatch.context() as patch:
        if why == "held":
            lease = redlock.acquire("k")
        elif why == "paused":
            patch.setattr(consume, "paused", lambda *_of: "k is paused")
        else:
            redlock.driver.dead.update({0, 1, 2})
        assert isinstance(deliver(task)[0], Retry)
    redlock.driver.dead.clear()
    if why == "held":
        redlock.release(lease)
    (again,) = sent
    both = [AGAIN, {ATTEMPTS: again.options["headers"][ATTEMPTS]}]
    if order == "first the new one":
        both.reverse()
    assert [ran(deliver(task, **how)) for how in both] == [True, False]


def test_done_mark_look_up_sees_a_slot_held_under_a_larger_limit(redlock: FakeRedlock) -> None:
    """A function or an operator may have lowered the limit since the first delivery began."""
    first = Owner("there", 1, task_id="the-id", stamp="first", task="t")
    theirs = [redlock.acquire("k", limit=5, owner=first) for _ in range(5)]
    for lease in theirs:
        if lease.resources != ("k#slot5",):
            redlock.release(lease)
    held = redlock.lock("k", limit=3, owner=replace(first, stamp="second"))
    held.acquire()
    held.mark = (MARK, 60.0)
    assert look_up(held) == (False, True)
    held.release()


# -- a limit --------------------------------------------------------------------------------------


def test_copy_takes_no_other_slot_of_a_key_with_a_limit(
    redlock: FakeRedlock, declare: Any, sent: list[Any], monkeypatch: Patch
) -> None:
    """The first delivery is at work in one slot; there are two more."""
    seen = Delivery.__init__

    def limited(self: Any, message: Any, held: Any) -> None:
        held.request = replace(held.request, limit=3)
        seen(self, message, held)

    monkeypatch.setattr(Delivery, "__init__", limited)
    task = declare(lock_on_conflict="skip")
    first = redlock.acquire("k", owner=Owner("there", 1, task_id="the-id", task="t"), limit=3)
    other = redlock.acquire("k", owner=Owner("there", 1, task_id="other"), limit=3)
    assert not ran(deliver(task, **AGAIN))
    (again,) = sent
    assert again.options["headers"][ATTEMPTS]["copy"] is True
    assert len(redlock.holders("k", limit=3)) == 2
    redlock.release(first)
    assert ran(deliver(task, **COPY))
    redlock.release(other)
    assert redlock.holders("k", limit=3) == []
