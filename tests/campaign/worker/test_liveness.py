"""The oracle of liveness, on accounts made by hand: what it must find, and what it must forgive."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaign.worker.broker import VISIBILITY
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.journal import Process
from tests.campaign.worker.liveness import FORGIVEN
from tests.campaign.worker.made import A1, B1, HELD_UP, STUCK, A, B, judge, line, ran, sent
from tests.campaign.worker.oracle import Verdict
from tests.campaign.worker.rest import half_told, judge_rest
from tests.campaign.worker.sentry import Sight
from tests.campaign.worker.stage import TTL


def test_oracle_accepts_a_key_that_is_taken_at_once() -> None:
    account = (A, [line(2.1, "received", "x")])
    found, waits = judge(account, ran(A1, "x", 2.2, 3.0), tasks=[sent("x")])
    assert found == []
    assert waits.wanted == pytest.approx(0.2)


def test_oracle_finds_a_free_key_waiting_at_a_worker_with_a_free_slot() -> None:
    account = (A, [line(2.1, "received", "x")])
    assert judge(account, ran(A1, "x", 4.0, 4.1), tasks=[sent("x")])[0] == [STUCK]


def test_oracle_finds_a_busy_worker_that_keeps_a_free_key_from_an_idle_one() -> None:
    """The finding: A's only slot is taken, A has one of the messages; B has another and waits."""
    filled = ran(A1, "fill", 1.0, 6.0, resource="")
    tasks = [sent("x"), sent("y"), sent("fill", "", "fill", 0.5)]
    accounts = [(A, [line(2.1, "received", "x")]), (B, [line(2.1, "received", "y")]), filled]
    late = [ran(A1, "x", 6.1, 6.2), ran(B1, "y", 6.3, 6.4)]
    assert judge(*accounts, *late, tasks=tasks)[0] == [STUCK]
    at_once = [ran(A1, "x", 6.1, 6.2), ran(B1, "y", 2.3, 2.4)]
    assert judge(*accounts, *at_once, tasks=tasks)[0] == []


def test_oracle_finds_a_free_key_waiting_in_the_queue() -> None:
    received = (A, [line(4.0, "received", "x")])
    assert judge(received, ran(A1, "x", 4.1, 4.2), tasks=[sent("x")], at_once=True)[0] == [STUCK]


def test_oracle_takes_a_key_as_held_while_a_body_runs_or_a_quorum_has_its_token() -> None:
    accounts = [(A, [line(2.1, "received", "x")]), ran(B1, "y", 1.0, 5.0), ran(A1, "x", 5.2, 5.3)]
    tasks = [sent("x"), sent("y", at=0.9)]
    assert judge((B, [line(0.95, "received", "y")]), *accounts, tasks=tasks)[0] == []
    nodes = range(3)
    left = Sight("f1", "t", dict.fromkeys(nodes, 1.0), dict.fromkeys(nodes, 4.9))
    accounts = [(A, [line(2.1, "received", "x")]), ran(A1, "x", 5.2, 5.3)]
    assert judge(*accounts, tasks=[sent("x")], sights=[left])[0] == []
    left.last[2] = 2.2
    assert judge(*accounts, tasks=[sent("x")], sights=[left])[0] == [STUCK]


def test_oracle_finds_attempts_on_a_held_lock_that_take_the_slots() -> None:
    """The finding: all that is parked goes to the pool at once, and a no-op waits behind it."""
    refused = [line(2.0 + 0.1 * n, kind, "x") for n in range(40) for kind in ("got", "done")]
    waits = (A, [line(2.1, "received", "noop")])
    after = ran(A1, "noop", 6.2, 6.21, resource="")
    noop = sent("noop", "", "probe")
    assert judge((A1, refused), waits, after, tasks=[noop, sent("x")])[0][:1] == [HELD_UP]
    works = ran(A1, "x", 2.0, 6.1)
    assert judge(works, waits, after, tasks=[noop, sent("x")])[0] == []


