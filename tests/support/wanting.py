"""What a machine may lack, for which tests are skipped: one line at the end says how to get it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

import pytest

from celery_redlock.protocol.errors import ConfigurationError

PACKAGES = {
    "redis-server": ("redis-server",),
    "rabbitmq-server": ("rabbitmq-server",),
    "spin": ("spin",),
    "gcc": ("gcc", "libc6-dev"),
    "chromedriver": ("chromium", "chromium-driver"),
    "pgbouncer": ("pgbouncer",),
    "etcd": ("etcd-server",),
    "promtool": ("prometheus",),
}
"""Programs, and the Debian packages that have them."""


def advice() -> str:
    """That line; empty where nothing is missing."""
    missing = [name for name in PACKAGES if not present(name)]
    if not missing:
        return ""
    packages = " ".join(package for name in missing for package in PACKAGES[name])
    return (
        f"not on this machine: {', '.join(missing)}. Their tests are skipped; all of them run after"
        f" apt install --no-install-recommends {packages}"
    )


def present(name: str) -> bool:
    """Whether there is such a program; an administrator's too, which are on no user's path."""
    return shutil.which(name) is not None or shutil.which(name, path="/usr/sbin:/sbin") is not None


@functools.cache
def missing(find: Callable[[], object]) -> str:
    """Why there can be no server here of the kind that this finds; empty where there can."""
    try:
        find()
    except ConfigurationError as error:
        return str(error)
    return ""


def require(find: Callable[[], object]) -> None:
    """Skip the test where there can be no such server."""
    if missing(find):
        pytest.skip(missing(find))
