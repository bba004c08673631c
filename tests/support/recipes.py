"""The pages of docs/recipes as modules: their own code, with the addresses of local servers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from celery import Celery, _state
from celery.contrib.testing.worker import start_worker
from celery.result import AsyncResult
from kombu.asynchronous import set_event_loop

from celery_redlock import Redlock
from celery_redlock.server import LocalServer
from tests.support import cluster, forked
from tests.support.nodes import admin
from tests.support.program import Program
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "recipes"
POLLED = f"{cluster.__name__}:{cluster.PolledBackend.__name__}"


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of code of a page."""
    text = (PAGES / f"{page}.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def code(page: str, server: LocalServer, changes: Mapping[str, str] = {}) -> str:
    """The Python of a page, with a local server in place of `localhost`.

    Args:
        page: Its name.
        server: The broker, the result backend and the node.
        changes: What else is another than on the page, each of it there once: shorter times.
    """
    text = "\n".join(blocks(page))
    for old, new in changes.items():
        assert text.count(old) == 1, f"{page}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    polled = text.replace('backend="redis://localhost"', f'backend="{POLLED}+{server.url}"')
    return polled.replace("redis://localhost", server.url)


@contextlib.contextmanager
def running(
    page: str, server: LocalServer, changes: Mapping[str, str] = {}, **names: Any
) -> Iterator[Any]:
    """Run a page as a module, beside a worker with four threads that has its tasks.

    Args:
        page: Its name.
        server: As in `code`.
        changes: As in `code`.
        names: What stands for functions of the page that do the work.
    """
    shop: Any = types.ModuleType("shop")
    state: Any = _state
    set_event_loop(None)  # an older Celery takes that of the worker before, and its timer
    before = state._tls.current_app, state.default_app
    sys.modules["shop"] = shop
    try:
        exec(compile(code(page, server, changes), f"{page}.md", "exec"), shop.__dict__)
        for name, work in names.items():
            assert callable(getattr(shop, name)), f"{page}: {name} does no work"
            setattr(shop, name, work)
        (app,) = (thing for thing in vars(shop).values() if isinstance(thing, Celery))
        app.conf.broker_transport_options = {"polling_interval": 0.1}  # it also ends as soon
        with contextlib.ExitStack() as stack:
            stack.callback(app.close)
            stack.callback(app.backend.client.close)
            stack.callback(Redlock.from_app(app).close)
            worker = start_worker(app, pool="threads", concurrency=4, perform_ping_check=False)
            stack.enter_context(worker)
            for work in names.values():
                stack.callback(work.go)
            yield shop
    finally:
        del sys.modules["shop"]
        state._tls.current_app, state.default_app = before


class Work:
    """Stands for the work of bodies: it records each call, and goes on until the test ends it.

    Attributes:
        begun: The arguments of all calls, in their order.
        now: Those of the calls that have not ended.
    """

    def __init__(self, *, endless: bool = True) -> None:
        self.begun: list[tuple[Any, ...]] = []
        self.now: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._go = threading.Event()
        if not endless:
            self.go()

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            self.begun.append(args)
            self.now.append(args)
        assert self._go.wait(30.0), f"nobody lets {args} end"
        with self._lock:
            self.now.remove(args)
        return args[-1]

    def go(self) -> None:
        """Let all end, now and later."""
        self._go.set()

    def at(self, *calls: tuple[Any, ...]) -> None:
        """Wait until just these are at work."""
        wait_until(
            lambda: sorted(self.now) == sorted(calls),
            10.0,
            f"{calls} are at work",
            seen=lambda: self.now,
        )


def value(sent: AsyncResult[Any], timeout: float = 20.0) -> Any:
    """Return the value of a task, or the exception that it ended with."""
    wait_until(sent.ready, timeout, f"{sent} ends", every=0.01, seen=lambda: sent.state)
    return sent.result


def queued(server: LocalServer) -> int:
    """Return the number of messages in the queue."""
    with admin(server) as client:
        return int(client.llen("celery"))


@contextlib.contextmanager
def celery(directory: Path, name: str, *arguments: str) -> Iterator[Program]:
    """A program of Celery's, as a shell starts it in a directory with a `shop.py`."""
    program = Program(name, directory / f"{name}.log")
    command = [sys.executable, "-m", forked.MODULE, "-A", "shop", "--workdir", str(directory)]
    with open(program.output, "wb") as output:
        program.process = forked.start(
            [*command, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            output=output,
        )
    try:
        yield program
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.terminate()
        program.kill()