def test_oracle_lets_a_task_that_will_be_skipped_take_its_slot() -> None:
    """It waits there for a holder that has ended and is about to release its lock."""
    asks = (A1, [line(2.0, "got", "x"), line(4.0, "done", "x")])
    waits = (A, [line(2.1, "received", "noop")])
    after = ran(A1, "noop", 4.1, 4.2, resource="")
    noop = sent("noop", "", "probe")
    skipped, held = sent("x", task="skipping"), sent("x")
    assert HELD_UP not in judge(asks, waits, after, tasks=[noop, skipped])[0]
    assert HELD_UP in judge(asks, waits, after, tasks=[noop, held])[0]


def test_oracle_forgives_a_c_call_that_stops_a_worker_without_children() -> None:
    both = [line(1.9, "received", "gil"), line(2.1, "received", "x")]
    calls = sent("gil", "f2", at=1.8)
    calls.manner = "gil"
    tasks = [sent("x"), calls]
    in_thread = [ran(A, "gil", 2.0, 5.0, "f2"), (A, both), ran(A, "x", 5.1, 5.2)]
    assert judge(*in_thread, tasks=tasks, slots={"a": 4, "b": 1})[0] == []
    in_child = [ran(A1, "gil", 2.0, 5.0, "f2"), (A, both), ran(A1, "x", 5.1, 5.2)]
    assert judge(*in_child, tasks=tasks, slots={"a": 4, "b": 1})[0] == [STUCK]


def test_oracle_forgives_a_message_in_the_socket_of_a_stopped_worker() -> None:
    account = [(A, [line(5.1, "received", "x")]), ran(A1, "x", 5.2, 5.3)]
    stop = Fault("worker stop", 1.9, 5.0, "a", 10)
    assert judge(*account, tasks=[sent("x")], faults=[stop], at_once=True)[0] == []
    assert judge(*account, tasks=[sent("x")], at_once=True)[0] == [STUCK]


def test_oracle_forgives_a_message_that_a_stopped_process_was_about_to_send() -> None:
    account = [(A1, [line(3.0, "sent", "x")]), (B, [line(6.1, "received", "x")])]
    account.append(ran(B1, "x", 6.2, 6.3))
    taken = [(B, [line(2.05, "received", "x")]), (B1, [line(2.1, "got", "x")])]
    stop = Fault("worker stop", 3.1, 6.0, "a", 10)
    assert judge(*taken[:1], *account, tasks=[sent("x")], faults=[stop], at_once=True)[0] == []
    assert judge(*taken[:1], *account, tasks=[sent("x")], at_once=True)[0] == [STUCK]


def test_oracle_counts_a_message_given_back_as_waiting_in_the_queue() -> None:
    """A is full for a while and gives it back; B takes the key when it is given the message."""
    filled = ran(A1, "fill", 1.0, 6.0, resource="")
    back = (A, [line(2.1, "received", "x"), line(2.6, "returned", "x")])
    tasks = [sent("x"), sent("fill", "", "fill", 0.5)]
    soon = [(B, [line(3.0, "received", "x")]), ran(B1, "x", 3.1, 3.2)]
    assert judge(filled, back, *soon, tasks=tasks)[0] == []
    late = [(B, [line(5.0, "received", "x")]), ran(B1, "x", 5.1, 5.2)]
    assert judge(filled, back, *late, tasks=tasks, at_once=True)[0] == [STUCK]


def test_oracle_requires_a_stopping_worker_to_give_back_its_messages() -> None:
    stops = (A, [line(2.1, "received", "x"), line(2.2, "stopping"), line(9.0, "disconnected")])
    back = (B, [line(9.1, "received", "x")])
    late = ran(B1, "x", 9.2, 9.3)
    assert judge(stops, back, late, tasks=[sent("x")])[0] == [STUCK]
    soon = [(B, [line(4.1, "received", "x")]), ran(B1, "x", 4.3, 4.4)]
    assert judge(stops, *soon, tasks=[sent("x")])[0] == []


# -- what is forgiven, by the rule's name

WAITS = [(A, [line(2.1, "received", "x")]), ran(A1, "x", 4.0, 4.1)]
THREE = (0, 1, 2)


