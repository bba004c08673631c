"""Readers and writers of one key: what the oracle must find, and what it must let pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Process
from tests.campaign.worker.made import A1, B1, A, B, judge, line, ran, sent
from tests.campaign.worker.turns import KEPT_OUT, PASSED

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
