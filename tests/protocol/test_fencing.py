"""Fencing tokens: which number a lease gets, and who must know it before anybody sees it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule

from celery_redlock import ConfigurationError, Redlock, current_lease
from celery_redlock.beat.claims import TickClaims
from celery_redlock.locking.unlocked import Unlocked
from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import NodeError, QuorumUnavailable
from celery_redlock.protocol.lease import FENCE_LIMIT
from celery_redlock.protocol.outcome import refusal
from celery_redlock.protocol.quorum import FENCE_AHEAD
from celery_redlock.protocol.replies import decode
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.stores.redis.requests import FENCE_LIFE_MS, encode
from tests.support.fake_lock import FakeRedlock
from tests.support.steps import NOW, PATIENCE, TTL, claim, ended

Steps = Any


def asked(claim: Claim, answers: str | list[Any], proposal: int = 100) -> tuple[Steps, Round]:
    """An attempt whose ACQUIRE has been answered; None is no answer yet."""
    steps = quorum.acquire(claim, NOW, PATIENCE, proposal)
    round_ = next(steps)
    claim.written = (1 << claim.nodes) - 1  # as the nodes' pipelines do that take it up
    for node, answer in enumerate(answers):
        if answer is not None:
            round_.answer(node, answer, NOW + 0.01)
    round_.close("no answer")
    return steps, round_


def told(steps: Steps, answers: list[bool | None]) -> Round:
    """Return the FENCE round of an attempt, with these answers."""
    round_: Round = steps.send(NOW + 0.02)
    assert round_.verb is Verb.FENCE
    for node, answer in enumerate(answers):
        if answer is not None:
            round_.answer(node, answer, NOW + 0.03)
    return round_


# -- Which number


def test_fencing_needs_one_round_if_a_quorum_answers_the_same() -> None:
    mine = claim()
    steps, ballot = asked(mine, [100, 100, 100, None, "theirs"])
    assert ended(steps) is ballot
    assert (mine.held(NOW + 0.01), mine.fencing_token) == (True, 100)


@pytest.mark.parametrize(
    "answers", [[100, 100, 101, None, None], [101, 102, 103, None, None], [7, 7, 9, 8, 9]]
)
def test_largest_fencing_token_is_written_to_all_nodes_before_it_is_granted(
    answers: list[Any],
) -> None:
    mine = claim()
    steps, _ballot = asked(mine, answers)
    fence = told(steps, [True, None, True, None, None])
    assert list(fence.targets) == [0, 1, 2, 3, 4]
    assert not fence.decided and mine.granted_at is None
    fence.answer(3, True, NOW + 0.04)
    assert fence.decided
    assert ended(steps) is fence
    assert mine.held(NOW + 0.05)
    assert mine.fencing_token == max(answer for answer in answers if answer)


def test_larger_number_that_comes_late_changes_no_fencing_token() -> None:
    mine = claim(3)
    steps, ballot = asked(mine, [100, 101, None])
    fence: Round = steps.send(NOW + 0.02)
    ballot.answer(2, 500, NOW + 0.03)
    assert mine.expiries[2] == NOW + TTL
    for node in (0, 2):
        fence.answer(node, True, NOW + 0.03)
    ended(steps)
    assert mine.fencing_token == 101


# -- When the number cannot be sent


@pytest.mark.parametrize("answers", [[True, True, None], [True, False, None]])
def test_fencing_token_that_no_quorum_confirms_is_not_granted(answers: list[bool | None]) -> None:
    mine = claim()
    steps, _ballot = asked(mine, [100, 101, 102, None, "theirs"])
    fence = told(steps, answers)
    fence.close("no answer")
    undoing = steps.send(NOW + 0.2)
    assert undoing.verb is Verb.UNDO
    assert list(undoing.targets) == [0, 1, 2, 3]  # as for any attempt: all that did not say no
    assert mine.ended and mine.granted_at is None
    error = refusal("r", ended(steps) or fence, list("abcde"), TTL)
    assert isinstance(error, QuorumUnavailable)
    yes = sum(answer is True for answer in answers)
    assert f"{yes} of 5 nodes confirmed its fencing token in time; 3 are needed" in str(error)


def test_node_that_lost_the_key_meanwhile_confirms_no_fencing_token() -> None:
    mine = claim(3)
    steps, _ballot = asked(mine, [100, 101, None])
    fence = told(steps, [False])
    assert not fence.decided
    fence.silence(1, "down")
    assert fence.decided  # no quorum can confirm it
    fence = told(asked(mine, [100, 101, None])[0], [False, True, True])
    assert fence.amnesiac == fence.claims
    # Two know the number; but only one still promises to keep the key.
    assert steps.send(NOW + 0.04).verb is Verb.UNDO
    assert mine.granted_at is None


def test_node_that_may_have_forgotten_locks_confirms_no_fencing_token() -> None:
    steps, _ballot = asked(claim(3), [100, 101, None])
    fence: Round = steps.send(NOW + 0.02)
    fence.answer(0, True, NOW + 0.03)
    fence.answer(2, True, NOW + 0.03, "started 1 s ago")
    assert (fence.yes, fence.silent, fence.decided) == (1, 1, False)
    assert fence.details[2] == "started 1 s ago"
    fence.answer(1, False, NOW + 0.03, "started 1 s ago")
    assert fence.amnesiac == fence.claims  # what it does not hold it does not hold
    assert steps.send(NOW + 0.04).verb is Verb.UNDO


def test_time_left_is_checked_after_the_second_round_of_fencing() -> None:
    mine = claim(3)
    steps, _ballot = asked(mine, [100, 101, None])
    fence = told(steps, [True, True, True])
    assert steps.send(NOW + TTL).verb is Verb.UNDO
    error = refusal("r", fence, list("abc"), TTL)
    assert "too late for a ttl of 10 s" in str(error)


# -- Proposals


@pytest.fixture
def redlock() -> Redlock:
    return Redlock(["redis://127.0.0.1:1"])


def test_proposed_fencing_token_exceeds_earlier_ones_if_the_wall_clock_steps_back(
    redlock: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def grant(operation: Any, _ahead: None) -> Round:
        steps = operation(NOW)
        round_: Round = next(steps)
        round_.answer(0, round_.claims[0].proposal, NOW)
        return ended(steps)

    monkeypatch.setattr(redlock.client.driver, "ask", grant)
    monkeypatch.setattr(time, "time_ns", lambda: 5_000_000_000)
    assert redlock.acquire("r", fencing=True).fencing_token == 5_000_000
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)  # it steps back
    assert redlock.acquire("r", fencing=True).fencing_token == 5_000_001
    assert redlock.acquire("s", fencing=True).fencing_token == 5_000_002
    redlock.client.start_afresh()  # a fork's child
    assert redlock.client.proposal() == 5_000_003


def test_wall_clock_for_fencing_is_read_after_the_start_of_the_lease(
    redlock: Redlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If read before, a process stopped in between would propose a number overtaken long ago."""
    events = []

    def proposal() -> int:
        events.append("proposal")
        return 100

    async def ask(operation: Any, _ahead: None) -> Round:
        events.append("now")
        steps = operation(NOW)
        round_: Round = next(steps)
        round_.answer(0, round_.claims[0].proposal, NOW)
        return ended(steps)

    monkeypatch.setattr(redlock.client, "proposal", proposal)
    monkeypatch.setattr(redlock.client.driver, "ask", ask)
    redlock.acquire("r", fencing=True)
    assert events == ["now", "proposal"]
    redlock.acquire("r")
    assert events == ["now", "proposal", "now"]


