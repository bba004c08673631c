"""A worker adopts or takes the reservation of a message, or leaves no trace of it."""

from __future__ import annotations

import pytest

from celery_redlock.messages import reservation
from celery_redlock.protocol.claim import Claim
from tests.support.delivering import take
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch


@pytest.fixture
def redlock(monkeypatch: Patch) -> FakeRedlock:
    return FakeRedlock(monkeypatch)


def reserved(redlock: FakeRedlock, task_id: str, nodes: set[int]) -> Claim:
    """A reservation, taken on these nodes only."""
    claim = reservation.claim_for(redlock, "order:1", 60.0, task_id, "charge")
    redlock.driver.dead = set(range(5)) - nodes
    reservation.take(redlock, claim)
    redlock.driver.dead = set()
    return claim


def test_adopt_refused_by_a_quorum_leaves_no_token_on_the_minority(redlock: FakeRedlock) -> None:
    other = reserved(redlock, "other", {0, 1, 2})
    ours = reservation.claim_for(redlock, "order:1", 60.0, "ours", "charge")
    assert reservation.adopt(redlock, ours) is False
    (name,) = ours.resources
    now = redlock.clock()
    assert [node.token(name, now) for node in redlock.fakes] == [other.token] * 3 + [None] * 2


def test_adopt_of_a_lost_reservation_removes_what_was_left_of_it(redlock: FakeRedlock) -> None:
    ours = reserved(redlock, "ours", {0, 1, 2})
    (name,) = ours.resources
    for node in redlock.fakes[:2]:
        node.forget()
    other = reserved(redlock, "other", {0, 1, 3, 4})
    assert reservation.adopt(redlock, ours) is False
    assert redlock.tokens(name) == {other.token, None}


def test_adopt_without_enough_answers_keeps_the_tokens(redlock: FakeRedlock) -> None:
    ours = reserved(redlock, "ours", {0, 1, 2, 3, 4})
    redlock.driver.dead = {0, 1, 2}
    assert reservation.adopt(redlock, ours) is None
    redlock.driver.dead = set()
    assert redlock.tokens(ours.resources[0]) == {ours.token}
    assert reservation.adopt(redlock, ours) is True


def test_quorum_that_names_another_reservation_refuses_ours(redlock: FakeRedlock) -> None:
    take(redlock, "another")
    redlock.driver.dead = {0, 1}
    claim = reservation.claim_for(redlock, "order:1", 10.0, "mine")
    assert not reservation.start(redlock, claim)
    assert {reservation.look(redlock, claim).token} == redlock.tokens("order:1#reserved")


def test_reservation_that_only_a_quorum_has_is_its_own(redlock: FakeRedlock) -> None:
    """A node that the publisher had not yet connected to may answer before one that has it."""
    take(redlock, "mine", nodes=3)
    redlock.driver.dead = {0}
    (token,) = redlock.tokens("order:1#reserved") - {None}
    claim = reservation.claim_for(redlock, "order:1", 10.0, "mine")
    claim.token = str(token)
    assert reservation.start(redlock, claim)
