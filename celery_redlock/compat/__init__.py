"""Other libraries' interfaces over `SingletonTask`: changing an import moves a project over.

A module each: `once` for celery-once, `singleton` for celery-singleton. What they do differently,
and how to leave them behind, is in docs/migrating.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from celery_redlock.options import DAY

__all__ = ["FOR_EVER", "template"]

FOR_EVER = DAY
"""Seconds in place of "never expires": a reservation whose message was purged ends some day."""


def template(task: str, names: Iterable[str]) -> str:
    """The key of a task and some of its arguments."""
    return "|".join([task.replace("<", "<<").replace("{", "{{"), *(f"<{name}>" for name in names)])
