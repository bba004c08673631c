"""PostgreSQL as a kind of store."""

from __future__ import annotations

from ..contract import Can, Kind

__all__ = ["KIND"]

KIND = Kind(
    name="PostgreSQL",
    can=Can(fencing="proposed", queues=True, keeps=True),
    parse="celery_redlock.stores.postgresql.address:parse",
    node="celery_redlock.stores.postgresql.node:PostgresNode",
    reader="celery_redlock.stores.postgresql.reader:PostgresReader",
    subscription="celery_redlock.stores.postgresql.subscription:PostgresSubscription",
    forgets="was a standby promoted or a backup restored, were rows deleted",
    extra="postgresql",
    many="databases",
    together="The hosts of one cluster stand in it together: postgresql://one,two/db",
    verify="add ?sslmode=verify-full&sslrootcert=PATH to its URL",
    doctor="celery_redlock.doctor.postgresql",
)
