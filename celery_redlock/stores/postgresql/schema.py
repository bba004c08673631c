"""The tables and functions of a PostgreSQL database: their DDL, and how it is applied.

Imports no client: who only prints it, and Django, which has its own, need none of ours.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .address import PostgresAddress

__all__ = ["DROP", "VERSION", "ddl", "migrate"]

VERSION = 1
"""Of `schema.sql`."""
DROP = """\
DO $$ DECLARE one regprocedure; BEGIN
    FOR one IN SELECT p.oid FROM pg_proc p JOIN pg_class c ON c.relnamespace = p.pronamespace
               WHERE c.oid = 'redlock_lease'::regclass AND starts_with(p.proname::text, 'redlock_')
    LOOP EXECUTE 'DROP FUNCTION ' || one; END LOOP;
END $$;
DROP TABLE redlock_lease, redlock_waiter, redlock_memory;
"""
"""Takes all of it away again, and with it every lock."""
_VERSION_THERE = "SELECT to_regprocedure('redlock_version()') IS NOT NULL"
_ALONE = "SELECT pg_advisory_xact_lock(hashtext('redlock_version'))"


def ddl() -> str:
    """Return the statements that make the tables and functions, or bring them up to date."""
    return (files(__package__) / "schema.sql").read_text("utf-8")


def migrate(address: PostgresAddress) -> int | None:
    """Make the tables and functions of a database, or bring them up to date.

    All or nothing, and one at a time: who comes second finds them made. What is of a newer version
    is left alone.

    Returns:
        Which version was there; None if there was none.

    Raises:
        NodeError: It cannot be reached.
        psycopg.Error: It refuses; nothing was changed.
    """
    with address.connect() as connection, connection.transaction():
        connection.execute(_ALONE)
        there = None
        if (connection.execute(_VERSION_THERE).fetchone() or (False,))[0]:
            (there,) = connection.execute("SELECT redlock_version()").fetchone() or (0,)
        if there is None or there <= VERSION:
            connection.execute(ddl().encode())
        return there
