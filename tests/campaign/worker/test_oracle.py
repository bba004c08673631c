"""The oracle itself, on accounts made by hand: what it must find, and what it must forgive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.messages import ORPHAN, judge_calls, judge_messages
from tests.campaign.worker.oracle import BACK, PROMPT, RESIDUE, Verdict, judge
from tests.campaign.worker.sentry import Sight
from tests.campaign.worker.stage import HELPED, TTL

A, B = Process("one", 10, 11, "5"), Process("two", 20, 21, "6")


def body(
    process: Process,
    begin: float,
    end: float,
    *,
    valid: float | None = None,
    exits: bool = True,
    fence: int | None = None,
    thread: int = 1,
    resource: str = "f1",
    shared: bool = False,
) -> list[Line]:
    """A body that writes when it enters, all 20 ms, and in its end."""
    run = f"{process.pid}-{begin}"
    times = [begin + 0.02 * n for n in range(int((end - begin) / 0.02))]
    kinds = ["enter", *(["alive"] * (len(times) - 1))]
    if exits:
        times.append(end)
        kinds.append("exit")
    until = [at + TTL if valid is None else valid for at in times]
    return [
        Line(at, kind, thread, f"task-{run}", run, resource, f"t{run}", fence, v, at < v, 0, shared)
        for at, kind, v in zip(times, kinds, until, strict=True)
    ]


def kinds(*accounts: tuple[Process, list[Line]], **more: Any) -> list[str]:
    return [problem.kind for problem in verdict(*accounts, **more).problems]


def verdict(*accounts: tuple[Process, list[Line]], **more: Any) -> Verdict:
    lines: dict[Process, list[Line]] = {}
    for process, some in accounts:
        lines.setdefault(process, []).extend(some)
    return judge(lines, more.pop("alive", {}), more.pop("faults", ()), **more)


OVERLAP = ["overlap within both validities"]


def test_oracle_accepts_bodies_one_after_the_other() -> None:
    assert kinds((A, body(A, 1.0, 2.0)), (B, body(B, 2.0, 3.0))) == []


def test_oracle_finds_two_bodies_at_once() -> None:
    assert kinds((A, body(A, 1.0, 2.0)), (B, body(B, 1.99, 3.0))) == OVERLAP


def test_oracle_accepts_two_bodies_at_once_on_different_resources() -> None:
    assert kinds((A, body(A, 1.0, 2.0)), (B, body(B, 1.5, 3.0, resource="f2"))) == []


def test_oracle_finds_an_overlap_with_a_body_that_is_not_the_last() -> None:
    """A long one, a short one in it, and a third in the long one."""
    accounts = [(A, body(A, 1.0, 5.0)), (B, body(B, 2.0, 2.1)), (B, body(B, 3.0, 3.1))]
    assert kinds(*accounts) == OVERLAP * 2


def test_oracle_lets_readers_overlap_and_counts_them() -> None:
    reads = [(A, body(A, 1.0, 2.0, shared=True)), (B, body(B, 1.5, 3.0, shared=True))]
    found = verdict(*reads)
    assert (found.problems, found.beside) == ([], 1)
    found = verdict(*reads, (A, body(A, 2.5, 3.5, shared=True)), (A, body(A, 4.0, 5.0)))
    assert (found.problems, found.beside) == ([], 2)
    assert verdict((A, body(A, 1.0, 2.0)), (B, body(B, 2.0, 3.0, shared=True))).beside == 0


@pytest.mark.parametrize("reads_first", [True, False])
def test_oracle_finds_a_reader_and_a_writer_at_once(reads_first: bool) -> None:
    first = (A, body(A, 1.0, 2.0, shared=reads_first))
    assert kinds(first, (B, body(B, 1.99, 3.0, shared=not reads_first))) == OVERLAP


def test_oracle_finds_a_writer_beside_the_first_of_two_readers() -> None:
    reads = [(A, body(A, 1.0, 5.0, shared=True)), (B, body(B, 2.0, 2.1, shared=True))]
    assert kinds(*reads, (B, body(B, 3.0, 3.1))) == OVERLAP


def test_oracle_counts_an_overlap_past_a_deadline_as_a_limit() -> None:
    stopped = [line for line in body(A, 1.0, 4.0, valid=2.5) if not 1.5 < line.at < 3.9]
    found = verdict((A, stopped), (B, body(B, 3.0, 3.5)))
    assert found.problems == []
    assert found.limits == {"overlap past a validity": 1}


def test_oracle_counts_a_body_that_enters_after_its_lease_as_a_limit() -> None:
    found = verdict((A, body(A, 1.0, 2.0)), (B, body(B, 1.5, 1.6, valid=1.4)))
    assert found.problems == []
    assert found.limits == {"overlap past a validity": 1}


def test_oracle_forgives_an_overlap_after_a_flush_between_the_grants() -> None:
    accounts = [(A, body(A, 1.0, 2.0)), (B, body(B, 1.9, 2.5))]
    flush = Fault("FLUSHALL", 1.5, 1.5, nodes=(3,))
    assert kinds(*accounts, faults=[flush]) == []
    assert kinds(*accounts, faults=[Fault("FLUSHALL", 0.1, 0.1, nodes=(3,))]) == OVERLAP
    assert kinds(*accounts, faults=[Fault("FLUSHALL", 2.2, 2.2, nodes=(3,))]) == OVERLAP
    assert kinds(*accounts, faults=[Fault("node stop", 1.5, 1.6, nodes=(3,))]) == OVERLAP


def test_oracle_forgives_a_process_that_began_after_a_swap() -> None:
    young = Process("three", 30, 31, "140")
    swap = Fault("node swapped", 1.2, 1.7, nodes=(2, 3, 4))
    first = (A, body(A, 1.0, 2.0))
    assert kinds(first, (young, body(young, 1.9, 2.5)), faults=[swap]) == []
    assert kinds(first, (B, body(B, 1.9, 2.5)), faults=[swap]) == OVERLAP
    assert kinds(first, (young, body(young, 1.9, 2.5))) == OVERLAP


def test_oracle_counts_a_killed_body_as_long_as_it_was_seen_alive() -> None:
    killed = body(A, 1.0, 1.5, exits=False)
    assert kinds((A, killed), (B, body(B, 1.6, 2.0))) == []
    assert kinds((A, killed), (B, body(B, 1.6, 2.0)), alive={A: 1.55}) == []
    assert kinds((A, killed), (B, body(B, 1.6, 2.0)), alive={A: 1.65}) == OVERLAP


def test_oracle_counts_a_killed_body_no_longer_than_its_lease() -> None:
    killed = body(A, 1.0, 1.5, exits=False, valid=3.0)
    found = verdict((A, killed), (B, body(B, 3.1, 3.2)), alive={A: 4.0})
    assert found.problems == []


def test_oracle_takes_a_body_without_an_end_in_a_living_thread_as_ended() -> None:
    lines = [*body(A, 1.0, 1.5, exits=False), Line(1.51, "done", 1, "x")]
    assert kinds((A, lines), (B, body(B, 1.6, 2.0)), alive={A: 9.0}) == []


def test_oracle_finds_a_body_not_notified_of_its_loss() -> None:
    assert kinds((A, body(A, 1.0, 4.0, valid=2.0))) == ["not told"]
    assert kinds((A, body(A, 1.0, 2.5, valid=2.0))) == []


def test_oracle_lets_a_notified_body_go_on() -> None:
    lines = body(A, 1.0, 4.0, valid=2.0)
    told = next(line for line in lines if line.at > 2.1)
    lines.insert(lines.index(told), told._replace(kind="told"))
    assert kinds((A, lines)) == []


def test_oracle_forgives_a_body_that_was_kept_from_running() -> None:
    lines = [line for line in body(A, 1.0, 6.0, valid=2.0) if not 2.1 < line.at < 5.9]
    assert kinds((A, lines)) == []


def test_oracle_finds_held_reported_after_the_lease_is_over() -> None:
    lines = body(A, 1.0, 2.0)
    lines[10] = lines[10]._replace(valid=lines[10].at, held=True)
    assert kinds((A, lines)) == ["untrue"]


def test_oracle_finds_a_lease_that_comes_back() -> None:
    lines = body(A, 1.0, 2.0)
    lines[10] = lines[10]._replace(held=False)
    assert kinds((A, lines)) == ["untrue"]


def test_oracle_requires_growing_fencing_tokens() -> None:
    first, second = body(A, 1.0, 2.0, fence=7), body(B, 2.1, 3.0, fence=8)
    assert kinds((A, first), (B, second)) == []
    second = body(B, 2.1, 3.0, fence=7)
    assert kinds((A, first), (B, second)) == ["fencing tokens do not grow"]


def test_oracle_takes_no_fencing_token_from_a_body_that_enters_too_late() -> None:
    first, second = body(A, 1.0, 2.0, fence=7), body(B, 2.1, 2.2, valid=2.0, fence=6)
    assert kinds((A, first), (B, second)) == []


@pytest.mark.parametrize(("held", "found"), [(True, ["untrue"]), (False, [])])
def test_oracle_counts_a_write_refused_by_the_fence(held: bool, found: list[str]) -> None:
    lines = body(A, 1.0, 2.0, fence=7)
    lines.insert(-1, lines[-2]._replace(kind="wrote", held=held, more=False))
    lines[-1] = lines[-1]._replace(held=held)
    result = verdict((A, lines))
    assert [problem.kind for problem in result.problems] == found
    assert result.limits == {"a write that came too late was refused by the fence": 1}


@pytest.mark.parametrize(("resource", "found"), [("f1", []), ("f2", ["untrue"])])
def test_oracle_forgives_a_write_refused_after_an_unknowable_swap(
    resource: str, found: list[str]
) -> None:
    lines = body(A, 1.0, 1.9, fence=7)
    lines.insert(-1, lines[-2]._replace(kind="wrote", held=True, more=False))
    young = Process("three", 30, 31, "140")
    other = body(young, 1.7, 2.5, fence=8, resource=resource)
    swap = Fault("node swapped", 1.2, 1.65, nodes=(2, 3, 4))
    assert kinds((A, lines), (young, other), faults=[swap]) == found


# -- keys on nodes


def sight(lines: list[Line], until: float, nodes: int = 5) -> Sight:
    seen = dict.fromkeys(range(nodes), until)
    first = dict.fromkeys(range(nodes), lines[0].at)
    return Sight(lines[0].resource, lines[0].token, first, seen)


def test_oracle_accepts_a_lock_that_is_freed_at_once() -> None:
    lines = body(A, 1.0, 2.0)
    found = verdict((A, lines), sights=[sight(lines, 2.4)])
    assert (found.problems, found.longest) == ([], pytest.approx(0.4))


def test_oracle_finds_a_lock_that_is_not_freed() -> None:
    lines = body(A, 1.0, 2.0)
    late = sight(lines, 2.0 + PROMPT + 0.1)
    assert kinds((A, lines), sights=[late]) == ["not freed"]
    assert kinds((A, lines), sights=[sight(lines, 2.0 + PROMPT + 0.1, nodes=2)]) == []
    assert kinds((A, lines), sights=[late], stalls=[(2.5, 3.0)]) == []


@pytest.mark.parametrize(("stored", "found"), [(2.3, []), (2.05, ["not freed"])])
def test_oracle_lets_a_lock_be_held_until_the_result_is_stored(
    stored: float, found: list[str]
) -> None:
    lines = body(A, 1.0, 2.0)
    task = lines[0].task
    store = [Line(2.01, "storing", 1, task), Line(stored, "stored", 1, task)]
    late = sight(lines, 2.0 + PROMPT + 0.1)
    assert kinds((A, [*lines, *store]), sights=[late]) == found


@pytest.mark.parametrize(
    ("fault", "excuses"),
    [
        (Fault("child kill -9", 2.0, 2.0, "one", 11), False),
        (Fault("revoke, SIGTERM", 2.0, 2.5, "one", 11), False),
        (Fault("worker kill -9", 2.0, 2.5, "one", 10), True),
        (Fault("worker kill -9", 2.0, 2.5, "two", 20), False),
        (Fault("cut", 2.0, 2.5, "one", nodes=(1, 2, 3)), True),
        (Fault("node stop", 2.0, 2.5, nodes=(1, 2)), False),
        (Fault("majority stop", 2.0, 2.5, nodes=(1, 2, 3)), True),
        (Fault("worker kill -9", 5.0, 6.0, "one", 10), False),
    ],
)
def test_oracle_excuses_a_late_release_only_by_a_fitting_fault(fault: Fault, excuses: bool) -> None:
    lines = body(A, 1.0, 2.0)
    late = sight(lines, 2.0 + PROMPT + 0.1)
    found = verdict((A, lines), sights=[late], faults=[fault], until=5.0)
    assert [problem.kind for problem in found.problems] == ([] if excuses else ["not freed"])
    assert (found.excused > PROMPT) is excuses


def test_oracle_requires_a_sidecar_to_free_after_its_worker_is_killed() -> None:
    process = Process(HELPED, 30, 30, "7")
    lines = body(process, 1.0, 2.0, exits=False)
    late = [sight(lines, 2.0 + PROMPT + 0.1)]
    kill = Fault("worker kill -9", 2.0, 2.5, HELPED, 30)
    helper = Fault("helper kill -9", 1.5, 1.5, HELPED, 31)
    assert kinds((process, lines), sights=late, faults=[kill]) == ["not freed"]
    assert kinds((process, lines), sights=late, faults=[kill, helper]) == []


def test_oracle_finds_a_key_that_outlives_a_ttl() -> None:
    lines = body(A, 1.0, 2.0)
    kill = Fault("worker kill -9", 2.0, 2.5, "one", 10)
    within, beyond = 2.0 + TTL + RESIDUE - 0.1, 2.0 + TTL + RESIDUE + 0.1
    assert kinds((A, lines), sights=[sight(lines, within, 1)], faults=[kill]) == []
    late = [sight(lines, beyond, 1)]
    assert kinds((A, lines), sights=late, faults=[kill]) == ["key left longer than a ttl"]
    cut = Fault("cut", 1.5, 3.0, "one", nodes=(0,))
    assert kinds((A, lines), sights=late, faults=[kill, cut]) == []
    stop = Fault("child stop", 2.1, 4.0, "one", A.pid)  # behind its body, ahead of its release
    assert kinds((A, lines), sights=late, faults=[stop]) == []
    other = Fault("child stop", 2.1, 4.0, "one", A.pid + 1)
    assert "key left longer than a ttl" in kinds((A, lines), sights=late, faults=[other])


@pytest.mark.parametrize(("down", "fine"), [(3.0, True), (1.0, False)])
def test_oracle_forgives_etcd_keys_that_stay_while_it_has_no_majority(
    down: float, fine: bool
) -> None:
    lines = body(A, 1.0, 2.0)
    kill = Fault("worker kill -9", 2.0, 2.5, "one", 10)
    stop = Fault("two of three stop, more than a ttl", 2.5, 2.5 + down, nodes=(0,))
    late = [sight(lines, 2.0 + TTL + 1.0 + RESIDUE + 2.0, 1)]
    found = kinds((A, lines), sights=late, faults=[kill, stop], ttl=TTL + 1.0)
    assert found == ([] if fine else ["key left longer than a ttl"])


def test_oracle_finds_that_no_body_ran_after_a_quorum_was_back() -> None:
    loss = Fault("majority stop, more than a ttl", 1.0, 5.0, nodes=(0, 1, 2))
    late = body(A, 5.0 + BACK + 1.0, 5.0 + BACK + 2.0)
    assert kinds((A, late), faults=[loss], until=100.0) == ["no return"]
    assert kinds((A, body(A, 6.0, 6.5)), faults=[loss], until=100.0) == []
    assert kinds((A, late), faults=[loss], until=6.0) == []
    away = Fault("broker restart", 5.5, 5.0 + BACK)
    assert kinds((A, late), faults=[loss, away], until=100.0) == []


# -- messages


def sent(task: str = "late", state: str = "SUCCESS", **more: Any) -> Sent:
    return Sent("task", task, "f1", 0.1, "sleep", 1.0, certain=True, state=state, **more)


def messages(
    one: Sent, *kinds: str, faults: tuple[Fault, ...] = (), waiting: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """Return how a message ended, and the problems."""
    lines = [Line(1.1 + 0.1 * n, kind, 1, "task", more=0) for n, kind in enumerate(kinds)]
    found = Verdict()
    ends = judge_messages(found, {"task": one}, {A: lines}, faults, waiting)
    return list(ends), [problem.text.split(":")[0] for problem in found.problems]


def test_oracle_accepts_a_task_that_is_done() -> None:
    assert messages(sent(), "received", "got", "enter", "exit", "done") == (["done"], [])


def test_oracle_finds_a_task_done_that_never_ran() -> None:
    assert messages(sent(), "received", "got", "done")[1] == ["done"]


def test_oracle_lets_only_a_skipping_task_not_run() -> None:
    skipped = {"celery_redlock": "skipped", "resource": "f1", "holder": ""}
    assert messages(sent("skipping", result=skipped), "got") == (["skipped"], [])
    assert messages(sent("late", result=skipped), "got")[1] == ["skipped"]


def test_oracle_finds_a_task_that_is_lost() -> None:
    assert messages(sent(state="PENDING"))[1] == ["LOST"]
    assert messages(sent(state="RETRY"), "received", "got", "done")[1] == ["LOST"]
    assert messages(sent("early", "RETRY"), "received", "got", "done")[1] == ["LOST"]


def test_oracle_finds_a_task_that_is_stuck() -> None:
    assert messages(sent(state="RETRY"), "got", waiting=("task",))[1] == ["stuck"]


def test_oracle_forgives_an_early_acknowledged_task_lost_with_its_worker() -> None:
    kill = Fault("worker kill -9", 1.25, 1.5, "one", 10)
    early = sent("early", "PENDING")
    assert messages(early, "received", "got", "enter", faults=(kill,))[1] == []
    before = Fault("worker kill -9", 0.5, 0.6, "one", 10)
    assert messages(early, "received", "got", "enter", faults=(before,))[1] == ["LOST"]
    other = Fault("worker kill -9", 1.25, 1.5, "two", 20)
    assert messages(early, "received", "got", "enter", faults=(other,))[1] == ["LOST"]


def test_oracle_finds_a_late_acknowledged_task_lost_with_its_worker() -> None:
    kill = Fault("worker kill -9", 1.25, 1.5, "one", 10)
    assert messages(sent(state="PENDING"), "received", "got", "enter", faults=(kill,))[1]


@pytest.mark.parametrize(
    "kill",
    [Fault("worker kill -9", 1.25, 1.5, "two", 20), Fault("broker restart", 1.25, 1.5)],
    ids=lambda fault: fault.kind,
)
def test_oracle_forgives_a_popped_message_lost_with_its_connection(kill: Fault) -> None:
    ends, problems = messages(sent(state="RETRY"), "received", "got", "sent", faults=(kill,))
    assert "broker's client" in ends[0]
    assert problems == []


def test_oracle_finds_an_end_hidden_by_a_late_retry_except_by_celery() -> None:
    again = ("received", "got", "sent", "received", "got", "enter", "exit", "done")
    assert messages(sent(state="RETRY"), *again)[1] == ["done, and then said to be retried"]
    assert messages(replace(sent(state="RETRY"), manner="retry"), *again)[1] == []
    cold = Fault("worker restart, cold", 1.25, 1.5, "one", 10)
    assert messages(sent(state="RETRY"), *again, faults=(cold,))[1] == []
    assert messages(sent(state="RETRY"), "enter", "exit", "sent", "received", "got")[1] == ["LOST"]


def test_oracle_forgives_one_lost_message_for_each_ended_connection() -> None:
    kill = Fault("worker kill -9", 1.25, 1.5, "two", 20)
    found = Verdict()
    ledger = {str(n): sent(state="PENDING") for n in range(2)}
    judge_messages(found, ledger, {}, [kill], ())
    assert "but only 1 of its connections ended" in found.problems[0].text


def test_oracle_requires_an_early_acknowledged_task_to_run_once() -> None:
    twice = ("received", "got", "enter", "exit", "received", "got", "enter", "exit")
    assert len(messages(sent("early"), *twice)[1]) == 1
    assert messages(sent("late"), *twice)[1] == []
    broken = Fault("broker restart", 1.2, 1.4)
    assert messages(sent("early"), *twice, faults=(broken,))[1] == []


def test_oracle_finds_an_error_that_nothing_explains() -> None:
    assert messages(sent(state="FAILURE", error="KeyError"), "got", "enter")[1] == ["failed"]
    assert messages(sent(state="FAILURE", error="LeaseLost"), "got", "enter")[1] == []


def test_oracle_finds_an_operational_error_without_a_broker_fault() -> None:
    assert messages(sent(state="FAILURE", error="ValueError"), "got")[1] == ["failed"]
    away = Fault("broker restart", 1.0, 2.0)
    assert messages(sent(state="FAILURE", error="OperationalError"), "got", faults=(away,))[1] == []
    assert messages(sent(state="FAILURE", error="OperationalError"), "got")[1] == ["failed"]


def test_oracle_accepts_revoked_and_purged_tasks_only_on_purpose() -> None:
    assert messages(sent(state="REVOKED", expected="revoked"), "received")[1] == []
    assert messages(sent(state="REVOKED"), "received")[1] == ["revoked"]
    assert messages(sent(state="PENDING", expected="purged"))[1] == []
    assert messages(sent(state="PENDING", expected="purged"), "received")[1] == ["LOST"]


def test_oracle_forgives_a_returned_message_lost_with_the_next_connection() -> None:
    back = ("received", "returned")
    kill = Fault("worker kill -9", 1.25, 1.5, "two", 20)
    assert messages(sent(state="PENDING"), *back, faults=(kill,))[1] == []
    assert messages(sent(state="PENDING"), *back)[1] == ["LOST"]
    assert messages(sent(state="PENDING"), *back, "received", faults=(kill,))[1] == ["LOST"]


def test_oracle_forgives_a_returned_message_that_was_popped_again() -> None:
    """It was popped again, over a connection that ended."""
    process, lines = A, [Line(1.1, "received", 1, "task"), Line(1.2, "disconnected", 1, "")]
    kill = Fault("worker kill -9", 1.3, 1.5, "two", 20)
    found = Verdict()
    judge_messages(found, {"task": sent("early", "PENDING")}, {process: lines}, [kill], ())
    assert found.problems == []
    judge_messages(found, {"task": sent("early", "PENDING")}, {process: lines[:1]}, [kill], ())
    assert len(found.problems) == 1


def test_oracle_finds_a_returned_call_that_ran_nothing() -> None:
    """The finding: a producer is killed between reserving and publishing."""
    killed, healthy = Process("producer", 8, 8, "1"), Process("producer", 9, 9, "2")
    call = [Line(20.0, "gave", 1, "x", "", "f1")]

    def found(begin: float, died: dict[Process, float]) -> list[str]:
        lines = {A: body(A, begin, begin + 0.1), healthy: call}
        verdict_ = verdict((A, lines[A]))
        assert judge_calls(verdict_, lines, died) == 1
        return [problem.kind for problem in verdict_.problems]

    assert found(20.1, {}) == []
    assert found(19.0, {}) == ["delay() came back, and nothing ran"]
    assert found(19.0, {killed: 20.0 - ORPHAN + 1.0}) == []
    assert found(19.0, {killed: 20.0 - ORPHAN - 1.0}) == ["delay() came back, and nothing ran"]
    assert found(19.0, {healthy: 20.1}) == []
