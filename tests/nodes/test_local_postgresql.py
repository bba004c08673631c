"""A local PostgreSQL leaves nothing outside of its directory; test_server.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import postgres


@pytest.mark.parametrize("before", ["running", "paused", "killed and started"])
def test_stopped_postgresql_leaves_no_shared_memory(before: str) -> None:
    postgres.require()
    server = postgres.made().start()
    try:
        assert postgres.sql(server, "SHOW dynamic_shared_memory_type") == [("mmap",)]
        if before == "killed and started":
            server.restart()
        segment = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert segment in segments()
        if before == "paused":
            server.pause()
    finally:
        server.stop()
    assert segment not in segments()
    assert not server.running


def segments() -> set[str]:
    """Return the shared memory segments of System V on this machine."""
    rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {row.split()[1] for row in rows}
