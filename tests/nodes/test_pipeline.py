"""Requests that one node has been sent: their order, reconnection, releases that are owed."""

from __future__ import annotations

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.pipeline import (
    LEAVES_FOR_S,
    MAX_OWED,
    MAX_RETRIED,
    STALLED_S,
    Pipeline,
)
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import QueueEntry, Vote

NOW, TTL = 1000.0, 10.0


@pytest.fixture
def channel() -> Pipeline:
    new = Pipeline(0)
    assert new.connected(NOW) == []
    return new


def claim(token: str = "mine") -> Claim:
    return Claim("r", token, TTL, 1)


def ask(verb: Verb, of: Claim | None = None, *, at: float = NOW, patience: float = 0.1) -> Round:
    return Round(verb, [of or claim()], at, patience)


def undo(of: Claim, at: float = NOW) -> Round:
    of.ended = True
    return ask(Verb.UNDO, of, at=at, patience=0.0)


def place(verb: Verb, at: float) -> Round:
    return Round(verb, [QueueEntry(("r",), 1, "process:1", 0)], at, 0.0)


def set_here(channel: Pipeline, of: Claim, at: float = NOW) -> Claim:
    """A claim that the node has set."""
    assert channel.ask(ask(Verb.ACQUIRE, of, at=at), at)
    channel.unanswered.pop()
    return of


def test_node_is_owed_no_release_of_a_claim_that_only_another_was_asked_for() -> None:
    for number in (1, 0):
        channels, mine = [Pipeline(0), Pipeline(1)], Claim("r", "t", 10.0, 2)
        channels[number].connected(NOW)
        asked = Round(Verb.ACQUIRE, [mine], NOW, 1.0)
        channels[number].ask(asked, NOW)
        asked.close("no answer")
        for channel in channels:
            channel.dropped()
            channel.ask(Round(Verb.UNDO, [mine], NOW, 0.0), NOW)
        assert [len(channel.connected(NOW)) for channel in channels] == [1 - number, number]


# -- No connection


def test_request_waits_for_the_first_attempt_to_connect() -> None:
    channel, round_ = Pipeline(0), ask(Verb.ACQUIRE)
    assert not channel.ask(round_, NOW)
    assert channel.waiting and round_.votes == [None]
    assert channel.connected(NOW + 0.001) == [round_]
    assert not channel.waiting and list(channel.unanswered) == [round_]


def test_closed_round_is_not_written_to_a_new_connection() -> None:
    channel, mine = Pipeline(0), claim()
    round_ = ask(Verb.ACQUIRE, mine)
    channel.ask(round_, NOW)
    round_.close("no answer")
    assert channel.connected(NOW + 1.0) == []
    assert mine.written == 0


# -- A connection that breaks


def test_unacknowledged_release_is_owed(channel: Pipeline) -> None:
    release = ask(Verb.RELEASE, set_here(channel, claim()), at=NOW + 1.0)
    channel.ask(release, NOW + 1.0)
    channel.dropped()
    assert release.votes == [Vote.SILENT]
    channel.unreachable("refused")
    assert channel.connected(NOW + 5.0) == [release]
    channel.dropped()  # again, before it was acknowledged
    assert channel.connected(NOW + 6.0) == [release]
    channel.unanswered.popleft()
    channel.dropped()
    assert channel.connected(NOW + 7.0) == []


@pytest.mark.parametrize(
    ("later", "ends_on_time", "owed"),
    [(2.0, True, True), (1.0 + TTL, True, False), (100.0 * TTL, False, True)],
)
def test_release_without_a_connection_is_owed_until_the_ttl_is_over(
    later: float, ends_on_time: bool, owed: bool
) -> None:
    """Where ttls start over when the node is back, it is owed for good."""
    channel = Pipeline(0, ends_on_time=ends_on_time)
    channel.connected(NOW)
    mine = set_here(channel, claim())
    channel.dropped()
    channel.unreachable("refused")
    release = undo(mine, NOW + 1.0)
    assert not channel.ask(release, NOW + 1.0)
    assert release.votes == [Vote.SILENT]
    assert bool(channel.unconfirmed(NOW + later)) is owed
    assert channel.connected(NOW + later) == [release] * owed


@pytest.mark.parametrize("verb", [Verb.DEQUEUE, Verb.HAND_ON])
@pytest.mark.parametrize("lost", ["before", "behind", "stalled"])
def test_place_that_a_node_may_not_have_left_is_left_on_its_next_connection(
    channel: Pipeline, verb: Verb, lost: str
) -> None:
    at = NOW + 2 * STALLED_S
    if lost == "stalled":
        channel.ask(ask(Verb.PEEK), NOW)
        channel.unanswered[0].close()
    elif lost == "before":
        channel.dropped()
    leave = place(verb, at)
    assert channel.ask(leave, at) is (lost == "behind")
    leave.close()
    channel.dropped()
    assert channel.leaving(at)
    assert channel.connected(at + 1.0) == [leave]
    channel.unanswered.popleft()  # it answers
    assert not channel.leaving(at + 1.0)


