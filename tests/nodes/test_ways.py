"""Another way to a node than TCP: a unix socket. TLS is in `test_hostile_tls.py`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from celery_redlock.server import LocalServer
from tests.support.names import Locks
from tests.support.nodes import use


def test_unix_sockets_are_nodes(lock_over: Locks, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.sock") for number in range(3)]
    with ExitStack() as stack:
        configs = [["--unixsocket", path] for path in paths]
        servers = [stack.enter_context(LocalServer(config=config)) for config in configs]
        use(lock_over([f"unix://{path}" for path in paths]), lock_over(servers))
