"""Rounds and votes: when a round is decided, and what it comes to."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import ResourceHeld
from celery_redlock.protocol.outcome import NOT_WAITED_FOR, refusal, silent
from celery_redlock.protocol.rate import rate_of
from celery_redlock.protocol.round import RENEWED, Round, Verb
from tests.support.steps import NOW, PATIENCE, TTL, claim, ended


def vote(round_: Round, votes: str, now: float = NOW + 0.01) -> Round:
    """`y` yes, `n` held by another, `s` silent, `.` not yet; one per node."""
    for node, letter in enumerate(votes):
        if letter == "y":
            round_.answer(node, None if round_.verb is Verb.ACQUIRE else True, now)
        elif letter == "n":
            round_.answer(node, "theirs" if round_.verb is Verb.ACQUIRE else False, now)
        elif letter == "s":
            round_.silence(node, "down")
    return round_


def attempt(votes: str, nodes: int = 5) -> tuple[Claim, Any, Round]:
    """An attempt, and what of its first round has been answered."""
    mine = claim(nodes)
    steps = quorum.acquire(mine, NOW, PATIENCE)
    round_ = next(steps)
    mine.written = (1 << nodes) - 1  # as the nodes' pipelines do that take it up
    return mine, steps, vote(round_, votes)


# -- Acquire: the page's five steps


def test_acquire_round_asks_all_nodes_at_once() -> None:
    round_ = next(quorum.acquire(claim(), NOW, PATIENCE))
    assert round_.verb is Verb.ACQUIRE
    assert list(round_.targets) == [0, 1, 2, 3, 4]
    assert (round_.sent, round_.until) == (NOW, NOW + PATIENCE)
    assert not round_.decided


@pytest.mark.parametrize(
    ("votes", "decided"),
    [
        ("yyy..", True),  # granted: no straggler can change it
        ("yy...", False),
        ("yynn.", False),  # the last one decides
        ("nnn..", True),  # held, certainly
        ("nn...", False),
        ("sss..", True),  # no quorum, certainly
        ("ss...", False),
        ("nns..", False),  # lost; two answers do not show if it is held or has no quorum
        ("nsn.n", True),  # a quorum has answered: held
        ("nss.n", False),
        ("nssnn", True),
        ("yyss.", False),
        ("yysss", True),
        ("ynsss", True),
    ],
)
def test_attempt_is_decided_as_early_as_it_can_be(votes: str, decided: bool) -> None:
    assert attempt(votes)[2].decided is decided


@pytest.mark.parametrize("nodes", range(1, 8))
def test_quorum_of_yes_is_granted_and_one_less_is_undone(nodes: int) -> None:
    enough = nodes // 2 + 1
    for yes in (enough, enough - 1):
        mine, steps, round_ = attempt("y" * yes + "n" * (nodes - yes), nodes)
        assert round_.decided
        if yes == enough:
            assert ended(steps) is round_
            assert mine.held(NOW + 0.01)
        elif yes:
            assert steps.send(NOW + 0.01).verb is Verb.UNDO
            assert not mine.held(NOW + 0.01)
        else:
            assert ended(steps) is round_  # nothing to undo


def test_own_token_in_a_reply_counts_as_yes() -> None:
    _mine, _steps, round_ = attempt("", 1)
    round_.answer(0, "mine", NOW)
    assert round_.yes == 1


def test_failed_attempt_is_undone_wherever_the_answer_was_not_no() -> None:
    mine, steps, round_ = attempt("ynsn.")
    round_.close("late")
    undoing = steps.send(NOW + PATIENCE)
    assert undoing.verb is Verb.UNDO
    assert list(undoing.targets) == [0, 2, 4]
    assert undoing.decided  # nobody waits for it
    assert mine.ended
    assert ended(steps) is round_


def test_failed_attempt_is_undone_only_where_it_was_written() -> None:
    mine, steps, round_ = attempt("yss..")
    mine.written = 0b01101  # the second was down, the last had answered nothing for a second
    round_.close("late")
    assert list(steps.send(NOW + PATIENCE).targets) == [0, 2, 3]


def test_late_yes_does_not_change_a_decided_attempt() -> None:
    mine, steps, round_ = attempt("nn.", 3)
    round_.close("late")
    assert list(steps.send(NOW + PATIENCE).targets) == [2]
    round_.answer(2, None, NOW + 1.0)
    assert (round_.yes, round_.no) == (0, 2)
    assert not mine.held(NOW + 1.0)


# -- Two failures that are never folded into one


def outcome(votes: str) -> str:
    """Return the kind of refusal that users get for these votes."""
    round_ = attempt(votes, len(votes))[2]
    round_.close("no answer")
    error = refusal("r", round_, [f"node {i}" for i in range(len(votes))], TTL)
    assert [told.vote.value[0] for told in error.votes] == list(votes.replace(".", "s"))
    return "held" if isinstance(error, ResourceHeld) else "unavailable"


@pytest.mark.parametrize(
    ("told", "votes"),
    [
        ("held", ["nnnnn", "nnn..", "ynnnn", "yynnn", "nnnss", "ynnss"]),  # a quorum has answered
        ("unavailable", ["sssss", "nnsss", "ynsss", "yysss", "nn...", "....."]),
        ("unavailable", ["yyynn"]),  # it came too late: no refusal by another
    ],
)
def test_refusal_is_held_only_if_a_quorum_has_answered(told: str, votes: list[str]) -> None:
    assert {one: outcome(one) for one in votes} == dict.fromkeys(votes, told)


# -- Extend


def extension(*claims: Claim) -> Round:
    return next(quorum.extend(claims, NOW + 3.0, PATIENCE))


def test_extension_needs_the_answers_of_a_quorum() -> None:
    mine = claim(3, granted=True)
    round_ = extension(mine)
    round_.answer(0, "1", NOW + 3.01)
    assert not round_.decided
    round_.answer(2, "1", NOW + 3.02)
    assert round_.decided
    assert round_.confirmed() == [mine]
    assert mine.deadline == pytest.approx(NOW + 3.0 + TTL - 0.102)


@pytest.mark.parametrize(("votes", "lost"), [("nnn", "refused"), ("sss", None)])
def test_refused_extension_loses_the_lease_and_silence_does_not(
    votes: str, lost: str | None
) -> None:
    mine = claim(3, granted=True)
    round_ = extension(mine)
    for node, letter in enumerate(votes):
        round_.silence(node, "down") if letter == "s" else round_.answer(node, "0", NOW + 3.01)
    assert round_.decided and round_.confirmed() == []
    assert mine.held(NOW + 3.02) is (lost is None)
    assert mine.lost == lost


def test_supervisor_renewal_waits_for_all_answers_and_extension_for_a_quorum() -> None:
    for verb, decided in ((Verb.EXTEND, True), (Verb.RENEW, False)):
        round_ = next(quorum.extend([claim(granted=True)], NOW + 1.0, PATIENCE, verb=verb))
        for node in range(3):
            round_.answer(node, "1", NOW + 1.1)
        assert round_.decided is decided
        round_.answer(3, "0", NOW + 1.1)
        round_.silence(4, "down")
        assert round_.decided


def test_supervisor_renewal_is_lost_only_when_all_answers_are_in() -> None:
    """It knows three of the five nodes that hold it, and the first answer is from another node."""
    held = claim()
    for node in range(3):
        held.acknowledged(node, NOW, NOW)
    assert held.grant(NOW)
    round_ = next(quorum.extend([held], NOW + 1.0, PATIENCE, verb=Verb.RENEW))
    round_.answer(0, "0", NOW + 1.01)
    assert round_.amnesiac == [held]
    for node in range(1, 5):
        round_.answer(node, "1", NOW + 1.02)
    round_.close("late")
    assert held.held(NOW + TTL)
    assert held.expiries[0] < NOW


def test_leases_that_share_a_round_have_outcomes_of_their_own() -> None:
    leases = [claim(3, f"token {i}", granted=True) for i in range(3)]
    round_ = extension(*leases)
    round_.answer(0, "110", NOW + 3.01)
    round_.answer(1, "120", NOW + 3.01)
    assert not round_.decided  # the third may still be confirmed
    round_.answer(2, "001", NOW + 3.01)
    assert round_.decided
    assert round_.confirmed() == leases[:2]
    assert [lease.held(NOW + 3.02) for lease in leases] == [True, True, False]


# -- Release


@pytest.mark.parametrize(
    ("votes", "after", "held"),
    [
        *(("yyyyy", 1.0, True), ("yyynn", 1.0, True), ("yyy..", 1.0, True)),
        *(("yynnn", 1.0, False), ("nnnnn", 1.0, False)),
        ("sssss", 1.0, True),  # silent nodes do not fail a release
        ("yyyyy", TTL, False),  # past the deadline, whatever the nodes say
    ],
)
def test_release_returns_true_if_the_lease_was_held_to_the_end(
    votes: str, after: float, held: bool
) -> None:
    mine = claim(granted=True)
    steps = quorum.release(mine, NOW + after, PATIENCE)
    round_ = next(steps)
    assert mine.ended  # before anything is written: it is extended no more
    assert vote(round_, votes).decided
    assert ended(steps).held is held
    assert not mine.held(NOW + 1.0)


# -- Peek, votes


def test_peek_waits_for_all_nodes_and_returns_the_holder_on_each() -> None:
    round_ = next(quorum.peek([claim(3)], NOW, PATIENCE))
    round_.answer(0, ("theirs", 4.0), NOW)
    round_.answer(1, None, NOW)
    assert not round_.decided
    round_.silence(2, "down")
    assert round_.decided
    assert round_.details == [("theirs", 4.0), None, "down"]


@pytest.mark.parametrize(("took", "kept"), [(0.05, True), (0.6, False)])
def test_start_whose_window_began_too_early_is_renewed_once_or_given_up(
    took: float, kept: bool
) -> None:
    rate = rate_of("1/s")
    mine = Claim("r#start", "mine", rate.ttl, 3)
    mine.written = 0b111
    steps = quorum.start(mine, NOW, PATIENCE, rate)
    vote(next(steps), "yyy")
    renewal = steps.send(NOW + 0.04)
    assert renewal.verb is Verb.EXTEND
    now = NOW + 0.04 + took
    for node in renewal.targets:
        renewal.answer(node, RENEWED, now)
    if kept:
        ended(steps, now)
        assert mine.held(now + rate.window)
    else:
        assert steps.send(now).verb is Verb.UNDO
        ended(steps, now)
        assert not mine.held(now)


def test_closing_a_round_counts_late_nodes_as_silent_only_if_they_mattered() -> None:
    waiting = attempt("y..", 3)[2]
    assert waiting.close("late") == [1, 2]
    assert waiting.details[1:] == ["late", "late"]
    decided = attempt("yy.", 3)[2]
    assert decided.close("late") == []
    assert decided.votes[2] is None


def test_silent_nodes_of_a_round_are_returned_with_the_reason() -> None:
    assert silent(attempt("ysn.y")[2]) == {1: "down", 3: NOT_WAITED_FOR}


def test_node_that_says_yes_to_all_lets_two_majorities_hold_at_once() -> None:
    """No Redlock can prevent that: the node is the one that both majorities share."""
    one, two = claim(token="one"), claim(token="two")
    for holder, votes in ((one, "yyynn"), (two, "ynnyy")):
        steps = quorum.acquire(holder, NOW, PATIENCE)
        ended_by = vote(next(steps), votes)
        assert ended(steps) is ended_by
    assert one.held(NOW + 1) and two.held(NOW + 1)
