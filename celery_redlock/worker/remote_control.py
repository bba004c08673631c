"""`celery inspect redlock`: the locks that a worker holds and waits for, from its own memory.

No node is asked, so it answers at once, also while the nodes are away. In a prefork worker the
children hold the locks: its main process reads their records in the shared table
(`shared_table.py`). In other pools the bodies run in the process that answers. A delivery that
waits is parked (`consumer.py`), or in a slot without a lock.

Every `celery` command imports this module (`cli/__init__.py`), so modules that only a worker needs
are imported inside functions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.texts import event

if TYPE_CHECKING:
    from ..locking.redlock import Redlock
    from .parking.consumer import Parking

__all__ = ["NAME", "digest_of", "register", "settings_of", "tasks_of"]

logger = logging.getLogger("celery_redlock.worker")

NAME = "redlock"
"""Name of the command."""


def register() -> None:
    """Register the command if this process runs a worker or asks workers.

    Both have imported Celery's own commands; a process that only publishes has not, and need not.
    Also make Celery hide the nodes' passwords: `celery inspect conf`, `celery report` and so Flower
    hide settings by words in their names, such as "password", and `redlock_nodes` has none. Neither
    has celery-once's setting, whose URL may be a node's, nor a broker's URL under the name that a
    namespace gives it, such as CELERY_BROKER_URL: under its own name Celery hides the password.
    """
    utils: Any = sys.modules.get("celery.app.utils")
    hidden = getattr(utils, "HIDDEN_SETTINGS", None)
    if hidden is not None and not hidden.search("redlock_nodes"):
        ours = "REDLOCK_NODES|^URL$|.BROKER_(READ_|WRITE_)?URL"
        utils.HIDDEN_SETTINGS = re.compile(f"{hidden.pattern}|{ours}", hidden.flags)
    control: Any = sys.modules.get("celery.worker.control")
    if control is not None and NAME not in control.Panel.data:
        control.inspect_command(name=NAME)(redlock)
        control.control_command(name="redlock_end", visible=False)(end)  # `revokes.END`


def redlock(state: Any, **_arguments: Any) -> dict[str, Any]:
    """Locks that the worker's tasks hold and wait for (celery_redlock)."""
    from ..config.settings import enabled
    from ..locking.redlock import Redlock
    from ..protocol.errors import ConfigurationError

    app = state.app
    try:
        settings = settings_of(app)
        lock = Redlock.from_app(app) if enabled(app.conf) else None
        holds = list(_holds(lock)) if lock is not None else []
    except ConfigurationError as error:
        return {"error": str(error)}
    return {
        "nodes": settings["nodes"],
        "unusable": _unusable(lock) if lock is not None else {},
        "settings_digest": digest_of(settings),
        "settings": settings,
        "tasks": tasks_of(app),
        "holds": holds,
        "waits": list(_waits(state.consumer, holds)) if lock is not None else [],
        "queued": _queued(state.consumer) if lock is not None else [],
        "pool": _pool(state.consumer),
    }


def end(state: Any, task_id: str = "", digest: str = "", terminate: bool = False, **_: Any) -> None:
    """Discard the message whose reservation had a token, or terminate the body that holds it."""
    from celery.worker import state as worker

    from ..config.settings import enabled
    from ..locking.redlock import Redlock
    from ..messages.headers import short_id
    from ..messages.received import discard
    from ..protocol.texts import printable
    from ..protocol.values import token_digest

    if not terminate:
        discard(digest)
        return
    if not enabled(state.app.conf):
        return
    client = Redlock.from_app(state.app).client
    held: list[tuple[int, Any]] = [(os.getpid(), claim) for claim in list(client.claims.values())]
    if (table := client.registry.table) is not None:
        held += [(pid, note) for block, pid in table.blocks() for note in table.records(block)]
    for pid, holding in held:
        if token_digest(holding.token) == digest:
            found = [
                request
                for request in list(worker.reserved_requests)
                if short_id(request.id) == task_id
                and (pid == os.getpid() or request.worker_pid in (None, pid))
            ]
            if len(found) > 1:  # two tasks may have been given the same id
                found = [one for one in found if {*_wanted(one)} == {*holding.resources}]
            for request in found:
                name = printable(f"{request.name}[{request.id}]")
                logger.info(
                    "Terminating %s: another task replaces it", name, extra=event("task_terminated")
                )
                request.terminate(state.consumer.pool)
            return


def _unusable(redlock: Redlock) -> dict[str, str]:
    """Return the nodes that this process cannot use at the moment, each with the reason."""
    nodes = redlock.client.driver.nodes
    whys = {node.name: node.misfit or node.channel.down for node in nodes}
    return {name: why for name, why in whys.items() if why}


def _holds(redlock: Redlock) -> Iterator[dict[str, Any]]:
    """Return the locks that bodies of this worker hold; without reservations."""
    from ..protocol.claim import Claim
    from ..protocol.names import RESERVED_SUFFIX, base_of
    from ..protocol.texts import shown
    from ..protocol.values import Owner
    from ..runtime.clock import monotonic

    now, wall = monotonic(), time.time()
    found: dict[str, tuple[Sequence[str], float, int | None]] = {}
    # A copy, because other threads acquire and release locks meanwhile.
    for claim in list(redlock.client.claims.values()):
        if claim.granted_at is not None and not claim.ended and claim.lost is None:
            found[claim.token] = (claim.resources, claim.deadline, claim.fencing_token)
    if (table := redlock.client.registry.table) is not None:
        records = (note for block, _pid in table.blocks() for note in table.records(block))
        for note in (note for note in records if note.held):  # of whichever process
            claim = Claim(note.resources, note.token, note.ttl, len(redlock.nodes))
            claim.learn(note.expiries)
            claim.learn(note.kept)
            found[note.token] = (note.resources, claim.deadline, note.fence or None)
    for token, (resources, deadline, fence) in found.items():
        if deadline > now and not resources[0].endswith(RESERVED_SUFFIX):
            owner = Owner.of(token)
            yield {
                "resource": shown([base_of(name) for name in resources]),
                "task": owner.task if owner else "",
                "task_id": owner.task_id if owner else "",
                "pid": owner.pid if owner else 0,
                "stopped": owner is not None and _is_stopped(owner.pid),
                "held_for": round(max(0.0, wall - owner.since), 3) if owner else None,
                "remaining": round(deadline - now, 3),
                "fencing_token": fence,
            }


