"""Find faults of a site: its nodes, its settings, its tasks, its workers.

Each check is a small function that returns findings: the fault, its place, and the remedy. A check
that could not be made is a finding as well, never a silent "ok". All that waits for answers waits
at the same time, so a node in distress costs a few seconds, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ConfigurationError
from ..survey.waiting import at_once
from .keys import examine_keys
from .nodes import examine_nodes
from .probe import checks_of, probe
from .report import (
    APP_CHECKS,
    CHECKS,
    NEED_APP,
    Finding,
    Report,
    broken,
    merged,
)
from .reservations import examine_reservations
from .tasks import examine_tasks, ttls_of
from .votes import guard_of
from .workers import examine_workers

if TYPE_CHECKING:
    from ..locking.redlock import Redlock
    from ..survey.models import NodeLook

__all__ = ["CHECKS", "Finding", "Report", "examine"]


def examine(
    redlock: Redlock | ConfigurationError,
    app: Any,
    timeout: float = 2.0,
    unmade: ConfigurationError | None = None,
) -> Report:
    """Make all checks.

    Args:
        redlock: The lock over the nodes; or the error, if there is none.
        app: The Celery app; None leaves its checks out.
        timeout: Seconds to wait for a node, and for the workers.
        unmade: The error because of which some of the app's tasks are missing; the rest is checked.
    """
    findings: list[Finding] = [] if unmade is None else [broken("tasks", unmade)]
    skipped: Sequence[str] = () if app is not None else NEED_APP
    looks: list[NodeLook] = []
    checks: tuple[str, ...] = CHECKS

    def nodes(redlock: Redlock) -> Iterable[Finding]:
        probes = probe(redlock.client.addresses, redlock.prefix, timeout)
        looks.extend(one.look for one in probes)
        ttls = ttls_of(app) if app is not None else ()
        guard = guard_of(app, redlock.client.addresses)
        return examine_nodes(probes, redlock.prefix, ttls, guard)

    jobs: list[Callable[[], list[Finding]]] = []
    if isinstance(redlock, ConfigurationError):
        findings.append(broken("settings", redlock))
        of_nodes = [one for one in CHECKS if one not in ("configuration", *APP_CHECKS)]
        skipped = (*of_nodes, *(() if app is not None else APP_CHECKS))
    else:
        lock = redlock
        kind = lock.client.kind
        checks = CHECKS if kind.can.quorum else checks_of(kind).CHECKS
        jobs += [lambda: list(nodes(lock)), lambda: list(examine_keys(lock, timeout))]
        if app is not None:
            jobs.append(lambda: list(examine_reservations(lock, app, timeout)))
    if app is not None:
        jobs += [lambda: list(examine_tasks(app)), lambda: list(examine_workers(app, timeout))]
    for found in at_once(*jobs):
        findings += found
    away = {look.name for look in looks if not look.reachable}
    # If a node does not answer, its keys cannot be read either: that needs no finding of its own.
    findings = [one for one in findings if one.check != "leaks" or one.where not in away]
    return Report(merged(findings), tuple(skipped), tuple(looks), checks)
