"""The same id delivered again by the broker while its first body runs.

The copy is kept out, and neither steals nor frees the lock. It runs later only if the first body
did not come to its end.
"""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

from tests.promises.worker.ending import BODY, KEEPER, MAIN, Ending, Row, Stage, begin_again
from tests.support.wait import wait_until
from tests.support.worker import Worker

VISIBLE = 1.0
"""Seconds after which the broker delivers again what was not acknowledged."""
SETTINGS: dict[str, Any] = {
    "broker_transport_options": {"visibility_timeout": VISIBLE},
    "worker_prefetch_multiplier": 1,
}


def _overdue(stage: Stage) -> None:
    """Wait until the message has been with its worker for longer than the broker allows."""

    def overdue() -> bool:
        ((_tag, since),) = stage.cluster.client.zrange("unacked_index", 0, -1, withscores=True)
        return time.time() > since + VISIBLE

    wait_until(overdue, 5.0, "the message is overdue")


def _copy_is_kept_out(stage: Stage, *workers: Worker) -> None:
    # Parked by the worker itself, where that takes it; else it meets the lock.
    waits = re.compile(rf"\[{stage.sent.id}\] waits \((held, attempt 2|parked)")
    wait_until(lambda: any(waits.search(one.text) for one in workers), 20.0, "the copy waits")
    assert len(stage.cluster.runs(stage.key)) == 1


def _end(stage: Stage, ending: Ending, by: tuple[str, ...]) -> Row:
    freed = stage.freed(ending.within)
    who = stage.by()
    assert who in by, f"freed by the {who}"
    message = stage.over("SUCCESS", ending.runs)
    assert stage.overlaps() == 0
    return Row(freed, who, stage.overlaps(), message)


def timeout(stage: Stage, ending: Ending) -> Row:
    """A second worker looks for overdue messages when it starts; either takes the copy."""
    stage.begin(ending.task)
    _overdue(stage)
    with begin_again(stage, **SETTINGS) as second:
        _copy_is_kept_out(stage, stage.worker, second)
        stage.cluster.tell(stage.key)
        row = _end(stage, ending, (BODY,))
    assert stage.cluster.result(stage.sent) == 1  # and not that it was skipped
    return row


def timeout_and_death(stage: Stage, ending: Ending) -> Row:
    stage.begin(ending.task)
    _overdue(stage)
    with begin_again(stage, **SETTINGS) as second:
        _copy_is_kept_out(stage, stage.worker, second)
        os.kill(stage.run.pid, signal.SIGKILL)
        return _end(stage, ending, (MAIN, KEEPER))


def connection_loss(stage: Stage, ending: Ending) -> Row:
    """The message may go to the worker itself, on its new connection, or to the second worker."""
    stage.begin(ending.task)
    _overdue(stage)
    stage.cluster.client.client_kill_filter(_type="normal", skipme=True)
    stage.worker.said("Connection to broker lost")
    with begin_again(stage, **SETTINGS) as second:
        _copy_is_kept_out(stage, stage.worker, second)
        stage.cluster.tell(stage.key)
        return _end(stage, ending, (BODY,))


RETRY, SKIP = "until_told_retry", "until_told_skip"

ENDINGS = (
    Ending("delivered again (visibility timeout), first succeeds", RETRY, played=timeout,
           worker=SETTINGS),
    Ending('the same, with `lock_on_conflict="skip"`', SKIP, played=timeout, worker=SETTINGS),
    Ending("delivered again (visibility timeout), first is killed", RETRY, runs=2,
           played=timeout_and_death, worker=SETTINGS),
    Ending("delivered again (connection loss), first succeeds", RETRY, played=connection_loss,
           worker=SETTINGS),
)  # fmt: skip
