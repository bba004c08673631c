"""Replace the functions, so that they execute no functions that other users have created."""

from __future__ import annotations

from importlib import import_module

from django.db import migrations

from celery_redlock.stores.postgresql.schema import ddl

first = import_module(".0001_tables", __package__)


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 2."""

    dependencies = (("celery_redlock", "0001_tables"),)
    operations = (first.OnPostgreSQL(ddl(), migrations.RunSQL.noop),)
