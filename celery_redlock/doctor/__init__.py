"""What is wrong with a site: its nodes, its settings, its tasks, its workers.

Each check is a small function that returns findings: what, where, and what to do about it. What
could not be looked at is a finding as well, never a silent "ok". All that waits for something waits
at the same time, so a node in distress costs a few seconds, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ConfigurationError
from .nodes import examine_nodes
from .probe import probe
from .report import CHECKS, NEED_APP, OF_APPS, Finding, Report, merged

if TYPE_CHECKING:
    from ..locking.redlock import Redlock
    from ..survey.models import NodeLook

__all__ = ["CHECKS", "Finding", "Report", "examine"]


def examine(redlock: Redlock | ConfigurationError, app: Any, timeout: float = 2.0) -> Report:
    """Look at everything.

    Args:
        redlock: The lock over its nodes; or why there is none.
        app: The Celery app; None leaves its checks out.
        timeout: Seconds to wait for a node, and for the workers.
    """
    from .keys import examine_keys

    jobs: list[Any] = []
    looks: list[NodeLook] = []
    with ThreadPoolExecutor(3, thread_name_prefix="celery_redlock doctor") as pool:
        if not isinstance(redlock, ConfigurationError):
            jobs.append(pool.submit(lambda: list(_nodes(redlock, app, timeout, looks))))
            jobs.append(pool.submit(lambda: list(examine_keys(redlock, timeout))))
        if app is not None:
            from .tasks import examine_tasks
            from .workers import examine_workers

            jobs.append(pool.submit(lambda: list(examine_tasks(app))))
            jobs.append(pool.submit(lambda: list(examine_workers(app, timeout))))
    findings = [finding for job in jobs for finding in job.result()]
    if isinstance(redlock, ConfigurationError):
        findings.append(_broken(redlock))
        left = [check for check in CHECKS if check != "configuration" and check not in OF_APPS]
        return Report(merged(findings), (*left, *(() if app is not None else OF_APPS)))
    return Report(merged(findings), () if app is not None else NEED_APP, tuple(looks))


def _nodes(redlock: Redlock, app: Any, timeout: float, looks: list[NodeLook]) -> Iterator[Finding]:
    ttls: Sequence[float] = ()
    guard = None
    if app is not None:
        from .tasks import ttls_of
        from .votes import guard_of

        guard = guard_of(app, len(redlock.nodes))
        ttls = ttls_of(app)
    probes = probe(redlock.client.addresses, redlock.prefix, timeout)
    looks += [one.look for one in probes]
    yield from examine_nodes(probes, redlock.prefix, ttls, guard)


def _broken(error: ConfigurationError) -> Finding:
    return Finding("wrong", "configuration", "settings", str(error), "change what it names")
