"""A holder is stopped before its write, and the database refuses its late write.

python fencing.py       # starts its own three nodes, and a PostgreSQL if that is installed
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from celery_redlock import Redlock
from celery_redlock.server import start_servers

TABLE = (
    "CREATE TABLE stock (item text PRIMARY KEY, writer text, last_fencing_token bigint NOT NULL)"
)
# The same for SQLite and PostgreSQL. A row that does not exist yet refuses nothing.
GUARDED = """
INSERT INTO stock (item, writer, last_fencing_token) VALUES (:item, :writer, :token)
ON CONFLICT (item) DO UPDATE
SET writer = excluded.writer, last_fencing_token = excluded.last_fencing_token
WHERE stock.last_fencing_token < excluded.last_fencing_token
"""


class Overtaken(Exception):
    """A later holder has written already."""


class SQLite:
    def __init__(self, place: str) -> None:
        self.connection = sqlite3.connect(Path(place) / "stock.db", isolation_level=None)

    def write(self, writer: str, token: int | None) -> None:
        row = {"item": "apples", "writer": writer, "token": token}
        if self.connection.execute(GUARDED, row).rowcount == 0:
            raise Overtaken(f"{writer}: not written, a larger token than {token} has been here")

    def create(self) -> None:
        self.connection.execute(TABLE)

    def read(self) -> str:
        return self.connection.execute("SELECT writer FROM stock").fetchone()[0]


class PostgreSQL:
    """PostgreSQL through psql, without a driver; the last line it prints has the count of rows."""

    def __init__(self, place: str) -> None:
        self.psql = ["psql", "-h", place, "-U", "postgres", "-X", "-A", "-t"]
        self.psql += ["-v", "ON_ERROR_STOP=1"]

    def write(self, writer: str, token: int | None) -> None:
        sql = GUARDED.replace(":item", ":'item'").replace(":writer", ":'writer'")
        if self._run(sql, item="apples", writer=writer, token=token) == "INSERT 0 0":
            raise Overtaken(f"{writer}: not written, a larger token than {token} has been here")

    def create(self) -> None:
        self._run(TABLE)

    def read(self) -> str:
        return self._run("SELECT writer FROM stock")

    def _run(self, sql: str, **values: object) -> str:
        given = [word for name, value in values.items() for word in ("-v", f"{name}={value}")]
        done = subprocess.run(
            [*self.psql, *given], input=sql, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()


DATABASES = {"SQLite": SQLite, "PostgreSQL": PostgreSQL}


def late(database: str, place: str) -> None:
    """Be the holder that will be stopped, in a separate process."""
    redlock = Redlock(os.environ["REDLOCK_NODES"].split(","), ttl=1.0)
    # It waits, because nodes that have just been started have no vote for a ttl.
    with redlock.lock("apples", wait=20.0, fencing=True) as lease:
        lease.ensure()  # the last check; all is well
        print(lease.fencing_token, flush=True)
        sys.stdin.readline()  # here it is stopped, for longer than its lease can last
        try:
            DATABASES[database](place).write("the late one", lease.fencing_token)
        except Overtaken as error:
            print(error, flush=True)


def show(database: str, place: str, redlock: Redlock) -> None:
    stock = DATABASES[database](place)
    stock.create()
    command = [sys.executable, __file__, database, place]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            token = int(other.stdout.readline())
            other.send_signal(signal.SIGSTOP)
            with redlock.lock("apples", wait=20.0, fencing=True) as lease:
                grown = (lease.fencing_token or 0) > token
                print(f"{database}: ours, after one that was stopped; a larger token: {grown}")
                stock.write("the one after it", lease.fencing_token)
            other.send_signal(signal.SIGCONT)  # it has noticed nothing, and goes on to write
            answer, _ = other.communicate("\n", timeout=20)
            print(f"{database}: {answer.strip().replace(str(token), 'its own')}")
            print(f"{database}: written by {stock.read()}")
        finally:
            other.kill()


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """Start a server that listens in its own directory; it does not run as root."""
    debian = map(str, Path("/usr/lib/postgresql").glob("*/bin"))  # not on the PATH there
    os.environ["PATH"] = os.pathsep.join([*debian, os.environ.get("PATH", os.defpath)])
    for program in ("initdb", "postgres", "psql"):
        if shutil.which(program) is None:
            raise LookupError(f"{program} is not installed")
    user = None
    if os.geteuid() == 0:
        user = max({entry.pw_name for entry in pwd.getpwall()} & {"postgres", "nobody"}, default="")
        if not user:
            raise LookupError("it does not run as root, and there is no user for it")
    with tempfile.TemporaryDirectory() as place:
        if user:
            shutil.chown(place, user)
        data = ["-D", f"{place}/data"]

        def start(*command: str) -> subprocess.Popen[bytes]:
            null = subprocess.DEVNULL
            return subprocess.Popen(command, user=user, cwd=place, stdout=null, stderr=null)

        if start("initdb", *data, "-U", "postgres", "-A", "trust", "-N").wait() != 0:
            raise LookupError("initdb fails")
        server = start("postgres", *data, "-k", place, "-c", "listen_addresses=")
        try:
            deadline = time.monotonic() + 20.0
            ready = ["psql", "-h", place, "-U", "postgres", "-c", ""]
            while subprocess.run(ready, capture_output=True).returncode != 0:
                if time.monotonic() > deadline or server.poll() is not None:
                    raise LookupError("it does not start")
                time.sleep(0.05)
            yield place
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown
            server.wait(20)


def main() -> None:
    with start_servers(3) as servers:
        urls = [server.url for server in servers]
        os.environ["REDLOCK_NODES"] = ",".join(urls)
        # The nodes have just been started, and there is no lock that they could have lost.
        redlock = Redlock(urls, ttl=1.0, restart_guard="off")
        with tempfile.TemporaryDirectory() as place:
            show("SQLite", place, redlock)
        try:
            with postgresql() as place:
                show("PostgreSQL", place, redlock)
        except LookupError as why:
            print(f"PostgreSQL: left out: {why}")
        redlock.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        late(*sys.argv[1:])
    else:
        main()
