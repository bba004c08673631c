"""Redirect the locks of this process to other nodes during a test, or switch them off.

Whatever nodes a project's settings name (perhaps those of production), its tests reach only the
nodes of the test: with an app's lock, with one that a module made at its import, and with locks
that are made later.
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
"""The attributes of a lock that determine its nodes; they are replaced for a test."""


@contextmanager
def redirected(
    addresses: tuple[Address, ...],
    driver: Callable[..., Any] | None = None,
    wakeup: Callable[..., Any] | None = None,
) -> Iterator[Callable[[], list[LockClient]]]:
    """Put all locks of this process on `addresses`, without a restart guard or an extender process.

    Drivers, and subscribers to releases, are made with `driver` and `wakeup` instead of the real
    classes. The block gets a function that returns the existing locks.
    """
    before: dict[LockClient, dict[str, Any]] = {}
    begin = LockClient.start_afresh

    def start(client: LockClient) -> None:
        """Replace `LockClient.start_afresh`, for a new lock and in the child of a fork."""
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
        # An app whose broker is not Redis can be tested without a setting.
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
            del locks.of_app[app]  # it was made for this test; the next may have other settings
    for client, state in before.items():
        vars(client).update(state)
        if "driver" not in state:
            client.start_afresh()


_counting = threading.Lock()


@contextmanager
def redlock_disabled() -> Iterator[None]:
    """Let no task of this process take a lock or a reservation while the block runs.

    It is as if each app had `redlock_enabled = False`. A `with redlock.lock(...)` block still
    locks; and a worker in another process needs the setting.
    """
    with _counting:
        settings.switched_off += 1
    try:
        yield
    finally:
        with _counting:
            settings.switched_off -= 1
