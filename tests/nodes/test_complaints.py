"""Log lines about nodes: one for each failure, one for the recovery, and no flood."""

from __future__ import annotations

import logging

from celery_redlock.protocol.round import Verb
from celery_redlock.runtime.complaints import MAX_CHANGES, PAGE_S, Complaints, Once

LATE = "no answer within 0.250 s"


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.node = Complaints(
            "n:1", lambda level, _event, line: self.lines.append(f"{level} {line}")
        )

    def flaps(self, seconds: int, *, at: float = 0.0, each: int = 10) -> float:
        """Late and in time again, so many times a second."""
        for number in range(seconds * each):
            now = at + number / each
            self.node.answers += 9
            self.node.look(now)
            self.node.fails(Verb.ACQUIRE, LATE, now, late=True)
            self.node.answers += 1
            self.node.works(Verb.ACQUIRE, now)
        return at + seconds


def test_each_change_of_a_node_is_one_log_line() -> None:
    log = Log()
    for _ in range(50):
        log.node.fails(Verb.ACQUIRE, LATE, 1.0, late=True)
    log.node.works(Verb.ACQUIRE, 2.0)
    log.node.works(Verb.ACQUIRE, 2.0)
    assert log.lines == [
        f"{logging.WARNING} node n:1 does not acquire: {LATE}",
        f"{logging.INFO} node n:1 can acquire again",
    ]


def test_flapping_node_is_summed_up_once_a_minute() -> None:
    log = Log()
    log.flaps(600)
    first = MAX_CHANGES + 1
    assert len(log.lines) <= first + 600 / PAGE_S
    assert "again and again" in log.lines[first - 1]
    assert "node n:1: 600 of 6009 answers were late in the last minute" in log.lines[first]


def test_summary_of_a_node_that_is_away_names_the_reason_and_no_latency() -> None:
    log = Log()
    for second in range(65):
        log.node.works(None, float(second))
        log.node.fails(None, "Connection refused", float(second))
    assert "0 of 0 answers were late" in log.lines[-1]
    assert log.lines[-1].endswith("node n:1 is unreachable: Connection refused")
    log.node.works(None, 66.0)
    log.node.look(130.0)
    assert log.lines[-1].endswith("It works now")


def test_node_that_stopped_flapping_is_logged_once() -> None:
    log = Log()
    end = log.flaps(90)
    log.lines.clear()
    for second in range(200):
        log.node.look(end + second)
    assert [line for line in log.lines if "is back" in line] == log.lines[-1:]
    assert log.flaps(1, at=end + 300) and len(log.lines) <= 2 + MAX_CHANGES + 1


def test_summary_after_flapping_names_a_node_that_stays_down() -> None:
    log = Log()
    end = log.flaps(90)
    log.lines.clear()
    for second in range(200):
        log.node.fails(None, "Connection refused", end + second)
    assert "n:1 is unreachable: Connection refused (for a minute)" in log.lines[-1]
    assert len(log.lines) <= 3


def test_quiet_node_logs_no_summary() -> None:
    log = Log()
    for second in range(1000):
        log.node.answers += 1
        log.node.look(float(second))
    assert log.lines == []


def test_each_cause_of_an_outage_is_logged_once_a_minute() -> None:
    due = Once()
    assert due("three are away", 100.0) and due("three others are", 100.0)
    assert not any(due("three are away", 100.0 + second) for second in range(int(PAGE_S)))
    assert due("three are away", 100.0 + PAGE_S)
    assert not due("three are away", 101.0 + PAGE_S), "counted from the line, not from the first"
