"""For the time of a test, locks of this process are taken on other nodes than told, or not at all.

Whatever a project's settings name (its production nodes, perhaps), its tests reach what the test
has: an app's lock, one that a module made at its import, and those that are yet to be made.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ..config import default_node, settings
from ..keepalive.registry import LeaseRegistry
from ..locking import client as clients
from ..locking import redlock as locks
from ..locking.client import LockClient
from ..protocol.restart_guard import RestartGuard
from ..stores.kinds import Address

__all__ = ["redirected", "redlock_disabled"]

logger = logging.getLogger("celery_redlock.testing")

_WHERE = ("addresses", "guard", "registry")
"""What a lock that is made for a test has of its nodes when it starts."""


@contextmanager
def redirected(
    addresses: tuple[Address, ...],
    driver: Callable[..., Any] | None = None,
    wakeup: Callable[..., Any] | None = None,
) -> Iterator[Callable[[], list[LockClient]]]:
    """Put all locks of this process on `addresses`, without a restart guard or a helper process.

    Drivers, and what hears releases, are made with `driver` and `wakeup` in place of the real ones.
    The block is given a function that returns the locks that there are.
    """
    before: dict[LockClient, dict[str, Any]] = {}
    begin = LockClient.start_afresh

    def start(client: LockClient) -> None:
        """In place of `LockClient.start_afresh`: of a new lock, and in the child of a fork."""
        if client not in before:
            before[client] = {name: getattr(client, name) for name in _WHERE}
        client.addresses = addresses
        client.guard = RestartGuard(False, client.ttl, logger.debug)
        client.registry = LeaseRegistry(len(addresses))
        begin(client)

    known = set(locks.of_app.values())
    with ExitStack() as stack:
        for module in (clients, locks):
            if driver is not None:
                stack.enter_context(patch.object(module, "Driver", driver))
        if wakeup is not None:
            stack.enter_context(patch.object(clients, "ReleaseSubscriber", wakeup))
        # An app whose broker is no Redis needs no setting to be tested.
        stack.enter_context(patch.object(default_node, "_broker", lambda _app: "redis://127.0.0.1"))
        stack.enter_context(patch.object(LockClient, "start_afresh", start))
        for client in list(clients.instances):
            before[client] = dict(vars(client))
            start(client)
        try:
            yield lambda: list(before)
        finally:
            for client in before:
                client.close()
    for app, redlock in list(locks.of_app.items()):
        if redlock not in known:
            del locks.of_app[app]  # made for a test: the next may have other settings
    for client, state in before.items():
        vars(client).update(state)
        if "driver" not in state:
            client.start_afresh()


_counting = threading.Lock()


@contextmanager
def redlock_disabled() -> Iterator[None]:
    """Let no task of this process take a lock or a reservation while the block runs.

    As if each app had `redlock_enabled = False`. A `with redlock.lock(...)` block locks all the
    same; and a worker in another process needs the setting.
    """
    with _counting:
        settings.switched_off += 1
    try:
        yield
    finally:
        with _counting:
            settings.switched_off -= 1
