"""A wrong argument is refused when it is given, not when it would first matter."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock import ConfigurationError
from tests.support.names import Locks, Servers


@pytest.mark.parametrize(
    "wrong",
    [{"wait": "x"}, {"wait": -1}, {"max_lifetime": "y"}, {"on_lost": "raise"}, {"ttl": 0},
     {"owner": "me"}],
    ids=str,
)  # fmt: skip
def test_invalid_argument_of_lock_is_refused_at_once(
    servers: Servers, lock_over: Locks, wrong: dict[str, Any]
) -> None:
    redlock = lock_over(servers)
    (name,) = wrong
    with pytest.raises(ConfigurationError, match=name), redlock.lock("r", **wrong):
        pass
    assert redlock.holder("r") is None


@pytest.mark.parametrize("resource", ["", None, 5, b"r"])
def test_invalid_argument_of_acquire_extend_or_release_is_refused_at_once(
    servers: Servers, lock_over: Locks, resource: Any
) -> None:
    redlock = lock_over(servers)
    with pytest.raises(ConfigurationError, match="a resource is a name"):
        redlock.acquire(resource)
    with pytest.raises(ConfigurationError, match="wait"):
        redlock.acquire("r", wait=True)
    for method in (redlock.extend, redlock.release):
        with pytest.raises(ConfigurationError, match="not a Lease"):
            method(resource)