def test_oracle_forgives_waits_by_the_rule_quorum() -> None:
    def found(*faults: Fault) -> list[str]:
        return judge(*WAITS, tasks=[sent("x")], faults=faults)[0]

    assert found(Fault("node stop", 1.0, 3.5, nodes=THREE)) == []
    assert found(Fault("node stop", 1.0, 3.5, nodes=(0, 1))) == [STUCK]
    assert found(Fault("cut", 1.0, 3.5, "a", nodes=THREE)) == []
    assert found(Fault("cut", 1.0, 3.5, "b", nodes=THREE)) == [STUCK]
    two, one = Fault("node stop", 1.0, 3.5, nodes=(0, 1)), Fault("cut", 1.0, 3.5, "a", nodes=(2,))
    assert found(two, one) == []
    back = Fault("node kill, back empty", 0.1, 0.5, nodes=THREE)
    assert found(back) == ([] if 0.5 + 1.1 * TTL > 2.1 else [STUCK])
    assert found(Fault("node stop", 0.0, 0.05, nodes=THREE)) == [STUCK]


def test_oracle_forgives_waits_by_the_rule_machine() -> None:
    assert judge(*WAITS, tasks=[sent("x")], stalls=[(2.5, 3.5)])[0] == []
    assert judge(*WAITS, tasks=[sent("x")], starved=lambda _begin, _end: 1.0)[0] == []


def test_oracle_forgives_waits_by_the_rule_broker() -> None:
    away = Fault("broker restart", 2.0, 3.0)
    assert judge(*WAITS, tasks=[sent("x")], faults=[away])[0] == []
    lines = [line(2.1, "received", "x"), line(2.2, "disconnected"), line(3.0, "connected")]
    again = (A, [*lines, line(3.9, "received", "x")])
    offline = (B, [line(1.0, "disconnected")])
    assert judge(again, offline, ran(A1, "x", 4.1, 4.2), tasks=[sent("x")])[0] == []


def test_oracle_forgives_waits_by_the_rule_child() -> None:
    dead = Process("a", 10, 12, "9")
    killed = (dead, [line(1.0, "got", "z"), line(1.1, "done", "z")])
    assert judge(*WAITS, killed, tasks=[sent("x")], alive={dead: 1.9})[0] == []


def test_oracle_forgives_a_message_handed_to_a_child_that_then_ended() -> None:
    """Recycled after its last task: the other child is idle, and the message in the dead one's
    pipe.
    """
    handed = (A, [line(2.1, "received", "x"), line(2.2, "pooled", "x")])
    other, ended = Process("a", 10, 13, "9"), {"alive": {A1: 2.3}}
    late = ran(other, "x", 7.0, 7.1)
    slots = {"a": 2, "b": 0}
    assert judge(handed, (A1, []), late, tasks=[sent("x")], slots=slots, **ended)[0] == []
    assert judge(handed, (A1, []), late, tasks=[sent("x")], slots=slots)[0] == [STUCK]
    behind = (A, [line(2.3, "received", "y")])
    after = ran(other, "y", 7.2, 7.3)
    both = [sent("x"), sent("y")]
    assert judge(handed, behind, (A1, []), late, after, tasks=both, slots=slots, **ended)[0] == []
    busy = {"alive": {A1: 1.9}, "slots": slots}  # its death is seen late on a busy machine
    assert judge(handed, (A1, []), late, tasks=[sent("x")], **busy)[0] == [STUCK]
    busy["starved"] = lambda begin, end: 0.2 if end - begin < 1.0 else 0.0
    assert judge(handed, (A1, []), late, tasks=[sent("x")], **busy)[0] == []
    later = (A, [line(2.1, "received", "x"), line(2.6, "pooled", "x")])
    assert judge(later, (A1, []), late, tasks=[sent("x")], slots=slots, **ended)[0] == [STUCK]


def test_oracle_forgives_waits_by_the_rule_stopped() -> None:
    for kind in ("child stop", "broker cut"):
        own, other = Fault(kind, 2.0, 3.0, "a", 11), Fault(kind, 2.0, 3.0, "b", 21)
        assert judge(*WAITS, tasks=[sent("x")], faults=[own])[0] == []
        assert judge(*WAITS, tasks=[sent("x")], faults=[other])[0] == [STUCK]


