"""Make the tables and functions in a PostgreSQL database; do nothing in any other."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from celery_redlock.stores.postgresql.schema import DROP, ddl


class OnPostgreSQL(migrations.RunSQL):  # type: ignore[misc]
    """SQL for PostgreSQL; a project's other databases, and those of its tests, have no locks."""

    def database_forwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_forwards(app_label, schema_editor, *states)

    def database_backwards(self, app_label: str, schema_editor: Any, *states: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_backwards(app_label, schema_editor, *states)


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 1. The tables may already exist, made by `celery redlock migrate`."""

    initial = True
    operations = (OnPostgreSQL(ddl(), DROP),)
