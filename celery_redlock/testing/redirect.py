"""For the time of a test, every lock of this process is taken on other nodes than it was told.

Whatever a project's settings name (its production nodes, perhaps), its tests reach what the test
has: an app's lock, one that a module made at its import, and those that are yet to be made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from .. import engine as engines
from .. import lock as locks
from .. import settings
from ..address import Address
from ..custody import Custody
from ..engine import Engine
from ..guard import Guard

logger = logging.getLogger("celery_redlock.testing")

_WHERE = ("_addresses", "_guard", "_custody")
_STATE = (
    *(*_WHERE, "_driver", "_wakeup", "_watchdog", "_claims", "_called", "_many", "_owner"),
    "_checked",
)


@contextmanager
def redirected(
    addresses: tuple[Address, ...],
    driver: Callable[..., Any] | None = None,
    wakeup: Callable[..., Any] | None = None,
) -> Iterator[Callable[[], list[Engine]]]:
    """All locks of this process are on `addresses`; the restart guard is off, no helper runs.

    Args:
        addresses: The nodes.
        driver: What to make drivers with, if not with the real one.
        wakeup: Likewise what hears releases.

    Yields:
        Tells which locks there are.
    """
    before: dict[Engine, dict[str, Any]] = {}
    begin = Engine._start

    def start(engine: Engine) -> None:
        """In place of `Engine._start`: of a new lock, and in the child of a fork."""
        if engine not in before:
            before[engine] = {name: getattr(engine, name) for name in _WHERE}
        engine._addresses = addresses
        engine._guard = Guard(False, engine.ttl, logger.debug)
        engine._custody = Custody(len(addresses))
        begin(engine)

    known = set(locks._of_app.values())
    with ExitStack() as stack:
        for module in (engines, locks):
            if driver is not None:
                stack.enter_context(patch.object(module, "Driver", driver))
        if wakeup is not None:
            stack.enter_context(patch.object(engines, "Wakeup", wakeup))
        # An app whose broker is no Redis needs no setting to be tested.
        stack.enter_context(patch.object(settings, "_broker", lambda _conf: "redis://127.0.0.1"))
        stack.enter_context(patch.object(Engine, "_start", start))
        for engine in list(engines._instances):
            before[engine] = {name: getattr(engine, name) for name in _STATE}
            start(engine)
        try:
            yield lambda: list(before)
        finally:
            for engine in before:
                engine._watchdog.close()
                engine._wakeup.close()
                engine._driver.close()
    for app, redlock in list(locks._of_app.items()):
        if redlock not in known:
            del locks._of_app[app]  # made for a test: the next may have other settings
    for engine, state in before.items():
        vars(engine).update(state)
        if "_driver" not in state:
            engine._start()
