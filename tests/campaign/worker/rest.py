"""State at rest: no message in hand, and the window as at the start. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.oracle import Verdict

HALF_TOLD = 1.0
"""Seconds from the end of a task in a child until Celery has read its result, on a busy machine."""


def half_told(lines: Mapping[Process, Sequence[Line]]) -> set[str]:
    """Return tasks that ended just as their worker lost its broker, and were their child's last.

    A failure or retry is more than billiard writes in one piece. If Celery's loop ends between the
    two, it forgets that it has read the first, and never uses the child again.
    """
    found = set()
    for process, of_one in lines.items():
        ends = [line for line in of_one if line.kind in ("got", "done")]
        if process.pid != process.main and ends and ends[-1].kind == "done":
            last = ends[-1]
            if any(
                line.kind == "disconnected" and -0.1 < line.at - last.at < HALF_TOLD
                for other, of_main in lines.items()
                if (other.worker, other.pid) == (process.worker, process.main)
                for line in of_main
            ):
                found.add(f"{last.task} (active, of pid {process.pid})")
    return found


def judge_rest(
    verdict: Verdict,
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    unacked: int,
    at: float,
    half_told: Collection[str] = (),
) -> None:
    """Check at rest that each prefetch window is as before and that no message is in hand.

    Args:
        verdict: Violations are added to it.
        before: What each worker said at the beginning, by its name: see `project.window`.
        after: The same when all was quiet again.
        unacked: Messages that the broker holds to be at somebody's.
        at: When; seconds.
        half_told: What a worker has in hand because Celery had read half of its result.
    """
    for name, first in before.items():
        last = after.get(name)
        if last is None and name == "green":
            # Celery's greenlet for remote control ends with its connection, of which the consumer,
            # that would begin another, may not hear.
            verdict.limit("a gevent worker that is no longer reached by remote control")
            continue
        if last is None:
            verdict.problem("prefetch", at, f"{name} does not answer at rest")
            continue
        # An autoscaled worker that has lost its connection begins with what its pool is then.
        value = last["value"]
        if value not in (first["value"], last["most"]) or last["wire"] not in (-1, value):
            text = (
                f"of {name} at rest: {value}, on the wire {last['wire']}; at the start"
                f" {first['value']}, and of its pool {last['most']}"
            )
            verdict.problem("prefetch", at, text)
        # Below nothing: a message that its broker gave again to the worker that had it was
        # acknowledged twice. kombu forgets the second one with the next message that comes.
        if last["filled"] > 0:
            text = f"of {name} at rest: {last['filled']} places are taken by what it no longer has"
            verdict.problem("prefetch", at, text)
        for one in last["reserved"]:
            if one in half_told:
                verdict.limit("a result that Celery had half read as it lost its broker")
            else:
                verdict.problem("reserved", at, f"{name} has in hand, at rest: {one}")
    if unacked:
        verdict.problem("unacknowledged", at, f"{unacked} messages, at rest")