# -- Bytes


def fenced() -> Round:
    return next(quorum.acquire(Claim("r", "mine", TTL, 1), NOW, PATIENCE, 100))


@pytest.mark.parametrize("reply", [99, 101 + FENCE_AHEAD, 2**53, None, [1], 1.5], ids=str)
def test_implausible_fencing_token_in_a_reply_is_refused(reply: Any) -> None:
    with pytest.raises(NodeError, match="no valid reply"):
        decode(fenced(), reply)
    for number in (100, 100 + FENCE_AHEAD):
        assert decode(fenced(), number) == number
    assert decode(fenced(), b"theirs") == "theirs"


@pytest.mark.parametrize(
    ("proposal", "wall", "most"),
    [
        (100, 100, 100 + FENCE_AHEAD),
        (100, None, 100 + FENCE_AHEAD),
        (500, 100, 100 + FENCE_AHEAD),  # by the clock, and not by the last token
        (101 + FENCE_AHEAD, 100, 101 + FENCE_AHEAD),  # the clock has stepped back
        (FENCE_LIMIT - 1, FENCE_LIMIT - 1, FENCE_LIMIT),
    ],
)
def test_fencing_token_far_ahead_of_the_clock_is_refused(
    proposal: int, wall: int | None, most: int
) -> None:
    round_ = next(quorum.acquire(Claim("r", "mine", TTL, 1), NOW, PATIENCE, proposal, wall))
    assert round_.claims[0].ceiling == most
    assert b"\r\n%d\r\n" % most in encode(round_, "app:")  # honest nodes go no further
    assert decode(round_, most) == most
    with pytest.raises(NodeError, match="no valid reply"):
        decode(round_, most + 1)


def test_fencing_number_is_kept_until_clocks_have_passed_it() -> None:
    assert int(FENCE_LIFE_MS) * 1000 > FENCE_AHEAD


# -- What holders see


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> FakeRedlock:
    return FakeRedlock(monkeypatch)


