"""Fixtures of the tests of tasks over fake nodes."""

from __future__ import annotations

from tests.promises.beat.beat_world import any_kind  # noqa: F401
from tests.support.delivering import app, box, busy, charge, ran, redlock, sent, waits  # noqa: F401
