"""Fixtures of the unit tests."""

from __future__ import annotations

from tests.support.delivering import app, box, busy, charge, ran, redlock, sent, waits

__all__ = ["app", "box", "busy", "charge", "ran", "redlock", "sent", "waits"]
