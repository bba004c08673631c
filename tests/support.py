"""What tests of every kind share, besides fixtures."""

from __future__ import annotations

import ctypes
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from celery_redlock import Redlock
from celery_redlock.server import LocalServer

T = TypeVar("T")

_SETTINGS = Path(__file__).parents[1] / "docs" / "settings.md"
_RULE = re.search(r"^ACL SETUSER redlock (on .*)$", _SETTINGS.read_text("utf-8"), re.M)
assert _RULE, "docs/settings.md has no ACL rule"
ACL_RULE = _RULE[1].split()
"""The rule in the docs, as the worker tests' nodes have it: see `with_acl_user`."""


TOKEN = re.compile(r"\|\d+\|[^|\s]*\|\d+\|[0-9a-f]{32}")
"""The end of a lease's token, nonce and all: what no log, error or event may show."""


def end_with_parent() -> None:
    """Called by a program that tests start: it is not to outlive a run that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def with_acl_user() -> list[str]:
    """The `config` of a server that knows the user of the docs' ACL rule."""
    return ["--user", "redlock", *ACL_RULE]


def lock_url(server: LocalServer, database: int = 0) -> str:
    """A server's URL for a lock: as that user, where it knows it."""
    if "--user" not in server._config:
        return server.url
    return f"redis://redlock:SECRET@127.0.0.1:{server.port}/{database}"


def all_connected(redlock: Redlock) -> Redlock:
    """Wait until all nodes are connected, not a quorum alone: what is locked then is on all."""
    redlock.connect()
    nodes = redlock.client.driver.nodes
    wait_until(lambda: all(node.channel.up for node in nodes), 30.0, "all nodes are connected")
    return redlock


def told_all(redlock: Redlock) -> None:
    """Wait until all nodes have done what they were asked: a lock is granted when a quorum has."""
    nodes = redlock.client.driver.nodes

    def answered() -> bool:
        redlock.holder("nothing")  # behind all that was asked before
        return not any(node.channel.unanswered for node in nodes)

    wait_until(answered, 30.0, "all nodes have done it")


def wait_until(
    predicate: Callable[[], T],
    timeout: float,
    what: str,
    *,
    every: float = 0.005,
    seen: Callable[[], object] | None = None,
) -> T:
    """Wait for a condition, never for a time.

    Args:
        predicate: Asked again and again until what it returns is true.
        timeout: Seconds after which the test fails.
        what: The condition in words, for the failure: "the worker is ready".
        every: Seconds between two questions.
        seen: What there is instead, for the failure; asked then only.

    Returns:
        What `predicate` returned at last.

    Raises:
        AssertionError: It did not become true in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline  # asked once more after the deadline: we may have slept
        result = predicate()
        if result:
            return result
        if late:
            instead = "" if seen is None else f"; {seen()}"
            raise AssertionError(
                f"not within {timeout} s: {what} (last answer: {result!r}){instead}"
            )
        time.sleep(every)
