"""The oracle itself: what it must find, and what it must not hold against anybody."""

from __future__ import annotations

import pytest

from tests.campaign.beat.oracle import Fault, Message, Verdict, judge_interval, judge_ticks

BEGIN, END = 1000.0, 1020.0


def message(asked: float, sent: float | None = None, pid: int = 1) -> Message:
    return Message(f"beat-{pid}", pid, asked, asked + 0.01 if sent is None else sent)


def ticks(*without: int) -> list[Message]:
    return [message(s) for s in range(1000, 1020) if s not in without]


def tick_verdict(messages: list[Message], *faults: Fault) -> Verdict:
    return judge_ticks(messages, faults, BEGIN, END)


def periods(every: float = 2.0) -> list[Message]:
    return [message(BEGIN + 0.5 + every * n) for n in range(int(19 / every))]


def interval_verdict(messages: list[Message], *faults: Fault, late: float = 0.0) -> Verdict:
    return judge_interval(messages, faults, BEGIN, END, every=2.0, ttl=2.0, late=late)


def test_oracle_accepts_each_tick_sent_once() -> None:
    verdict = tick_verdict(ticks())
    assert (verdict.problems, verdict.count, verdict.ideal) == ([], 20, 20)


def test_oracle_finds_that_no_tick_was_sent() -> None:
    assert "nothing was sent" in tick_verdict([]).problems
    assert "nothing was sent" in interval_verdict([]).problems


def test_oracle_finds_a_tick_sent_twice() -> None:
    (problem,) = tick_verdict([*ticks(), message(1007.3, pid=2)]).problems
    assert "sent twice" in problem


def test_oracle_finds_a_tick_left_out() -> None:
    (problem,) = tick_verdict(ticks(1007)).problems
    assert "left out" in problem


def test_oracle_accepts_a_late_message_beside_the_next_tick() -> None:
    """Asked at the end of one second and sent in the next: either may be meant."""
    assert tick_verdict([*ticks(1007), message(1007.99, 1008.02)]).problems == []


def test_oracle_finds_a_second_message_among_late_ones() -> None:
    messages = [*ticks(1007), message(1007.5, 1008.5), message(1007.6, 1008.4, pid=2)]
    (problem,) = tick_verdict(messages).problems
    assert "sent twice" in problem


def test_oracle_forgives_a_tick_left_out_when_its_sender_died() -> None:
    verdict = tick_verdict(ticks(1007), Fault("kill", 1007.02, 1007.03, 1))
    assert verdict.problems == []
    assert verdict.forgiven == {"left out at a kill or stop": 1}


def test_oracle_finds_a_tick_left_out_long_before_a_death() -> None:
    assert tick_verdict(ticks(1007), Fault("kill", 1008.2, 1008.3, 1)).problems


def test_oracle_finds_too_many_ticks_left_out_at_deaths() -> None:
    kills = [Fault("kill", second + 0.02, second + 0.03, 1) for second in (1004, 1007, 1010)]
    (problem,) = tick_verdict(ticks(1004, 1007, 1010), *kills).problems
    assert "more than bad luck" in problem


def test_oracle_forgives_a_message_of_a_beat_woken_after_its_decision() -> None:
    late = message(1007.0, 1010.2, pid=2)
    assert tick_verdict([*ticks(), late], Fault("stop", 1007.005, 1010.1, 2)).problems == []
    assert tick_verdict([*ticks(), late], Fault("stop", 1007.005, 1010.1, 3)).problems
    assert tick_verdict([*ticks(), late], Fault("stop", 1004.0, 1006.8, 2)).problems


def test_oracle_accepts_no_tick_without_a_quorum_and_requires_all_afterwards() -> None:
    loss = Fault("quorum", 1005.5, 1009.5)
    rest = [one for one in ticks() if not 1005.5 < one.sent < 1010.5]
    verdict = tick_verdict(rest, loss)
    assert verdict.problems == []
    assert verdict.count < 20
    assert "sent without a quorum" in tick_verdict([*rest, message(1007.0)], loss).problems[0]
    assert "left out" in tick_verdict([one for one in rest if one.sent < 1013], loss).problems[0]
    late = [one for one in rest if not 1009 < one.sent < 1012]
    assert any("quorum's return" in problem for problem in tick_verdict(late, loss).problems)
    twice = tick_verdict([*rest, message(1010.7), message(1010.8)], loss)
    assert "sent twice" in twice.problems[0]


