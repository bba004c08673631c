"""Code that an exception interrupts, as a time limit does, at each of its calls in turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["Struck", "struck_at_each_call"]


class Struck(BaseException):
    """The exception that a time limit raises in the code it interrupts."""


def struck_at_each_call(
    where: str, work: Callable[[], object], before: Callable[[], object]
) -> int:
    """Run `work` over and over; raise `Struck` behind its first call, its second, and so on.

    Python runs signal handlers where a function begins and behind a call of one written in C. (Not
    at each line: between the last line of a `with` and its end no handler runs.)

    Args:
        where: Part of the names of the files whose calls count.
        work: Is to go the same way each time, more or less.
        before: Called before each, and once behind the last, undisturbed.

    Returns:
        How many places there are.
    """
    count = target = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event in ("call", "c_return") and where in frame.f_code.co_filename:
            count += 1
            if count == target:
                sys.setprofile(None)
                raise Struck

    while target <= count:
        count, target = 0, target + 1
        before()
        sys.setprofile(profile)
        with contextlib.suppress(Struck):
            work()
        sys.setprofile(None)
    before()
    return target
