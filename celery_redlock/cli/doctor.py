"""`redlock doctor`: find faults of nodes, settings, tasks and workers, with their remedies."""

from __future__ import annotations

import click

from ..locking.redlock import Redlock
from ..protocol.errors import ConfigurationError
from .context import PROBLEM, Site, on_site, timeout_option

__all__ = ["command"]


@click.command("doctor")
@click.option("--strict", is_flag=True, help="Count warnings as wrong, for the exit code.")
@timeout_option(2.0, "Seconds to wait for nodes, broker and workers.")
@on_site
def command(site: Site, strict: bool, timeout: float) -> int | None:
    """Find problems, and show how to solve them.

    It checks nodes, settings, tasks and workers; without an app, only the nodes.

    Exit code 1 if something is wrong. It writes keys with random names on the nodes, which expire
    within ten seconds.
    """
    from ..doctor import examine

    unmade: ConfigurationError | None = None
    lock: Redlock | ConfigurationError
    try:
        if site.app is not None:
            site.app.loader.import_default_modules()
            site.app.finalize()
    except ConfigurationError as error:
        unmade = error
    try:
        lock = site.redlock
    except ConfigurationError as error:
        lock = error
    report = examine(lock, site.app, timeout, unmade)
    site.say(report.data(strict), report.text())
    return PROBLEM if report.bad(strict) else None
