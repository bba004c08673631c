"""Fixtures of the tests of decisions, over a fake lock."""

from __future__ import annotations

from tests.support.delivering import app, box, charge, redlock, sent, waits  # noqa: F401
