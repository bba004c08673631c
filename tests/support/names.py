"""Short names for long types of many signatures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_redlock import Redlock
from celery_redlock.server import LocalServer

Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
Request = pytest.FixtureRequest
Servers = list[LocalServer]
Locks = Callable[..., Redlock]
