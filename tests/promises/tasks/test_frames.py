"""A delivery that is sent again leaves no frames behind until a full collection."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from celery import signals
from celery.exceptions import Retry

from celery_redlock import SingletonTask
from tests.support.delivering import deliver

ONE_WRITE = 16_384
"""Bytes that billiard sends in one piece; of more, the length goes ahead."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def frames() -> list[FrameType]:
    """Return the frames of deliveries; each refers to its result and to Celery's traceback."""
    every = (one for one in gc.get_objects() if type(one) is FrameType)
    return [frame for frame in every if frame.f_code.co_name == "trace_task"]


def test_delivery_sent_again_leaves_no_frames_behind(
    busy: Any, sent: list[Any], uncollected: None
) -> None:
    task, before = busy(), len(frames())  # an error that another test keeps has its own
    assert all(isinstance(deliver(task)[0], Retry) for _ in range(3))
    assert len(sent) == 3
    assert len(frames()) == before


def test_retry_for_a_lock_sends_no_frames_to_the_main_process(busy: Any, sent: list[Any]) -> None:
    """Frames make it two writes, and Celery may lose a child between them."""
    infos: list[Any] = []
    names: list[str] = []

    def on_retry(*said: Any) -> None:
        infos.append(said[-1])
        frame = infos[0].tb
        while frame is not None:
            names.append(frame.tb_frame.f_code.co_name)
            frame = frame.tb_next

    task = busy()
    task.on_retry = on_retry
    deliver(task)
    assert names == ["trace_task", "__call__", "run"]  # what Celery makes of each is made in vain
    assert "is held by" in infos[0].traceback
    assert len(pickle.dumps(infos[0])) < ONE_WRITE


def deep(depth: int, end: Callable[[], None]) -> None:
    if depth:
        deep(depth - 1, end)
    end()


@pytest.mark.parametrize("what", ["failure", "retry"])
def test_own_failure_or_retry_sends_no_frames_to_the_main_process(
    app: Any, sent: list[Any], what: str
) -> None:
    """Receivers in the task's process have them: reports of errors show local variables."""
    seen: list[Any] = []

    @app.task(name=f"ends-in-{what}", base=SingletonTask, lock_key="k", bind=True)
    def task(self: Any) -> None:
        def fail() -> None:
            raise ValueError("no")

        deep(10, self.retry if what == "retry" else fail)

    def told(sender: Any = None, einfo: Any = None, **_signal: Any) -> None:
        seen.append((einfo, einfo.tb.tb_frame.f_code.co_name, len(pickle.dumps(einfo))))

    signal = signals.task_retry if what == "retry" else signals.task_failure
    signal.connect(told, weak=False, dispatch_uid=__name__)
    try:
        deliver(task)
    finally:
        signal.disconnect(dispatch_uid=__name__)
    ((einfo, outermost, size),) = seen
    assert outermost == "trace_task" and size > ONE_WRITE
    assert len(pickle.dumps(einfo)) < ONE_WRITE
    assert einfo.traceback.count("in deep") > 1