def test_oracle_forgives_waits_by_the_rule_stranded() -> None:
    dies = (A, [line(2.1, "received", "x")])
    again = (B, [line(30.0, "received", "x")])
    late = ran(B1, "x", 30.1, 30.2)
    alive = {A: 2.5}
    assert judge(dies, again, late, tasks=[sent("x")], alive=alive)[0] == []
    assert judge(dies, again, late, tasks=[sent("x")], alive=alive, at_once=True)[0] == [STUCK]


def test_oracle_forgives_a_worker_that_ends_instead_of_connecting_again() -> None:
    lost = [line(2.1, "received", "x"), line(2.2, "disconnected")]
    again = [(B, [line(9.0, "received", "x")]), ran(B1, "x", 9.1, 9.2)]
    assert judge((A, lost), *again, tasks=[sent("x")], alive={A: 3.0})[0] == []
    back = (A, [*lost, line(2.5, "connected")])
    assert judge(back, *again, tasks=[sent("x")])[0] == [STUCK]
    down = Fault("broker restart", 2.19, 2.4)
    assert judge(back, *again, tasks=[sent("x")], faults=[down])[0] == []


def test_oracle_forgives_waits_by_the_rule_popped() -> None:
    """A message may be lost with each connection, and no more."""
    full = ran(A1, "fill", 1.0, 6.0, resource="")
    tasks = [sent("fill", "", "fill", 0.5), sent("x"), sent("y", "f2")]
    in_the_socket = (A, [line(6.1, "received", "x")])
    accounts = [full, in_the_socket, ran(A1, "x", 6.2, 6.3)]
    found, waits = judge(*accounts, tasks=tasks[:2])
    assert (found, waits.popped) == ([], 1)
    more = (A, [line(6.1, "received", "x"), line(6.15, "received", "y")])
    found, waits = judge(
        full, more, ran(A1, "x", 6.2, 6.3), ran(A1, "y", 6.4, 6.5, "f2"), tasks=tasks
    )
    assert (found, waits.popped) == ([STUCK], 1)
    gone = (A, [line(2.3, "disconnected"), line(2.4, "connected")])
    late = 2.0 + VISIBILITY
    back = [(B, [line(late, "received", "x")]), ran(B1, "x", late + 0.1, late + 0.2)]
    assert judge(gone, *back, tasks=[sent("x")])[0] == []
    assert judge(*back, tasks=[sent("x")])[0] == [STUCK]


def test_oracle_forgives_a_message_popped_before_it_was_due() -> None:
    """A worker reads a message with an ETA at once."""
    assert judge(tasks=[sent("x", eta=3.0)], alive={A: 2.1})[0] == []
    assert judge(tasks=[sent("x", eta=3.0)])[0] == [STUCK]


def test_oracle_forgives_waits_by_the_rule_prefetched() -> None:
    filled = ran(A1, "fill", 1.0, 6.0, resource="")
    accounts = [filled, (A, [line(2.1, "received", "noop")]), ran(A1, "noop", 6.1, 6.2, "")]
    tasks = [sent("fill", "", "fill", 0.5), sent("noop", "", "probe")]
    assert judge(*accounts, tasks=tasks)[0] == []


def test_oracle_forgives_waits_by_the_rule_eta() -> None:
    account = (A, [line(2.1, "received", "x", due=3.9)])
    assert judge(account, ran(A1, "x", 4.0, 4.1), tasks=[sent("x", eta=3.9)])[0] == []


def test_oracle_forgives_an_eta_in_a_worker_that_stops() -> None:
    """The finding: it comes back when that has ended, and not within two seconds of its ETA."""
    stops = [line(2.2, "stopping"), line(9.0, "disconnected")]
    keeps = (A, [line(2.1, "received", "x", due=3.9), *stops])
    late = [(B, [line(9.1, "received", "x")]), ran(B1, "x", 9.2, 9.3)]
    tasks = [sent("x", eta=3.9)]
    assert judge(keeps, *late, tasks=tasks, alive={A: 9.0})[0] == []
    over = (A, [line(1.5, "received", "x", due=1.9), *stops])
    assert judge(over, *late, tasks=[sent("x", eta=1.9)], alive={A: 9.0})[0] == [STUCK]
    later = [(B, [line(14.1, "received", "x")]), ran(B1, "x", 14.2, 14.3)]
    assert judge(keeps, *later, tasks=tasks, alive={A: 9.0}, at_once=True)[0] == [STUCK]


