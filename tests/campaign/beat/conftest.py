"""Servers and sites of the tests of running beats."""

from __future__ import annotations

from tests.promises.beat.conftest import server, servers, site  # noqa: F401
