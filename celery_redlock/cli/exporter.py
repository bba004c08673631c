"""`celery redlock exporter`: gauges for Prometheus, of what lies on the nodes."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from .site import PROBLEM, SECONDS, Site, listen_option, on_site

__all__ = ["command"]


@click.command("exporter")
@listen_option(9467, "Where Prometheus asks, at /metrics. Whoever can reach it can read it.")
@click.option(
    "--cache",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds for which a look at the nodes is good, at least.",
)
@click.option(
    "--timeout",
    type=SECONDS,
    default=3.0,
    show_default=True,
    help="Seconds after which a node that has not told all is down.",
)
@click.option("--once", is_flag=True, help="Print the metrics once, and end. --json does so too.")
@on_site
def command(
    site: Site, listen: tuple[str, int], cache: float, timeout: float, once: bool
) -> int | None:
    """Gauges for Prometheus: held locks, waiting tasks, nodes, keys without a ttl.

    A node that is down is a value, not a failure, and so is a missing quorum: the exit code of
    --once is 0 all the same.
    """
    from ..exporter import exposition, figures, make_registry

    registry = make_registry(site.redlock, cache=cache, timeout=timeout)
    if once or site.as_json:
        site.say(figures(registry) if site.as_json else None, lambda: exposition(registry).rstrip())
        return None
    return _serve(registry, *listen)


def _serve(registry: Any, host: str, port: int) -> int | None:
    from prometheus_client import start_http_server

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_signal: ended.set())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        click.echo(f"cannot listen on {host}:{port}: {error.strerror or error}", err=True)
        return PROBLEM
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"metrics on http://{shown}:{server.server_port}/metrics", err=True)
    ended.wait()
    server.shutdown()
    server.server_close()
    thread.join()
    return None
