"""Readers and writers of one key: what the oracle must find, and what it must let pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Process
from tests.campaign.worker.made import A1, B1, A, B, judge, line, ran, sent
from tests.campaign.worker.oracle import Verdict
from tests.campaign.worker.queues import CLOSE, Look, Queues
from tests.campaign.worker.turns import KEPT_OUT, PASSED, judge_queues

TWO = {"a": 2, "b": 2}
B2 = Process("b", 20, 22, "5")
READER = (B, [line(1.95, "received", "r")]), ran(B1, "r", 2.0, 8.0, shared=True)


def reads(id_: str, at: float = 1.9, **more: Any) -> Sent:
    return sent(id_, task="reading", at=at, **more)


@pytest.mark.parametrize(("begin", "found"), [(2.5, []), (4.0, [KEPT_OUT])])
def test_oracle_requires_a_reader_to_be_let_in_beside_another(
    begin: float, found: list[str]
) -> None:
    other = (A, [line(2.1, "received", "x")]), ran(A1, "x", begin, 9.0, shared=True)
    tasks = [reads("r"), reads("x", 2.0)]
    assert judge(*READER, *other, tasks=tasks, slots=TWO)[0] == found


def test_oracle_lets_a_reader_wait_for_a_writer_or_its_own_copy() -> None:
    other = (A, [line(2.2, "received", "x")]), ran(A1, "x", 8.3, 8.5, shared=True)
    writer = (B, [line(2.1, "received", "w")]), ran(B2, "w", 8.1, 8.2)
    tasks = [reads("r"), reads("x", 2.0), sent("w")]
    assert judge(*READER, *writer, *other, tasks=tasks, slots=TWO)[0] == []
    works = ran(B1, "w", 2.0, 8.2)
    assert judge(works, *other, tasks=tasks[1:], slots=TWO)[0] == []
    copy = ran(B1, "x", 2.0, 8.2, shared=True)
    assert judge(copy, *other, tasks=tasks[1:2], slots=TWO)[0] == []


@pytest.mark.parametrize(
    ("at", "begin", "found"),
    [(4.0, 4.1, [PASSED]), (2.5, 3.0, []), (1.9, 4.1, []), (4.0, 8.25, [])],
)
def test_oracle_finds_later_readers_that_pass_a_writer(
    at: float, begin: float, found: list[str]
) -> None:
    writer = (A, [line(2.1, "received", "w")]), ran(A1, "w", 8.1, 8.2)
    later = (B, [line(at + 0.05, "received", "x")]), ran(B2, "x", begin, 8.5, shared=True)
    tasks = [reads("r"), reads("x", at), sent("w")]
    assert judge(*READER, *writer, *later, tasks=tasks, slots=TWO)[0] == found


def test_oracle_gives_readers_a_second_after_a_writer() -> None:
    """Two writers wait; the readers between them go when the first is done."""
    writers = (A, [line(2.1, "received", "v"), line(2.1, "received", "w")])
    both = ran(A1, "v", 4.0, 4.2), ran(A1, "w", 8.1, 8.2)
    first = (B, [line(1.95, "received", "r")]), ran(B1, "r", 2.0, 3.9, shared=True)
    later = (B, [line(3.05, "received", "x")]), ran(B2, "x", 4.4, 8.0, shared=True)
    tasks = [reads("r"), reads("x", 3.0), sent("v"), sent("w")]
    assert judge(writers, *both, *first, *later, tasks=tasks, slots=TWO)[0] == []


WRITER = ("a:1", 2.1)


def looks(*of: tuple[float, str, bool], nodes: int = 5) -> Queues:
    """Return what looks have shown: each with its time, the readers, and if a writer stood."""
    queues = Queues()
    for node in range(nodes):
        for at, readers, stands in of:
            entries = frozenset([WRITER] if stands else [])
            queues.see(node, "f1", Look(at, frozenset(readers), entries))
    return queues


def of_queues(queues: Queues, *tasks: Sent, faults: Any = (), done: float = 9.0) -> list[str]:
    verdict = Verdict()
    lines = {A: [line(done, "done", one.id) for one in tasks]}
    judge_queues(verdict, {one.id: one for one in tasks}, lines, faults, queues)
    return [problem.kind for problem in verdict.problems]


def test_oracle_finds_a_reader_that_a_majority_lets_in_past_a_writer_in_the_queue() -> None:
    passes = (3.0, "r", True), (3.1, "rx", True)
    assert of_queues(looks(*passes), sent("w")) == [PASSED]
    assert of_queues(looks(*passes, nodes=3), sent("w")) == [PASSED]
    assert of_queues(looks(*passes, nodes=2), sent("w")) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((3.0, "r", False), (3.1, "rx", True)),  # the writer came at the same time
        ((3.0, "r", True), (3.1, "rx", False)),  # it was notified
        ((3.0, "r", True), (3.1, "x", True)),  # the key was free between
        ((3.0, "", True), (3.1, "rx", True)),
        ((3.0, "r", True), (3.1 + CLOSE, "rx", True)),  # nobody knows what was between
        ((3.0, "rx", True), (3.1, "rx", True)),  # it was there before
    ],
)
def test_oracle_accepts_readers_that_come_where_no_writer_is_seen_to_stand_throughout(
    first: tuple[float, str, bool], second: tuple[float, str, bool]
) -> None:
    assert of_queues(looks(first, second), sent("w")) == []


def test_oracle_accepts_a_known_reader_that_a_node_is_told_of_again() -> None:
    passes = (2.5, "x", False), (3.0, "r", True), (3.1, "rx", True)
    assert of_queues(looks(*passes), sent("w")) == []


def test_oracle_accepts_readers_that_pass_a_writer_during_a_fault_of_the_nodes() -> None:
    passes = looks((3.0, "r", True), (3.1, "rx", True))
    cut = Fault("connections killed", 2.5, 2.6, nodes=(0, 1, 2))
    assert of_queues(passes, sent("w"), faults=[cut]) == []
    assert of_queues(passes, sent("w"), faults=[Fault("stream of readers", 2.5)]) == [PASSED]


@pytest.mark.parametrize(
    ("tasks", "done", "found"),
    [
        ([reads("r", 1.0)], 9.0, [KEPT_OUT]),
        ([sent("w", at=1.0)], 2.0, [KEPT_OUT]),
        ([sent("w", at=2.2)], 9.0, [KEPT_OUT]),
        ([sent("w", at=1.0), reads("r", 1.0)], 2.2, []),
        ([sent("w", "f2", at=1.0)], 9.0, [KEPT_OUT]),
    ],
)
def test_oracle_finds_a_worker_that_joins_the_queue_as_a_writer_where_none_is(
    tasks: list[Sent], done: float, found: list[str]
) -> None:
    queues = looks((3.0, "r", True), (3.1, "r", True))
    assert of_queues(queues, *tasks, done=done) == found


def test_oracle_accepts_a_writer_in_the_queue_whose_task_is_not_known_to_be_done() -> None:
    waits = sent("w", at=1.0)
    waits.state = "RETRY"
    assert of_queues(looks((3.0, "r", True)), waits, done=2.0) == []
