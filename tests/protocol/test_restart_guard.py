"""The restart guard's verdicts: facts and the time in, who may vote out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from celery_redlock.protocol import outcome
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import QuorumUnavailable
from celery_redlock.protocol.lease import drift
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import (
    ALWAYS,
    LOOK_AFTER_S,
    NEWS_S,
    Doubt,
    Memory,
    RestartGuard,
    Trust,
)
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import Vote

TTL = 30.0
NOW = 1000.0
INFO = """\
# Server\r
redis_version:7.0.15\r
run_id:abc\r
uptime_in_seconds:5\r
# Replication\r
role:master\r
master_replid2:0000000000000000000000000000000000000000\r
# Memory\r
maxmemory_policy:noeviction\r
# Persistence\r
aof_enabled:0\r
# Cluster\r
cluster_enabled:0\r
"""
FRESH = NodeInfo.of(INFO)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def guard(said: list[str]) -> RestartGuard:
    return RestartGuard(True, TTL, said.append)


def met(
    guard: RestartGuard, facts: NodeInfo, now: float, before: tuple[NodeInfo, float] | None = None
) -> Memory:
    """Return what is concluded of a node.

    `before`: server and last answer of an earlier connection.
    """
    guard._met.clear()
    if before is not None:
        guard._met[0] = Memory(before[0], heard=before[1])
    return guard.meet(0, facts, now, now)


def trusted_at(guard: RestartGuard, memory: Memory) -> float:
    """The first moment without a doubt, by asking."""
    low, high = memory.began, NOW + 1e6
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if guard.doubt(memory, middle) else (low, middle)
    return high


def test_server_whose_clock_was_set_back_counts_as_just_started(guard: RestartGuard) -> None:
    """Its uptime is reported, as negative; without an uptime it would vote at once."""
    facts = NodeInfo.of("run_id:a\r\nuptime_in_seconds:-7200\r\n")
    assert facts.uptime == 0.0
    assert guard.doubt(met(guard, facts, NOW), NOW)


@pytest.mark.parametrize("text", ["", "nonsense", "uptime_in_seconds:--1", "uptime_in_seconds:x"])
def test_missing_or_malformed_uptime_in_info_is_none(text: str) -> None:
    facts = NodeInfo.of(text)
    assert facts.uptime is None and not facts.misfit


def test_node_is_trusted_when_it_has_been_up_longer_than_the_longest_ttl(
    guard: RestartGuard,
) -> None:
    assert met(guard, replace(FRESH, uptime=0.0), NOW).began == NOW  # no older than now
    up = TTL + drift(TTL) + 1
    assert guard.doubt(met(guard, replace(FRESH, uptime=up - 0.01), NOW), NOW)
    assert not guard.doubt(met(guard, replace(FRESH, uptime=up), NOW), NOW)
    memory = met(guard, FRESH, NOW)
    # It says five seconds; both ends are cut to whole ones, so that may have been a bit over four.
    assert memory.began == NOW - 4.0
    assert trusted_at(guard, memory) == pytest.approx(NOW - 4.0 + TTL + drift(TTL), abs=1e-5)
    guard.expect(10.0)
    assert guard.longest == TTL
    guard.expect(300.0)
    assert trusted_at(guard, memory) == pytest.approx(memory.began + 300 + drift(300), abs=1e-5)


def test_claim_with_a_long_recall_waits_alone(guard: RestartGuard) -> None:
    trust = Trust(guard, 0)
    trust.connected(replace(FRESH, uptime=61.0), NOW, NOW)
    assert not trust.doubt(NOW) and not trust.doubt(NOW, TTL) and not trust.doubt(NOW, 50.0)
    assert trust.doubt(NOW, 3600.0) == (
        "started 60 s ago: it may have forgotten what counts for 3600 s here (hold_for, a rate),"
        " and has no vote on this for another 3576.0 s"
    )
    assert not trust.doubt(NOW + 3576.1, 3600.0)
    assert not trust.doubt(NOW) and guard.longest == TTL


def test_node_with_a_changed_replication_id_may_have_been_promoted_an_hour_ago(
    guard: RestartGuard,
) -> None:
    """A server forgets its promotion after an hour, and changes its replication id then."""
    memory = guard.meet(0, replace(FRESH, uptime=1e6, replication="a" * 40), NOW, NOW)
    changed = replace(memory.facts, replication="b" * 40)
    assert guard.meet(0, changed, NOW + 1, NOW + 1) is memory
    assert not guard.doubt(memory, NOW + 1) and not guard.doubt(memory, NOW + 1, 3500.0)
    doubt = guard.doubt(memory, NOW + 1, 7200.0)
    assert doubt is not None and doubt.left == pytest.approx(3600 + drift(7200))
    assert doubt.startswith("may have been a replica until 3600 s ago: ")
    again = replace(memory.facts, replication="c" * 40)
    guard.meet(0, again, NOW + 2, NOW + 2)
    assert memory.began == NOW + 2 - 3600


@pytest.mark.parametrize("before", [102.0, 100.9, 99.1])
def test_restart_since_the_last_answer_counts_from_the_start_however_late_met(
    guard: RestartGuard, before: float
) -> None:
    """An uptime may be off by a second, either way: a possible restart counts as one."""
    new = replace(FRESH, run_id="new", uptime=100.0)
    memory = met(guard, new, NOW, (FRESH, NOW - before))
    assert (memory.what, memory.began) == ("started", NOW - 99.0)


@pytest.mark.parametrize(("nodes", "every"), [(3, TTL + 9.0), (5, TTL / 2), (5, 1.0)])
def test_only_its_own_restart_takes_the_vote_of_a_node_however_idle_the_process(
    nodes: int, every: float
) -> None:
    """One restart follows the other; each process asks all nodes now and then, or hardly ever."""
    random = Random(f"{nodes} {every}")
    for pause in (0.1, 7.0, 40.0, 300.0):
        guard, now = RestartGuard(True, TTL, print), NOW
        trusts = [Trust(guard, index) for index in range(nodes)]
        met, started = [-1] * nodes, [NOW - 1e6] * nodes
        restarts = ((NOW + n * every + random.random(), n) for n in range(200))
        due, restart = next(restarts)
        while now < NOW + 100 * every:
            now += random.uniform(0.01, pause)
            while due <= now:
                started[restart % nodes] = due
                due, restart = next(restarts)
            for index, trust in enumerate(trusts):
                run, asked = int(started[index]), now
                now += random.uniform(0.0, 0.1)
                if run != met[index]:
                    facts = replace(FRESH, run_id=str(run), uptime=float(int(now) - run))
                    trust.connected(facts, asked, now)
                    met[index] = run
                trust.heard = asked
                up = now - started[index]
                if trust.doubt(now):
                    assert up < guard.span + 2.0, (pause, trust.doubt(now))
                else:
                    assert up > guard.span


def test_aof_of_a_restarted_node_exempts_it_from_nothing(guard: RestartGuard) -> None:
    """A server cannot know if it has all its data."""
    for facts in (FRESH, replace(FRESH, appends=True, mark=f"1000000.000 {FRESH.memory}")):
        assert guard.doubt(met(guard, facts, NOW), NOW)


@pytest.mark.parametrize("changed", [{}, {"history": ""}, {"uptime": None}], ids=str)
def test_promoted_node_is_marked_once_a_span_by_a_process_that_knows_it(
    guard: RestartGuard, changed: dict[str, Any]
) -> None:
    trust = Trust(guard, 0)
    trust.connected(replace(FRESH, **{"history": "f" * 40} | changed), NOW, NOW)
    span, mark = TTL + drift(TTL), f"{{:.3f}} abc  {'f' * 40}"
    assert not trust.to_mark(NOW + span - 0.01)
    assert trust.to_mark(NOW + span + 20) == ("" if changed else mark.format(span + 20))
    assert not trust.to_mark(NOW + 2 * span + 19)
    # It may not have got it, or have lost it.
    assert trust.to_mark(NOW + 2 * span + 21) == ("" if changed else mark.format(2 * span + 21))


def test_trusted_mark_that_was_just_read_is_not_written_again(guard: RestartGuard) -> None:
    trust, facts = Trust(guard, 0), replace(FRESH, history="f" * 40)
    trust.connected(replace(facts, mark=f"1000000.000 {facts.memory}"), NOW, NOW)
    assert not trust.doubt(NOW) and not trust.to_mark(NOW + TTL)
    assert trust.to_mark(NOW + TTL + drift(TTL))


def test_promoted_replica_may_have_been_promoted_just_now(guard: RestartGuard) -> None:
    promoted = replace(FRESH, uptime=1e6, history="f" * 40)
    assert guard.meet(0, promoted, NOW, NOW).began == NOW
    # Known from now on, also to the processes that are forked: no new pause for each of them.
    assert guard.meet(0, promoted, NOW + 50, NOW + 50).began == NOW
    assert guard.warning_to(print).meet(0, promoted, NOW + 60, NOW + 60).began == NOW
    # Promoted once more is another matter; and so is another address.
    again = replace(promoted, history="e" * 40)
    assert guard.meet(0, again, NOW + 70, NOW + 70).began == NOW + 70
    assert guard.meet(1, again, NOW + 80, NOW + 80).began == NOW + 80


def test_promoted_replica_with_a_trusted_mark_is_trusted(guard: RestartGuard) -> None:
    promoted = replace(FRESH, uptime=1e6, replication="a" * 40, history="f" * 40)
    known = replace(promoted, mark=f"31.000 {promoted.memory}")
    assert guard.meet(0, known, NOW, NOW).began == NOW - 31
    for index, stranger in enumerate(
        (
            replace(known, history="e" * 40),
            replace(known, run_id="other"),
            replace(known, replication="b" * 40),
        ),
        1,
    ):
        assert guard.meet(index, stranger, NOW, NOW).began == NOW
    # Away in between, it does not know what another granted meanwhile.
    guard.meet(0, replace(FRESH, run_id="other", uptime=1e6), NOW + 5, NOW + 5)
    assert guard.meet(0, known, NOW + 9, NOW + 9).began == NOW + 9


@pytest.mark.parametrize(
    ("moves", "asked", "began"),
    [(True, 501.0, NOW - 500.0), (True, 499.0, NOW + NEWS_S), (False, 501.0, NOW)],
    ids=["it slept", "it was answered meanwhile", "no Sentinels"],
)
def test_program_that_slept_over_a_failover_trusts_the_mark_behind_sentinels(
    guard: RestartGuard, moves: bool, asked: float, began: float
) -> None:
    promoted = replace(FRESH, uptime=1e6, history="f" * 40)
    marked = replace(promoted, mark=f"500.000 {promoted.memory}")
    guard.meet(0, replace(FRESH, run_id="old"), NOW - asked, NOW - asked, moves)
    assert guard.meet(0, marked, NOW, NOW, moves).began == began


def test_another_server_at_an_address_may_have_forgotten_all_locks(guard: RestartGuard) -> None:
    """It was up when the known server there last answered, so it is no restart of that one."""
    other = replace(FRESH, run_id="other", uptime=100.0)
    for heard in (NOW, NOW - 50.0, NOW - 99.0):
        memory = met(guard, other, NOW, (FRESH, heard))
        assert memory.began == NOW, heard
    assert guard.doubt(met(guard, other, NOW, (FRESH, NOW)), NOW) == (
        "is another server than before, met 0 s ago: it may have forgotten locks, and has no vote"
        " for another 30.3 s"
    )


def test_new_server_is_distrusted_from_the_last_answer_of_the_old_one(guard: RestartGuard) -> None:
    """Locks granted over the old connection are unknown to the new one of the same process."""
    old = guard.meet(0, replace(FRESH, uptime=1e6), NOW, NOW)
    new = guard.meet(0, replace(FRESH, run_id="other", uptime=1e6), NOW + 10, NOW + 10)
    guard.heard(0, old, NOW + 20)
    assert new.began == NOW + 20
    # An answer of before its start says nothing.
    old = guard.meet(1, FRESH, NOW, NOW)
    new = guard.meet(1, replace(FRESH, run_id="again", uptime=1.0), NOW + 10, NOW + 10)
    guard.heard(1, old, NOW + 5)
    assert new.began == NOW + 10 and new.what == "started"


def test_write_proves_a_master_unless_a_look_failed(
    guard: RestartGuard,
) -> None:
    trust = Trust(guard, 0)
    trust.connected(replace(FRESH, uptime=1e6), NOW, NOW)
    later, soon = NOW + LOOK_AFTER_S, LOOK_AFTER_S / 2
    assert trust.to_ask_again(later + soon)
    trust.wrote(later)
    assert not trust.to_ask_again(later + soon)
    trust.unanswered("it did not say", forbidden=False)
    trust.wrote(later + LOOK_AFTER_S)  # asked before it was to say what it is
    assert trust.to_ask_again(later + LOOK_AFTER_S + soon)


def test_unchanged_replication_info_proves_a_master(guard: RestartGuard) -> None:
    """The text alone is compared, because this is read ahead of nearly every request."""
    said = "role:{}\r\nmaster_replid:{}\r\nmaster_replid2:{}\r\nmaster_repl_offset:7\r\n"
    a, b, none = "a" * 40, "b" * 40, "0" * 40
    trust = Trust(guard, 0)
    trust.connected(replace(FRESH, uptime=1e6, replication=a), NOW, NOW)
    for role, replication, history, still in (
        ("master", a, none, True),
        ("slave", a, none, False),
        ("master", b, none, False),
        ("master", a, b, False),
    ):
        assert trust.still(NOW + 1, said.format(role, replication, history)) is still
    old, text = trust.memory, said.format("master", a, none)
    assert trust.told(NOW + 2, NodeInfo.of(said.format("master", b, a)), NOW + 2) == ""
    assert trust.memory is not old and not trust.still(NOW + 3, text)
    other = Trust(guard, 0)  # over another connection, the one before answers
    other.connected(old.facts, NOW + 3, NOW + 3)
    assert not trust.still(NOW + 4, said.format("master", b, a))


def test_server_ages_between_its_info_and_a_later_look(
    guard: RestartGuard,
) -> None:
    """It was up all the time, though another connection met another server at its address."""
    trust, other = Trust(guard, 0), Trust(guard, 0)
    trust.connected(replace(FRESH, uptime=100.0), NOW, NOW)
    other.connected(replace(FRESH, run_id="other", uptime=1e6), NOW + 10, NOW + 10)
    trust.told(NOW + 200, FRESH, NOW + 200)
    assert trust.doubt(NOW + 200).startswith("is another server than before, met 0 s ago")


def test_promoted_replica_behind_sentinels_waits_until_others_have_the_news(
    guard: RestartGuard,
) -> None:
    """Until then other clients may be granted locks by the old master, for a ttl each."""
    for index, moves in enumerate((False, True)):
        trust = Trust(guard, index, moves=moves)
        trust.connected(replace(FRESH, history="f" * 40, uptime=1e6), NOW, NOW)
        assert trusted_at(guard, trust.memory) == pytest.approx(NOW + guard.span + NEWS_S * moves)
        trust.connected(replace(FRESH, run_id="b", uptime=1e6), NOW + 100, NOW + 100)
        assert trust.memory.began == NOW + 100, "it was no replica"


def test_node_with_a_new_replication_history_was_a_replica(guard: RestartGuard) -> None:
    """It was demoted and promoted again, and no client was disconnected."""
    memory = guard.meet(0, replace(FRESH, uptime=1e6, replication="a" * 40), NOW, NOW)
    assert not guard.doubt(memory, NOW)
    other = replace(memory.facts, replication="b" * 40)  # its first replica
    assert guard.meet(0, other, NOW + 4, NOW + 4) is memory
    other = replace(memory.facts, replication="c" * 40, history="b" * 40)
    assert guard.doubt(guard.meet(0, other, NOW + 5, NOW + 5), NOW + 5)


def test_node_that_denies_info_has_no_guard_and_is_logged_once(
    guard: RestartGuard, said: list[str]
) -> None:
    mute = guard.meet(0, NodeInfo(denied="no permission to INFO"), NOW, NOW)
    assert mute.began == ALWAYS
    guard.welcome("a:1", mute, NOW)
    guard.welcome("b:1", mute, NOW)
    (line,) = said
    assert "node a:1 does not show its INFO (no permission to INFO)" in line


def test_restarted_node_is_logged_once_a_run(guard: RestartGuard, said: list[str]) -> None:
    memory = guard.meet(0, FRESH, NOW, NOW)
    for _ in range(2):
        guard.welcome("a:1", memory, NOW)
        guard.warning_to(said.append).welcome("a:1", memory, NOW)
    (line,) = said
    assert line.startswith(
        "node a:1 started 4 s ago: it may have forgotten locks, and has no vote for another 26.3 s"
    )
    assert line.endswith("You can only wait: the longest ttl in use is 30 s.")
    guard.welcome("a:1", guard.meet(0, replace(FRESH, run_id="again"), NOW, NOW), NOW)
    assert len(said) == 2


# -- What a vote under doubt is worth


def test_server_under_two_addresses_is_found_by_run_id_or_nonce(guard: RestartGuard) -> None:
    other = replace(FRESH, run_id="other")
    assert guard.twin(2, [FRESH, other, FRESH]) == 0
    assert guard.twin(1, [FRESH, other, FRESH]) is None
    assert guard.twin(1, [NodeInfo(), NodeInfo(), None]) is None  # they say nothing
    assert guard.twin(1, [NodeInfo(), NodeInfo(twin=0)]) == 0  # a nonce says it
    assert guard.twin(0, [None, FRESH]) is None


def ballot(verb: Verb, granted: bool = False) -> tuple[Round, Claim]:
    claim = Claim("r", "token", 10.0, 3)
    if granted:
        for node in (0, 1):
            claim.acknowledged(node, 0.0, 0.1)
        assert claim.grant(0.1)
    return Round(verb, [claim], 1.0, 1.0), claim


@pytest.mark.parametrize("reply", [None, "token", "another"])
def test_vote_of_a_restarted_node_is_silence_and_counts_for_no_lease(reply: str | None) -> None:
    """It may hold no more than another client's attempt, which cannot succeed either."""
    round_, claim = ballot(Verb.ACQUIRE)
    round_.answer(0, reply, 1.1, "started 1 s ago")
    assert (round_.votes[0], round_.details[0]) == (Vote.SILENT, "started 1 s ago")
    round_.answer(1, None, 1.1)
    round_.answer(2, "another", 1.1)
    assert (round_.yes, round_.silent) == (1, 1)
    assert not claim.grant(1.2)


