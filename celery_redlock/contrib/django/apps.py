"""INSTALLED_APPS = [..., "celery_redlock.contrib.django"], and `manage.py migrate`."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["CeleryRedlockConfig"]


class CeleryRedlockConfig(AppConfig):  # type: ignore[misc]
    """A Django app without models, because only workers use its tables."""

    name = "celery_redlock.contrib.django"
    label = "celery_redlock"
    verbose_name = "Celery Redlock"
