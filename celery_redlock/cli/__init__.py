"""`celery -A app redlock ...` and `celery-redlock ...`: inspect, explain, free and measure locks.

The first takes the nodes from the app's settings; the second from `--nodes`, or from the app that
`-A` names. Each command is a module of this package, imported when it is called.
"""

from __future__ import annotations

import importlib
from typing import Any

import click
from click.core import ParameterSource

from ..worker import remote_control
from .nodes_options import nodes_options

__all__ = ["main", "redlock"]

COMMANDS = (
    *("bench", "demo", "doctor", "explain", "exporter", "limit", "ls", "migrate", "pause"),
    *("purge", "release", "resume", "show", "sql", "stats", "watch", "web"),
)
"""Each is the function `command` in the module of that name here; `demo` has its own package."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


# Celery loads this module for every `celery` command, before any module with tasks is imported;
# also for `celery inspect redlock`, which asks this process for the list of commands. So it must
# not import modules that take locks; the functions below do that.
remote_control.register()


class Commands(click.Group):
    """Commands that are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = "..demo.__main__" if name == "demo" else f".{name}"
        command: click.Command = importlib.import_module(module, __name__).command
        return command


@click.group(cls=Commands, context_settings=HELP_OPTIONS)
@click.pass_context
def redlock(ctx: click.Context, /, **_preloaded: Any) -> None:
    """See, explain, free and measure the locks of tasks."""
    from ..config.default_node import is_fallback
    from .context import Site

    # Celery's own command stores the app that it has found in the parent context; without -A that
    # is its default app, which has settings only if there is a module `celeryconfig`.
    app = getattr(ctx.obj, "app", None)
    if app is not None and is_fallback(app) and not app.conf.get("redlock_nodes"):
        app = None
    ctx.obj = Site(app=app)


@click.group(
    name="celery-redlock",
    cls=Commands,
    context_settings={**HELP_OPTIONS, "auto_envvar_prefix": "REDLOCK"},
)
@click.option("-A", "--app", "app", metavar="APP", help="The Celery app, as for celery -A.")
@nodes_options
@click.version_option(package_name="celery-redlock")
@click.pass_context
def main(
    ctx: click.Context, app: str | None, nodes: str | None, prefix: str | None, docs: str | None
) -> None:
    """See, explain, free and measure the locks of tasks."""
    from .context import BOTH, Site, load_app

    ctx.obj = site = Site()
    if app:
        if nodes and ctx.get_parameter_source("nodes") is not ParameterSource.ENVIRONMENT:
            raise click.UsageError(BOTH)
        nodes, site.app = None, load_app(app)
    site.set_nodes(nodes or None, prefix, docs)
