"""Fixtures of the tests of a lock over real nodes."""

from __future__ import annotations

from tests.support.locks import lock, lock_over, never_by_itself  # noqa: F401