def test_oracle_accepts_a_kept_period() -> None:
    verdict = interval_verdict(periods())
    assert (verdict.problems, verdict.count) == ([], 8)


@pytest.mark.parametrize("every", [1.85, 2.15])
def test_oracle_finds_a_period_that_is_not_kept(every: float) -> None:
    assert any("sent," in problem for problem in interval_verdict(periods(every)).problems)


def test_oracle_finds_two_messages_within_a_period() -> None:
    messages = [*periods(), message(1007.0, pid=2)]
    assert any("two within" in problem for problem in interval_verdict(messages).problems)


def test_oracle_accepts_a_message_close_behind_one_that_was_sent_late() -> None:
    """Between asking and sending the first beat took 0.3 s; the claims are 1.9 s apart."""
    before, after = message(1006.5, 1006.8), message(1008.4, 1008.42)
    later = [message(1010.45 + 2 * n) for n in range(5)]
    assert interval_verdict([*periods()[:3], before, after, *later]).problems == []
    second = message(1008.2, 1008.22, pid=2)
    (problem,) = interval_verdict([*periods()[:3], before, second, *later]).problems
    assert "two within 1.420 s" in problem


def test_oracle_forgives_a_second_message_when_its_sender_was_killed() -> None:
    messages = [*periods()[:4], *(message(1007.0 + 2 * n, pid=2) for n in range(7))]
    assert interval_verdict(messages, Fault("kill", 1006.53, 1006.54, 1)).problems == []
    assert interval_verdict(messages, Fault("kill", 1006.53, 1006.54, 2)).problems
    assert interval_verdict(messages, Fault("kill", 1006.73, 1006.74, 1)).problems


def test_oracle_finds_a_gap_in_an_interval() -> None:
    messages = [one for one in periods() if not 1006 < one.sent < 1009]
    assert any("nothing for" in problem for problem in interval_verdict(messages).problems)


def test_oracle_forgives_a_gap_after_the_sender_died_up_to_ttl_and_a_second() -> None:
    """The gap may last a ttl and a second more, 4.9 s here, and no longer."""
    kill = Fault("kill", 1006.51, 1006.52, 1)
    before = [message(1000.5 + 2 * n) for n in range(3)]
    after = [message(1009.4 + 2 * n) for n in range(5)]
    assert not any("nothing for" in p for p in interval_verdict([*before, *after], kill).problems)
    assert any("nothing for" in p for p in interval_verdict([*before, *after]).problems)
    later = [message(1010.5 + 2 * n) for n in range(5)]
    assert any("nothing for" in p for p in interval_verdict([*before, *later], kill).problems)


def test_oracle_forgives_one_late_message_for_a_claim_that_outlives_its_sender() -> None:
    messages = [*periods()[:4], *(message(1009.9 + 2 * n, pid=2) for n in range(5))]
    kill = Fault("kill", 1007.0, 1007.1, 1)
    assert interval_verdict(messages, kill, late=1.5).problems == []
    assert interval_verdict(messages, kill).problems
    assert interval_verdict(messages, Fault("kill", 1007.0, 1007.1, 2), late=1.5).problems


def test_oracle_accepts_an_interval_without_messages_while_there_is_no_quorum() -> None:
    loss = Fault("quorum", 1005.0, 1009.0)
    before = [message(1000.5 + 2 * n) for n in range(3)]
    after = [message(1009.8 + 2 * n) for n in range(5)]
    assert interval_verdict([*before, *after], loss).problems == []
    assert interval_verdict([*before, message(1007.0), *after], loss).problems
    late = [message(1012.8 + 2 * n) for n in range(4)]
    assert "return" in interval_verdict([*before, *late], loss).problems[0]
    assert interval_verdict([*before, *late], loss, late=1.5).problems == []
