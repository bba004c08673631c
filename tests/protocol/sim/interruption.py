"""Run a handler or stop the process at each line of the real code in turn.

The simulated world runs the pure parts only, each of which is one step to it. What happens between
two lines of the driver is out of its reach, and in reach here: the code itself, line by line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MODULES = (
    *(
        "stores/connections",
        "stores/driver",
        "stores/node",
        "stores/redis/node",
        "stores/redis/resp",
        "runtime/complaints",
    ),
    *("protocol/pipeline", "protocol/quorum", "protocol/lease", "protocol/claim"),
    *("protocol/replies", "stores/redis/requests", "locking/client", "locking/leases"),
    *("keepalive/watchdog", "keepalive/registry"),
)


def at_each_line(
    work: Callable[[], object],
    handler: Callable[[], object],
    *,
    before: Callable[[], object] = lambda: None,
    step: int = 1,
    until: Callable[[], object] = lambda: False,
) -> int:
    """Run `work` over and over; call `handler` in it, at its first line of ours, its second...

    Args:
        work: Is to go the same way each time, more or less.
        handler: Called once in each.
        before: Called before each, undisturbed.
        step: How many lines to go on each time.
        until: Ends it before the last line.

    Returns:
        How many lines it has.
    """
    files = tuple(f"/celery_redlock/{module}.py" for module in MODULES)
    count = target = 0
    outer = sys.gettrace()  # that of coverage, say

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            count += 1
            if count == target:
                sys.settrace(outer)
                handler()
        return trace

    while target <= count and not until():
        count, target = 0, target + step
        before()
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(outer)
    return target
