"""Fixtures of the unit tests."""

from __future__ import annotations

from tests.support.delivering import app, box, busy, charge, ran, redlock, sent, waits  # noqa: F401
from tests.support.peer_world import world  # noqa: F401
from tests.unit.beat_world import any_flow, any_kind  # noqa: F401
