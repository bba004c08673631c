"""What a delivery that is sent again leaves behind until a full collection: no frames."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from celery.exceptions import Retry

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
    """Of deliveries; each has its result, and Celery's copy of the traceback in it."""
    every = (one for one in gc.get_objects() if type(one) is FrameType)
    return [frame for frame in every if frame.f_code.co_name == "trace_task"]


def test_its_frames_are_gone_with_it(busy: Any, sent: list[Any], uncollected: None) -> None:
    task, before = busy(), len(frames())  # an error that another test keeps has its own
    assert all(isinstance(deliver(task)[0], Retry) for _ in range(3))
    assert len(sent) == 3
    assert len(frames()) == before


def test_the_main_process_is_sent_none_of_its_frames(busy: Any, sent: list[Any]) -> None:
    """With them it is two writes, and Celery may lose a child between the two."""
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
