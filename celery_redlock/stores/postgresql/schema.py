"""The tables and functions of a PostgreSQL database: their DDL, and how it is applied.

Imports no client: neither printing the DDL nor Django, which has a client of its own, needs one.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .address import PostgresAddress

__all__ = ["DROP", "VERSION", "ddl", "migrate"]

VERSION = 2
"""Version of `schema.sql`."""
DROP = """\
DO $$ DECLARE one pg_catalog.regprocedure; BEGIN
    FOR one IN SELECT p.oid FROM pg_catalog.pg_proc p
               JOIN pg_catalog.pg_class c ON c.relnamespace = p.pronamespace
               WHERE c.oid = pg_catalog.to_regclass('redlock_lease')::pg_catalog.oid
               AND pg_catalog.starts_with(p.proname::pg_catalog.text, 'redlock_')
    LOOP EXECUTE pg_catalog.format('DROP FUNCTION %s', one); END LOOP;
END $$;
DROP TABLE redlock_lease, redlock_waiter, redlock_memory;
"""
"""Removes all of it, and with it every lock."""
# Its source is read, and it is not called: another role with the right to create functions may
# have made it.
_VERSION_THERE = """\
SELECT prosrc FROM pg_catalog.pg_proc
WHERE oid = pg_catalog.to_regprocedure('redlock_version()')::oid"""
PATIENCE = """\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '20s'"""
"""A limit, because any role that may connect can hold the lock that serialises migrations."""
_ALONE = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('redlock_version'))"


def ddl() -> str:
    """Return the statements that make the tables and functions, or bring them up to date."""
    return (files(__package__) / "schema.sql").read_text("utf-8")


def migrate(address: PostgresAddress) -> int | None:
    """Make the tables and functions of a database, or bring them up to date.

    All or nothing, and one at a time: the second of two callers finds them made. Objects of a newer
    version are left alone.

    Returns:
        The version that was there; None if there was none.

    Raises:
        NodeError: It cannot be reached.
        psycopg.Error: It refuses; nothing was changed.
    """
    with address.connect() as connection, connection.transaction():
        connection.execute(PATIENCE)
        connection.execute(_ALONE)
        (text,) = connection.execute(_VERSION_THERE).fetchone() or ("",)
        digits = re.search(r"\d+$", text)
        there = int(digits[0]) if digits else None
        if there is None or there <= VERSION:
            connection.execute(ddl().encode())
        return there
