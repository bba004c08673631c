"""`celery_redlock.contrib.django`: the tables by a real project's `manage.py migrate`, and back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from celery_redlock import Redlock
from celery_redlock.contrib.django import migrations
from celery_redlock.stores.postgresql import schema
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import forked
from tests.support.postgres_sites import execute, new_database

pytest.importorskip("django")

ROOT = Path(__file__).parents[3]
SETTINGS = """\
import os
SECRET_KEY = "for tests"
INSTALLED_APPS = ["celery_redlock.contrib.django"]
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql", "USER": "postgres", "HOST": "127.0.0.1",
        "PORT": os.environ["TEST_PORT"], "NAME": os.environ["TEST_NAME"],
    },
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": "other.sqlite3"},
}
"""
OURS = """\
SELECT (SELECT count(*) FROM pg_class WHERE relname LIKE 'redlock%' AND relkind = 'r')
    + (SELECT count(*) FROM pg_proc WHERE proname LIKE 'redlock%')"""


def manage(path: Path, url: str, *arguments: str) -> str:
    """`python manage.py ...` in a project whose database that is."""
    where, _, name = url.rpartition("/")
    (path / "project_settings.py").write_text(SETTINGS)
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "project_settings",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}",
        "TEST_NAME": name,
        "TEST_PORT": where.rpartition(":")[2],
    }
    code, said = forked.run("-m", "django", *arguments, cwd=path, env=environment)
    assert code == 0, said
    return said


def works(url: str) -> None:
    lock = Redlock([url])
    try:
        with lock.lock("order:1", fencing=True) as lease:
            assert lease.fencing_token
    finally:
        lock.close()


def test_django_migration_creates_the_tables_and_can_be_reversed(
    database_server: LocalPostgres, tmp_path: Path
) -> None:
    url = new_database(database_server, tables=False)
    assert "CREATE TABLE IF NOT EXISTS redlock_lease" in manage(
        tmp_path, url, "sqlmigrate", "celery_redlock", "0001"
    )
    assert "celery_redlock.0001_tables... OK" in manage(tmp_path, url, "migrate")
    works(url)
    assert "No migrations to apply" in manage(tmp_path, url, "migrate")
    # It has no models that could have changed without a migration.
    assert "No changes detected" in manage(tmp_path, url, "makemigrations", "--check", "--dry-run")
    manage(tmp_path, url, "migrate", "celery_redlock", "zero")
    assert execute(url, OURS) == [(0,)]
    manage(tmp_path, url, "migrate")
    works(url)


def test_django_migration_leaves_a_database_of_another_kind_alone(
    database_server: LocalPostgres, tmp_path: Path
) -> None:
    url = new_database(database_server, tables=False)
    assert "0001_tables... OK" in manage(tmp_path, url, "migrate", "--database", "other")
    manage(tmp_path, url, "migrate", "celery_redlock", "zero", "--database", "other")
    assert execute(url, OURS) == [(0,)]


def test_each_version_of_the_tables_has_its_django_migration() -> None:
    there = list(Path(str(migrations.__file__)).parent.glob("0*.py"))
    assert len(there) == schema.VERSION
