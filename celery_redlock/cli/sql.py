"""`redlock sql`: print the SQL for locks in PostgreSQL."""

from __future__ import annotations

import click

from ..protocol.errors import ConfigurationError
from ..stores.postgresql.schema import ddl
from .context import Site, on_site

__all__ = ["NOT_NEEDED", "command"]

NOT_NEEDED = "locks are not kept in PostgreSQL here, and nothing else needs tables"


@click.command("sql")
@on_site
def command(site: Site) -> None:
    """Print the SQL that locks in PostgreSQL need.

    The SQL makes their tables and functions, and may be run again: redlock sql | psql DATABASE, as
    a user who may create them. `redlock migrate` does the same by itself.
    """
    if not site.as_json and _needs_none(site):
        click.echo(f"note: {NOT_NEEDED}", err=True)
    site.say({"sql": ddl()}, ddl().rstrip())


def _needs_none(site: Site) -> bool:
    try:
        return site.redlock.client.addresses[0].store != "PostgreSQL"
    except (ConfigurationError, click.UsageError):
        return False  # the SQL may be wanted before any node is configured
