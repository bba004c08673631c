"""`redlock migrate`: create or update the tables and functions for locks in PostgreSQL."""

from __future__ import annotations

from typing import Any, cast

import click

from ..protocol.errors import NodeError
from ..stores.postgresql.schema import VERSION, migrate
from .context import NO_QUORUM, PROBLEM, REFUSED, Site, on_site
from .sql import NOT_NEEDED

__all__ = ["command"]


@click.command("migrate")
@on_site
def command(site: Site) -> int:
    """Make the tables and functions that locks in PostgreSQL need.

    It also brings them up to date. It may be run again, by several at once, and while workers run:
    each deployment may begin with it. Held locks stay held. `redlock sql` prints the statements.

    The database's user needs the right to create them, which the workers' user does not: name it in
    the URL of --nodes, and give the workers' user its rights (docs/postgresql.md).

    Exit code 0: they exist, or are not needed; 1: the database refused; 3: it did not answer, or
    another transaction kept a needed lock for 20 s; 4: they are of a newer version, and unchanged.
    """
    (address, *_) = site.redlock.client.addresses
    if address.store != "PostgreSQL":
        site.say({"outcome": "not needed"}, f"nothing to do: {NOT_NEEDED}")
        return 0
    from ..stores.postgresql.address import reason

    try:
        there = migrate(cast(Any, address))
    except NodeError as error:
        return site.fail(f"{address.name}: {error}", NO_QUORUM)
    except Exception as error:
        if (state := getattr(error, "sqlstate", "")) == "55P03":
            why = "another transaction keeps a lock that this needs (look into pg_locks)"
            return site.fail(f"{address.name}: nothing was done: {why}", NO_QUORUM)
        hint = "; a user who may create tables is to be named in its URL"
        denied = hint if state == "42501" else ""
        return site.fail(f"{address.name}: nothing was done: {reason(error)}{denied}", PROBLEM)
    if there is not None and there > VERSION:
        return site.fail(
            f"{address.name}: its tables are of version {there}, newer than this library's"
            f" ({VERSION}); nothing was done",
            REFUSED,
        )
    outcome, said = "unchanged", f"the tables are there, of version {VERSION}; nothing has changed"
    if there is None:
        outcome, said = "made", f"the tables and functions are made, of version {VERSION}"
    elif there < VERSION:
        outcome, said = "updated", f"brought from version {there} to version {VERSION}"
    data = {"outcome": outcome, "node": address.name, "was": there, "version": VERSION}
    site.say(data, f"{address.name}: {said}")
    return 0