def test_oracle_forgives_waits_by_the_rule_repeated() -> None:
    begins = [line(1.1, "received", "x"), line(1.2, "sent", "x", due=2.2)]
    again = (B, [line(40.0, "received", "x")]), ran(B1, "x", 40.1, 40.2)
    down = Fault("broker restart", 2.0, 3.0)
    tasks = [sent("x", at=1.0)]
    assert judge((A, begins), *again, tasks=tasks, faults=[down], at_once=True)[0] == []
    early = Fault("broker restart", 1.0, 2.0)
    assert judge((A, begins), *again, tasks=tasks, faults=[early], at_once=True)[0] == [STUCK]


def test_oracle_forgives_waits_by_the_rule_pooled() -> None:
    """A pool runs what it was given before a warm shutdown; what another was given comes back."""
    ends = [line(2.2, "stopping"), line(9.0, "disconnected")]
    late = [(B, [line(9.1, "received", "x")]), ran(B1, "x", 9.2, 9.3)]

    def found(pooled: Process) -> list[str]:
        accounts: dict[Process, list[Any]] = {A: [line(2.1, "received", "x")], B: []}
        accounts[pooled].append(line(2.15, "pooled", "x"))
        accounts[A] += ends
        return judge(*accounts.items(), *late, tasks=[sent("x")])[0]

    assert found(A) == []
    assert found(B) == [STUCK]


def test_every_rule_of_forgiveness_has_a_test() -> None:
    assert {
        name
        for name in FORGIVEN
        if f"test_oracle_forgives_waits_by_the_rule_{name}" not in globals()
    } == set()


# -- at rest


def window(value: int, wire: int = -1) -> dict[str, Any]:
    return {"value": value, "wire": wire, "most": 8, "reserved": [], "filled": 0}


@pytest.mark.parametrize(
    ("after", "unacked", "found"),
    [
        ({"a": window(8, 8)}, 0, []),
        ({"a": window(8)}, 0, []),
        ({"a": window(1, 1)}, 0, ["prefetch"]),
        ({"a": {**window(2, 2), "most": 2}}, 0, []),
        ({"a": {**window(2, 8), "most": 2}}, 0, ["prefetch"]),
        ({"a": window(8, 5)}, 0, ["prefetch"]),
        ({}, 0, ["prefetch"]),
        ({"a": window(8, 8)}, 3, ["unacknowledged"]),
        ({"a": {**window(8, 8), "reserved": ["it"]}}, 0, ["reserved"]),
        ({"a": {**window(8, 8), "filled": 3}}, 0, ["prefetch"]),
    ],
)
def test_oracle_checks_prefetch_window_and_unacknowledged_messages_at_rest(
    after: dict[str, dict[str, int]], unacked: int, found: list[str]
) -> None:
    verdict = Verdict()
    judge_rest(verdict, {"a": window(8, 8)}, after, unacked, 1.0)
    assert [problem.kind for problem in verdict.problems] == found


def test_oracle_forgives_a_result_that_celery_had_half_read() -> None:
    lost = (A, [line(0.0, "connected"), line(5.1, "disconnected"), line(5.2, "connected")])
    ended = (A1, [line(4.9, "got", "x"), line(5.0, "done", "x")])
    left = f"x (active, of pid {A1.pid})"
    assert half_told(dict([lost, ended])) == {left}
    assert half_told({A: lost[1], A1: [*ended[1], line(6.0, "got", "y")]}) == set()
    assert half_told({A: [line(0.0, "connected")], A1: ended[1]}) == set()
    verdict = Verdict()
    judge_rest(verdict, {"a": window(8)}, {"a": {**window(8), "reserved": [left]}}, 0, 9.0, {left})
    assert verdict.problems == []
