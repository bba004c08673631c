"""Other libraries' interfaces over `SingletonTask`: changing an import moves a project over.

A module each: `once` for celery-once, `singleton` for celery-singleton. What they do differently,
and how to leave them behind, is in docs/migrating.md.
"""

from __future__ import annotations

from celery_redlock.config.checks import DAY

__all__ = ["FOR_EVER"]

FOR_EVER = DAY
"""Seconds in place of "never expires": a reservation whose message was purged ends some day."""
