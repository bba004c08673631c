"""Violations that the oracle of the publishing side must find, and accounts that it must accept."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.campaign.publishing.account import account_of
from tests.campaign.publishing.acts import PAUSED, PURGE, WARM
from tests.campaign.publishing.oracle import (
    ERRBACK,
    LATE,
    LEFT,
    LOST,
    REPLACED,
    judge,
    judge_rest,
)
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.oracle import Verdict

P, W = Process("p0", 1, 1, "1"), Process("one", 2, 2, "2")


def call(
    number: str, at: float, what: str = "debounced:k", *, given: str | None = None,
    reserved: bool | None = True, countdown: float = 0.0,
) -> list[Line]:  # fmt: skip
    """The lines of a call; of a duplicate nothing leaves (`reserved` is None)."""
    lines = [Line(at, "call", 1, "", number, what, more=countdown)]
    if reserved is not None:
        lines.append(Line(at + 0.01, "out", 1, number, number, what, held=reserved))
    return [*lines, Line(at + 0.02, "gave", 1, number if given is None else given, number, what)]


def refused(number: str, at: float, what: str = "debounced:k") -> list[Line]:
    return [
        Line(at, "call", 1, "", number, what, more=0.0),
        Line(at + 0.01, "out", 1, number, number, what, held=True),
        Line(at + 0.02, "refused", 1, "", number, what, "EncodeError"),
    ]


def ran(
    number: str, at: float, what: str = "debounced:k", seconds: float | None = 0.1
) -> list[Line]:
    """The lines of a body; None: it was broken off."""
    lines = [Line(at, "enter", 1, number, number, what)]
    return [*lines, Line(at + seconds, "exit", 1, number, number, what)] if seconds else lines


def moved(kind: str, number: str, at: float) -> list[Line]:
    return [Line(at, kind, 1, number)]


def judged(
    calls: list[list[Line]],
    worker: list[list[Line]],
    *faults: Fault,
    stalled: float = 0.0,
    nodes: int = 5,
) -> Verdict:
    lines = {P: list(chain(*calls)), W: list(chain(*worker))}
    return judge(account_of(lines), faults, lambda *_times: stalled, nodes)


def found(*args: Any, **more: Any) -> list[str]:
    return [problem.kind for problem in judged(*args, **more).problems]


def test_oracle_accepts_a_call_that_runs() -> None:
    assert found([call("a", 1.0)], [ran("a", 2.0)]) == []


def test_oracle_finds_an_accepted_call_without_a_body() -> None:
    assert found([call("a", 1.0)], []) == [LOST]
    assert found([call("a", 1.0)], [ran("x", 2.0, "debounced:other")]) == [LOST]


def test_oracle_requires_a_body_of_the_call_before_a_refused_one() -> None:
    calls = [call("a", 1.0), refused("b", 1.1)]
    assert found(calls, [ran("a", 2.0)]) == []
    assert found(calls, []) == [LOST]


def test_oracle_lets_a_newer_call_serve_a_replaced_one_and_not_an_older() -> None:
    calls = [call("a", 1.0), call("b", 1.1)]
    assert found(calls, [ran("b", 2.0)]) == []
    assert found(calls, [ran("a", 1.5)]) == [LOST]


def test_oracle_lets_a_call_at_the_same_time_serve() -> None:
    calls = [call("a", 1.0), call("b", 1.01)]
    assert found(calls, [ran("a", 1.5)]) == []


def test_oracle_lets_the_call_whose_id_a_duplicate_got_serve_it() -> None:
    calls = [call("a", 1.0, "once:k"), call("b", 1.1, "once:k", given="a", reserved=None)]
    assert found(calls, [ran("a", 1.5, "once:k")]) == []
    assert found(calls, [ran("a", 1.02, "once:k", 0.03)]) == [LOST]
    assert found(calls, [ran("a", 1.02, "once:k", 0.3)]) == []


def test_oracle_lets_a_body_serve_calls_as_long_as_it_keeps_its_key() -> None:
    for later, problems in ((2.5, []), (4.0, [LOST])):
        calls = [
            call("a", 1.0, "expired:k"),
            call("b", later, "expired:k", given="a", reserved=None),
        ]
        assert found(calls, [ran("a", 1.5, "expired:k")]) == problems


def test_oracle_requires_a_body_for_each_call_of_a_plain_task() -> None:
    calls = [call("a", 1.0, "plain:k"), call("b", 1.1, "plain:k")]
    assert found(calls, [ran("b", 1.5, "plain:k")]) == [LOST]


def test_oracle_requires_no_body_of_a_purged_call() -> None:
    purge = Fault(PURGE, 1.5, 1.6)
    assert found([call("a", 1.0)], [], purge) == []
    assert found([call("a", 1.7)], [], purge) == [LOST]
    # It was with a worker.
    assert found([call("a", 1.0)], [moved("received", "a", 1.2)], purge) == [LOST]
    back = [moved("received", "a", 1.2), [Line(1.3, "stopping", 1, "")]]
    assert found([call("a", 1.0)], back, purge) == []


@pytest.mark.parametrize(("later", "problems"), [(1.55, []), (1.7, [LOST])])
def test_oracle_takes_a_purged_key_as_free_from_then_on(later: float, problems: list[str]) -> None:
    calls = [call("a", 1.0, "once:k"), call("b", later, "once:k", given="a", reserved=None)]
    assert found(calls, [], Fault(PURGE, 1.5, 1.6)) == problems


def test_oracle_forgives_acknowledged_work_lost_with_its_worker() -> None:
    cold = Fault("worker restart, cold", 2.0, 4.0, "one", 2)
    begun = [moved("got", "a", 1.9), ran("a", 1.95, seconds=None)]
    assert found([call("a", 1.98)], begun, cold) == []
    other = Fault("worker restart, cold", 2.0, 4.0, "two", 3)
    assert found([call("a", 1.98)], begun, other) == [LOST]
    assert found([call("a", 1.98)], [*begun, moved("done", "a", 1.99)], cold) == [LOST]
    assert found([call("a", 1.98)], [*begun, moved("done", "a", 2.01)], cold) == []
    late = [call("a", 1.98, "surely:k")]
    assert found(late, [moved("got", "a", 1.9)], cold) == [LOST]


def test_oracle_forgives_one_lost_message_for_each_worker_that_ends() -> None:
    warm = Fault(WARM, 1.5, 4.0, "one", 2)
    assert found([call("a", 1.0)], [], warm) == []
    both = [call("a", 1.0), call("b", 1.0, "debounced:j")]
    assert found(both, [], warm) == [LOST]
    assert found([call("a", 1.0)], [moved("revoked", "a", 1.2)], warm) == [LOST]


def test_oracle_finds_an_error_callback_that_did_not_run() -> None:
    calls = [call("a", 1.0, "failing:k")]
    failed = ran("a", 1.1, "failing:k")
    assert found(calls, [failed]) == [ERRBACK]
    assert found(calls, [failed, ran("a!", 1.3, "compensate:k")]) == []
    assert found(calls, [failed], Fault(WARM, 1.15, 3.0, "one", 2)) == []


@pytest.mark.parametrize("order", [("b", "a"), ("a", "b")])
def test_oracle_finds_a_replaced_call_that_runs(order: tuple[str, str]) -> None:
    calls = [call("a", 1.0), call("b", 1.1)]
    bodies = [ran(number, 3.0 + at) for at, number in enumerate(order)]
    assert found(calls, bodies) == [REPLACED]


def test_oracle_accepts_a_call_that_had_begun_when_the_next_was_made() -> None:
    calls = [call("a", 1.0), call("b", 1.1)]
    assert found(calls, [ran("a", 1.05, seconds=3.0), ran("b", 4.1)]) == []
    # Its broker delivers it again: it had begun before.
    assert found(calls, [ran("a", 1.05, seconds=None), ran("b", 2.0), ran("a", 9.0)]) == []


def test_oracle_accepts_a_call_without_a_reservation_beside_a_newer_one() -> None:
    calls = [call("a", 1.0, reserved=False), call("b", 1.1)]
    verdict = judged(calls, [ran("b", 2.5), ran("a", 3.0)])
    assert verdict.problems == []
    assert verdict.limits == {"published without a reservation": 1}


def test_oracle_does_not_let_an_older_call_serve_one_without_a_reservation() -> None:
    calls = [call("a", 1.0), call("b", 1.1, reserved=False)]
    assert found(calls, [ran("a", 2.0)]) == [LOST]
    assert found(calls, [ran("b", 2.0), ran("a", 2.2)]) == []


def test_oracle_forgives_a_reservation_that_a_majority_may_have_lost() -> None:
    calls, bodies = [call("a", 1.0), call("b", 1.1)], [ran("b", 2.5), ran("a", 3.0)]
    assert found(calls, bodies, Fault("node stop", 2.0, 2.2, nodes=(1, 2))) == []
    assert found(calls, bodies, Fault("node stop", 2.0, 2.2, nodes=(1,))) == [REPLACED]
    assert found(calls, bodies, Fault("node stop", 0.0, 0.9, nodes=(1, 2))) == [REPLACED]
    assert found(calls, bodies, nodes=1) == [REPLACED]
    assert found(calls, bodies, Fault("cut", 2.0, 2.2, nodes=(0,)), nodes=1) == []


def test_oracle_finds_a_long_wait_for_a_free_key() -> None:
    calls = [call("a", 1.0, "plain:k"), call("b", 1.1, "plain:k")]
    first = ran("a", 1.2, "plain:k", 5.0)
    assert found(calls, [first, ran("b", 7.0, "plain:k")]) == []
    late = [first, ran("b", 10.0, "plain:k")]
    assert found(calls, late) == [LATE]
    assert found(calls, late, stalled=2.0) == []
    assert found(calls, [*late, moved("received", "b", 9.0)]) == []
    again = [moved("received", "b", 1.2), moved("received", "b", 9.0)]
    assert found(calls, [*late, *again]) == [LATE]
    assert found(calls, late, Fault(PAUSED, 6.5, 7.5, nodes=(1, 2, 3))) == []
    assert found(calls, late, Fault(PAUSED, 6.5, 6.7, nodes=(1, 2, 3))) == [LATE]
    assert found(calls, late, Fault(WARM, 6.5, 6.7, "one", 2)) == []
    ended = Fault("worker kill -9", 1.5, 1.6, "one", W.pid)
    assert found(calls, late, ended) == [LATE]
    assert found(calls, [*late, moved("received", "b", 1.2)], ended) == []
    assert found(calls, [*late, [Line(8.0, "connected", 1, "")]]) == []
    assert found(calls, [*late, [Line(5.0, "connected", 1, "")]]) == [LATE]


def test_oracle_finds_a_reservation_that_is_left() -> None:
    left = [(1, "redlock:once:k#reserved")]
    for faults, problems in (
        ([], [LEFT]),
        ([Fault("node stop", 1.0, 2.0, nodes=(1,))], [LEFT]),
        ([Fault("node stop", 1.0, 2.0, nodes=(2,)), Fault(WARM, 1.0, 3.0, "one", 2)], [LEFT]),
        ([Fault("node stop", 1.0, 2.0, nodes=(1,)), Fault(WARM, 1.0, 3.0, "one", 2)], []),
        ([Fault(PURGE, 1.0, 1.1)], [LEFT]),
    ):
        verdict = Verdict()
        judge_rest(verdict, left, 9.0, faults)
        assert [problem.kind for problem in verdict.problems] == problems, faults
