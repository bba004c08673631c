"""INSTALLED_APPS = [..., "celery_redlock.contrib.django"], and `manage.py migrate`."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["CeleryRedlockConfig"]


class CeleryRedlockConfig(AppConfig):  # type: ignore[misc]
    """Has no models: what is in the tables is for workers alone."""

    name = "celery_redlock.contrib.django"
    label = "celery_redlock"
    verbose_name = "Celery Redlock"
