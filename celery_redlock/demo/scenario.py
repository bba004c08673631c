"""The script of the demonstration, to be read from top to bottom; and its end."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from celery_redlock.demo.checker import Verdict
from celery_redlock.demo.display import Display
from celery_redlock.demo.journal import Journal, Story
from celery_redlock.demo.processes import BEATS, CHARGES, NODES, Stage, note_signals
from celery_redlock.demo.timeline import draw
from celery_redlock.server import LocalServer, start_servers
from celery_redlock.stores.kinds import parse_nodes

__all__ = ["play", "run"]

WITHOUT_QUORUM_S = 3.0
"""Long enough to see that nothing starts: every charge retries at least once within 2 s."""


def play(stage: Stage) -> None:
    """Play the script; TimeoutError if it takes too long, RuntimeError if a process ends."""
    stage.start_worker_and_beats()
    stage.flood()
    stage.work_on(25)
    stage.kill_child()
    stage.work_on(25)
    stage.kill_node(0)
    stage.work_on(25)
    stage.kill_beat()
    stage.work_on(15)
    stage.kill_node(1)
    stage.work_on(25)
    stage.kill_child()
    stage.work_on(15)
    stage.kill_node(2)
    stage.elapse(WITHOUT_QUORUM_S)
    stage.start_node(0)
    stage.until(lambda: len(stage.story.done()) >= CHARGES, 40.0, "all charges to be done")


def play_on_one(stage: Stage) -> None:
    """Play it on one server: there is no minority to kill, so the server is killed twice."""
    stage.start_worker_and_beats()
    stage.flood()
    stage.work_on(25)
    stage.kill_child()
    stage.work_on(25)
    stage.kill_node(0)
    stage.start_node(0)  # at once: locks that were held are still held
    stage.work_on(25)
    stage.kill_beat()
    stage.work_on(25)
    stage.kill_child()
    stage.work_on(15)
    stage.kill_node(0)
    stage.elapse(WITHOUT_QUORUM_S)
    stage.start_node(0)
    stage.until(lambda: len(stage.story.done()) >= CHARGES, 40.0, "all charges to be done")


@contextlib.contextmanager
def _start_postgresql() -> Iterator[list[Any]]:
    """Start a database with the tables for locks."""
    from celery_redlock.testing.postgresql import LocalPostgres

    parse_nodes(["postgresql://127.0.0.1"])  # if the client is missing, says what to install
    from celery_redlock.stores.postgresql.address import parse

    schema = (files("celery_redlock.stores.postgresql") / "schema.sql").read_text("utf-8")
    with LocalPostgres() as database:
        with parse(database.url, "the demonstration").connect() as connection:
            connection.execute(schema.encode())
        yield [database]


@contextlib.contextmanager
def _start_etcd() -> Iterator[list[Any]]:
    """Start a cluster of one member."""
    from celery_redlock.testing.etcd import LocalEtcd

    with LocalEtcd() as cluster:
        yield [cluster]


Start: TypeAlias = Callable[[], contextlib.AbstractContextManager[Sequence[Any]]]
STORES: dict[str, tuple[str, Start, float]] = {
    "redis": (f"{NODES} servers", lambda: start_servers(NODES), 0.0),
    "postgresql": ("PostgreSQL", _start_postgresql, 0.0),
    "etcd": ("etcd", _start_etcd, 3.0),
}
"""Each kind of store: its description, its start, and the seconds by which a tick may be late
after a beat's death, or the store's own (docs/etcd.md, "Times")."""


def run(
    display: Display, out: Path, *, keep: bool = False, locks: bool = True, store: str = "redis"
) -> int:
    """Play the script, and judge the result.

    Args:
        display: The display to show it on.
        out: The directory for the picture; it is made if it does not exist.
        keep: True to leave the journals and the logs there, too.
        locks: False to run without any lock, and see the verdict fail.
        store: The kind of store for the locks, of `STORES`.

    Returns:
        The exit code: 1 if exclusion or completion failed.
    """
    servers, start, late = STORES[store]
    if store != "redis":
        display.nodes = f"the {servers} server: U is up, x is down"
    display.say(f"starting {servers}, a broker, a worker and {BEATS} beats ...")
    signals = note_signals()
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="redlock-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        broker, nodes = stack.enter_context(LocalServer()), stack.enter_context(start())
        stage = Stage(directory, nodes, broker, display, signals, locks=locks, late=late)
        stack.callback(stage.stop_worker_and_beats)
        failure = ""
        with display.live():
            try:
                (play if len(nodes) > 1 else play_on_one)(stage)
            except (TimeoutError, RuntimeError) as error:
                failure = str(error)
        stage.stop_worker_and_beats()
        story = Story(Journal(directory).new())
        verdict = Verdict(story)
        display.verdict(verdict, failure)
        picture = out / "demo-timeline.svg"
        try:
            out.mkdir(parents=True, exist_ok=True)
            if keep:
                others = shutil.ignore_patterns("pymp-*")
                shutil.copytree(directory, out, ignore=others, dirs_exist_ok=True)
            draw(story, verdict, picture)
            display.say(f"timeline: {picture.resolve()}")
        except OSError as error:
            display.say(f"no timeline: {error}")
        if verdict.ok and not failure:
            return 0
        for log in sorted(directory.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            last = lines[-40 if log.stem == "worker" else -10 :]
            display.say("\n".join([f"the last lines of {log.name}, of {len(lines)}:", *last]))
        return 1