def _is_stopped(pid: int) -> bool:
    """Return True if a process was stopped by a signal; False also where /proc does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _waits(consumer: Any, holds: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    from celery.worker import state

    from ..messages.headers import attempts_of, short_id
    from ..protocol.names import START_SUFFIX, plain
    from ..protocol.texts import shown
    from ..runtime.clock import monotonic

    waiting: dict[str, tuple[Any, Sequence[str], float, str]] = {}
    now = time.time()
    holding = {hold["task_id"] for hold in holds}
    # In the order in which deliveries move on, so that none is missed.
    parking = _parking(consumer)
    if parking is not None:
        for parked in parking.admission.parked():
            waiting[parked.request.id] = (parked.request, parked.resources, parked.since, "parked")
        for request, resources in parking.admission.running():
            attempts = attempts_of(request.request_dict)
            # Given to the pool, which has no slot for it yet.
            if attempts.get("parked") and request.time_start is None:
                waiting.setdefault(request.id, (request, resources, attempts["since"], "parked"))
    for request in list(state.active_requests):
        if short_id(request.id) not in holding and request.id not in waiting:
            waiting[request.id] = (request, _wanted(request), request.time_start or now, "slot")
    holders = {hold["resource"]: f"{hold['task']} {hold['task_id']}".strip() for hold in holds}
    for request, wanted, since, where in waiting.values():
        if not wanted:
            continue
        next_in = None
        if parking is not None and wanted[0].endswith(START_SUFFIX):
            watched = parking.dispatcher.watched.get(tuple(wanted))
            if watched is not None and watched.next_at is not None:
                next_in = round(max(0.0, watched.next_at - monotonic()), 3)
            wanted = [plain(name) for name in wanted]
        resource = shown(wanted)
        yield {
            "resource": resource,
            "resources": wanted,
            "next_in": next_in,
            "task": request.name,
            "task_id": request.id,
            "waited": round(max(0.0, now - since), 3),
            "holder": holders.get(resource),
            "where": where,
        }


def _queued(consumer: Any) -> list[str]:
    """Return the resources in whose queues on the nodes this worker stands, for its parked ones."""
    parking = _parking(consumer)
    return parking.dispatcher.queued() if parking is not None else []


def _pool(consumer: Any) -> dict[str, Any]:
    """Return how many slots the pool has and how many are busy, and the queues that it serves."""
    from celery.worker import state

    from .parking.prefetch import size_of_pool

    return {
        "slots": size_of_pool(consumer.pool),
        "busy": len(state.active_requests),
        "queues": sorted(consumer.app.amqp.queues.consume_from),
    }


def _parking(consumer: Any) -> Parking | None:
    from .parking.consumer import Parking

    parking = getattr(consumer, "on_task_request", None)
    return parking if isinstance(parking, Parking) else None


def _wanted(request: Any) -> Sequence[str]:
    """Return the resources that a delivery in a slot has to lock; empty for none."""
    from ..config.task_lock import lock_of, resources_of
    from ..messages.headers import header_of

    headers = functools.partial(header_of, request.request_dict)
    try:
        lock = lock_of(request.task)
        options = lock.options(request.app) if lock is not None else None
        # A task that needs no lock while it runs counts as being at work.
        if lock is None or options is None or options.rate or options.scope == "until_executing":
            return ()
        return resources_of(request.task, request.args, request.kwargs, headers)
    except Exception:
        return ()  # the arguments do not fit: the body's process reports that


# -- Settings ------------------------------------------------------------------------------------


def settings_of(app: Any) -> dict[str, Any]:
    """Return an app's settings, without secrets: nodes by address and database.

    Raises:
        ConfigurationError: A setting is invalid.
    """
    from ..config.settings import read_settings
    from ..stores.kinds import identity, parse_nodes

    settings = read_settings(app)
    nodes = [identity(one) for one in (parse_nodes(settings.nodes) if settings.nodes else ())]
    return {**vars(settings), "nodes": nodes}


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return a short digest of some settings; the order of the nodes makes no difference."""
    ordered = {**settings, "nodes": sorted(settings["nodes"])}
    return _digest(json.dumps(ordered, sort_keys=True))


def tasks_of(app: Any) -> dict[str, str]:
    """Return a digest of each locked task's declaration: all its workers must agree on it."""
    from ..config.task_lock import lock_of

    found = {}
    for name, task in sorted(app.tasks.items()):
        lock = lock_of(task)
        if lock is not None:
            how = [(each, _plain(value)) for each, value in sorted(lock.own.items())]
            found[name] = _digest(repr((how, list(inspect.signature(task.run).parameters))))
    return found


def _plain(value: Any) -> Any:
    """Return a value in a form that is the same in every process: without memory addresses."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return list(value)
    return getattr(value, "__qualname__", value) if callable(value) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
