"""`redlock exporter`: Prometheus gauges of the locks on the nodes."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
from collections.abc import Sequence
from typing import Any

import click

from .context import WORKERS_TIMEOUT_S, Site, listen_option, on_site, timeout_option

__all__ = ["command", "guarded"]


@click.command("exporter")
@listen_option(9467, "Where to serve /metrics. Anyone who can reach it can read it.")
@click.option(
    "--cache",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Minimum seconds for which one survey of the nodes is shown again.",
)
@timeout_option(help="Seconds after which a node without a complete answer counts as down.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Answer under this host name, too: prom.example.org, or .example.org for all below it;"
    " repeat it for more. Addresses, and names without a dot, are always answered.",
)
@click.option("--once", is_flag=True, help="Print the metrics once, and end; so does --json.")
@on_site
def command(
    site: Site, *, listen: tuple[str, int], cache: float, timeout: float, hosts: Any, once: bool
) -> None:
    """Export gauges for Prometheus.

    They show held locks, waiting tasks (with an app), nodes, and keys without a ttl.

    A node that is down is a value, not a failure, and so is a missing quorum: the exit code of
    --once is 0 all the same.
    """
    from ..doctor.votes import ask, votes_in
    from ..doctor.workers import waiting
    from ..survey.exporter import exposition, figures, make_registry

    redlock = site.redlock
    registry = make_registry(
        redlock,
        cache=cache,
        timeout=timeout,
        parked=(lambda: waiting(site.app, WORKERS_TIMEOUT_S)[1]) if site.app is not None else None,
        votes_in=lambda: votes_in(ask(redlock, timeout), redlock.client.addresses, site.app),
        runbook=site.page("runbook"),
    )
    if site.as_json:
        site.say(figures(registry), "")
        return
    if once:
        click.echo(exposition(registry).rstrip())
        return
    from prometheus_client import make_wsgi_app

    from ..web.serve import serve

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app = guarded(make_wsgi_app(registry), [listen[0], *hosts])
    serve(app, *listen, lambda url: click.echo(f"metrics on {url}metrics", err=True))


def guarded(app: Any, hosts: Sequence[str]) -> Any:
    """Return a WSGI app that answers only under host names that no foreign web site can have.

    Otherwise a site could point its own name at this server (DNS rebinding) and read the metrics
    through its visitors' browsers.

    Args:
        app: The app to guard.
        hosts: Names to allow besides addresses and names without a dot.
    """
    from ..web.serve import host_in, is_known

    known = [host.lower() for host in (*hosts, socket.gethostname())]

    def answer(environ: dict[str, Any], start: Any) -> Any:
        name = host_in(environ.get("HTTP_HOST", ""))
        local = bool(name) and ("." not in name or _is_address(name))
        if local or is_known(name, known):
            return app(environ, start)
        start("400 Bad Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"The exporter is not asked under that host name: --host NAME allows it.\n"]

    return answer


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name.strip("[]")))
    return False