def test_place_is_not_left_after_a_while(channel: Pipeline) -> None:
    channel.dropped()
    channel.ask(place(Verb.HAND_ON, NOW), NOW)
    assert not channel.leaving(NOW + LEAVES_FOR_S)
    assert channel.connected(NOW + LEAVES_FOR_S) == []


def test_place_that_is_taken_again_meanwhile_is_not_left(channel: Pipeline) -> None:
    channel.ask(ask(Verb.PEEK), NOW)
    at = NOW + 2 * STALLED_S
    channel.ask(place(Verb.HAND_ON, at), at)  # not written: the node hangs
    channel.unanswered.popleft()
    assert channel.leaving(at)
    assert channel.ask(place(Verb.ENQUEUE, at), at)
    assert not channel.leaving(at)


def test_owed_releases_are_written_first(channel: Pipeline) -> None:
    gone = set_here(channel, claim("gone"))
    channel.dropped()
    waiting, owed = ask(Verb.ACQUIRE, claim("mine")), undo(gone)
    channel.ask(waiting, NOW)
    channel.ask(owed, NOW)
    assert channel.connected(NOW + 0.01) == [owed, waiting]
    assert list(channel.unanswered) == [owed, waiting]


def test_released_token_is_not_set_again_behind_its_release(channel: Pipeline) -> None:
    mine = claim()
    first = ask(Verb.ACQUIRE, mine)
    channel.ask(first, NOW)
    channel.dropped()  # the request waits for the next connection...
    owed = undo(mine)  # ...and meanwhile the attempt is given up
    channel.ask(owed, NOW)
    assert channel.connected(NOW + 0.01) == [owed]
    assert first.votes == [Vote.SILENT]


# -- A node that hangs

LATER = NOW + STALLED_S + 0.1


def test_hanging_node_is_sent_releases_and_no_new_request(channel: Pipeline) -> None:
    mine, stranger = claim(), claim("stranger")
    channel.ask(ask(Verb.ACQUIRE, mine), NOW)
    assert channel.stalled(LATER)
    round_ = ask(Verb.ACQUIRE, at=LATER)
    assert not channel.ask(round_, LATER)
    assert round_.votes == [Vote.SILENT] and "no answer" in round_.details[0]
    assert channel.ask(undo(mine, LATER), LATER)
    assert not channel.ask(undo(stranger, LATER), LATER)  # nothing of it was ever written
    channel.unanswered.clear()
    assert not channel.stalled(LATER)
    assert channel.ask(ask(Verb.ACQUIRE, at=LATER), LATER)


def test_returned_node_is_asked_at_once_though_an_old_release_is_unanswered(
    channel: Pipeline,
) -> None:
    mine = set_here(channel, claim())
    channel.dropped()
    channel.unreachable("refused")
    channel.ask(undo(mine), NOW)
    back = NOW + 5.0
    assert len(channel.connected(back)) == 1
    assert not channel.stalled(back)
    assert channel.ask(ask(Verb.ACQUIRE, at=back), back)
    assert channel.stalled(back + STALLED_S + 0.1)


# -- Releases that were refused


def refuse(channel: Pipeline, of: Claim) -> Round:
    """A claim that was set here, and a release of it that the node answered with an error."""
    release = ask(Verb.RELEASE, set_here(channel, of))
    channel.ask(release, NOW)
    assert channel.unanswered.pop() is release
    channel.owe(release)
    return release


def test_single_refused_release_is_retried_first_and_more_after_its_success(
    channel: Pipeline,
) -> None:
    releases = [refuse(channel, claim(f"{number}")) for number in range(MAX_RETRIED + 5)]
    assert channel.due(Verb.EXTEND, NOW) == releases[:1]
    assert channel.due(Verb.RELEASE, NOW) == releases[1 : MAX_RETRIED + 1]


def test_refused_release_is_left_to_the_ttl_when_that_is_over(channel: Pipeline) -> None:
    refuse(channel, claim())
    assert channel.due(Verb.ACQUIRE, NOW + TTL) == []
    assert not channel.unanswered


def test_only_releases_are_owed_to_a_node(channel: Pipeline) -> None:
    for verb in (Verb.ACQUIRE, Verb.EXTEND, Verb.PEEK):
        refused = ask(verb)
        channel.ask(refused, NOW)
        channel.owe(channel.unanswered.popleft())
    assert channel.due(Verb.ACQUIRE, NOW) == []


def test_owed_releases_are_bounded_and_the_oldest_are_left_to_the_ttl(
    channel: Pipeline,
) -> None:
    releases = [refuse(channel, claim(f"{number}")) for number in range(MAX_OWED + 10)]
    assert channel.due(Verb.ACQUIRE, NOW) == [releases[10]]
    assert len(channel.owed) == MAX_OWED - 1