def test_holder_named_by_a_restarted_node_counts_and_free_does_not() -> None:
    round_, _claim = ballot(Verb.PEEK)
    round_.answer(0, ("another", 3.0), 1.1, "started 1 s ago")
    round_.answer(1, None, 1.1, "started 1 s ago")
    assert round_.votes[:2] == [Vote.YES, Vote.SILENT]


@pytest.mark.parametrize("outcome", ["1", "2"])
def test_extension_on_a_restarted_node_counts_for_a_held_lease(outcome: str) -> None:
    """Until the old deadline no other client can hold it, so no other grant can be forgotten."""
    round_, claim = ballot(Verb.EXTEND, granted=True)
    round_.answer(0, "1", 1.1)
    round_.answer(2, outcome, 1.1, "started 1 s ago")
    assert round_.confirmed() == [claim]
    assert claim.deadline == pytest.approx(11.0 - drift(10.0))


@pytest.mark.parametrize(
    ("votes", "retry_after"),
    [
        ((4.0, "yes", "late"), None),  # the late one and the one that said yes are a quorum
        ((4.0, 6.0, "late"), 4.0),
        ((4.0, 6.0, "yes"), 4.0),
        ((6.0, 5.0, 4.0), 5.0),
        (("late", "late", "yes"), None),
        ((4.0, 5.0, "late", "yes", "late"), None),
        ((4.0, 6.0, 5.0, "yes", "late"), 4.0),
    ],
)
def test_retry_after_is_set_only_if_no_quorum_is_possible_earlier(
    votes: Sequence[float | str], retry_after: float | None
) -> None:
    claim = Claim("r", "token", TTL, len(votes))
    round_ = Round(Verb.ACQUIRE, [claim], NOW, 1.0)
    for node, vote in enumerate(votes):
        if isinstance(vote, float):
            doubt = Doubt("it may have forgotten locks")
            doubt.left = vote
            round_.answer(node, None, NOW, doubt)
        elif vote == "yes":
            round_.answer(node, None, NOW)
    round_.close()
    error = outcome.refusal("r", round_, [f"n{n}" for n in range(len(votes))], TTL)
    assert isinstance(error, QuorumUnavailable)
    assert error.retry_after == retry_after