def test_nested_block_with_fencing_is_refused_if_the_outer_one_has_no_token(
    lock: FakeRedlock,
) -> None:
    with lock.lock("r") as outer:
        assert outer.fencing_token is None
        with pytest.raises(ConfigurationError, match="in the outer one"):
            lock.lock("r", fencing=True).__enter__()
        assert not outer.lost
        assert current_lease() is outer
    assert lock.holder("r") is None


@pytest.mark.parametrize("fencing", [False, True])
def test_nested_block_in_unlocked_work_has_no_fencing_token(
    redlock: Redlock, fencing: bool
) -> None:
    """With `on_unavailable="run"` no node was reached, and none needs to be."""
    with Unlocked("r", redlock) as outer:
        assert outer.fencing_token is None
        with redlock.lock("r", fencing=fencing) as inner:
            assert inner is outer
        assert current_lease() is outer


def test_lock_over_other_nodes_inside_unlocked_work_is_acquired(lock: FakeRedlock) -> None:
    for elsewhere in (Redlock(["redis://127.0.0.1:2"]), None):
        with Unlocked("r", elsewhere), lock.lock("r", fencing=True) as inner:
            assert inner.fencing_token is not None


@pytest.mark.parametrize("value", [1, "yes"])
def test_fencing_option_other_than_true_or_false_is_refused(redlock: Redlock, value: Any) -> None:
    for ask in (redlock.acquire, redlock.lock):
        with pytest.raises(ConfigurationError, match="fencing must be True or False"):
            ask("r", fencing=value)
    with pytest.raises(ConfigurationError, match="fencing must be True or False"):
        Redlock(["redis://127.0.0.1:1"], fencing=value)


@pytest.mark.filterwarnings("ignore:the lock of r was made and never acquired")
def test_fencing_of_the_instance_is_the_default_of_its_locks() -> None:
    usual = Redlock(["redis://127.0.0.1:1"], fencing=True)
    assert usual.lock("r").request.fencing
    assert not usual.lock("r", fencing=False).request.fencing
    assert not Redlock(["redis://127.0.0.1:1"]).lock("r").request.fencing


def test_beat_claim_has_no_fencing_token_whatever_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each tick has a name of its own, so the numbers would fill the nodes."""
    usual = FakeRedlock(monkeypatch)
    usual.client.fencing = True
    entry = ScheduleEntry("tick", schedule=schedule(60.0), last_run_at=datetime.now(timezone.utc))
    app = Celery("app", set_as_current=False)
    decision = TickClaims(app, usual, "hold").decide(entry, 1.0)
    assert decision.claim is not None and decision.claim.fencing_token is None
    decision.claim.release()


# -- The SQL of the docs

PAGE = Path(__file__).parents[2] / "docs" / "fencing.md"
SQL = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


class Stock:
    """The table of the docs, with one row."""

    def __init__(self) -> None:
        column, *self.statements = SQL
        self.connection = sqlite3.connect(":memory:")
        self.connection.execute("CREATE TABLE stock (item text PRIMARY KEY, amount int)")
        self.connection.execute("INSERT INTO stock VALUES ('apples', 7)")
        self.connection.execute(column)

    def __call__(
        self, number: int, token: int | None, amount: int = 0, item: str = "apples"
    ) -> int:
        """Run one of the statements; the count of rows."""
        row = {"item": item, "amount": amount, "token": token}
        return self.connection.execute(self.statements[number], row).rowcount

    def amounts(self) -> dict[str, int]:
        return dict(self.connection.execute("SELECT item, amount FROM stock"))


@pytest.fixture
def stock() -> Iterator[Stock]:
    table = Stock()
    yield table
    table.connection.close()


UPDATE, UPSERT, RAISE = range(3)


@pytest.mark.parametrize("write", [UPDATE, UPSERT])
def test_sql_with_a_fencing_token_refuses_a_late_write(stock: Stock, write: int) -> None:
    assert stock(write, 34, 8) == 1
    for token in (33, 34, None):
        with contextlib.suppress(sqlite3.IntegrityError):  # NOT NULL
            assert stock(write, token, 6) == 0
    assert stock(write, 35, 9) == 1
    assert stock.amounts() == {"apples": 9}


def test_sql_insert_without_a_fencing_token_is_refused(stock: Stock) -> None:
    assert stock(UPDATE, 5, item="pears") == 0  # there is no such row
    with pytest.raises(sqlite3.IntegrityError):
        stock(UPSERT, None, item="pears")
    assert stock(UPSERT, 5, 3, item="pears") == 1
    assert stock.amounts() == {"apples": 7, "pears": 3}


def test_sql_that_raises_the_fencing_token_first_keeps_earlier_holders_out(stock: Stock) -> None:
    assert stock(RAISE, 34) == 1
    assert stock(UPDATE, 33, 6) == 0  # between the reading of 34 and its writing
    assert stock(RAISE, 33) == 0
    assert stock.amounts() == {"apples": 7}
