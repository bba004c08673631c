"""What gevent or eventlet have changed, where they have patched Python; else nothing.

Patched, a thread is a greenlet: all of them share one native thread, and each runs until it waits.
A body that computes without ever waiting stops all others, so leases are extended from a native
thread (`greenlet_watchdog.py`). What passes between that thread and the greenlets is made here, of
what the patches have replaced: a lock that only stops native threads, and a bell that can be heard
by the greenlets of one of them. Neither gevent nor eventlet is ever imported by us.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = [
    "Doorbell",
    "GreenletExecutor",
    "current",
    "end_hub",
    "in_hub",
    "native_ident",
    "native_lock",
    "native_rlock",
    "patched",
    "poll",
    "start_native",
]

READABLE = 1
"""POLLIN, by any name: eventlet takes the names away."""

logger = logging.getLogger("celery_redlock.watchdog")


def patched() -> str:
    """Who has made threads of this process greenlets: "gevent", "eventlet", or nobody: ""."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return "eventlet"
    return ""


def _native(name: str) -> Any:
    """What `_thread` calls `name`, without patches."""
    who = patched()
    if who == "gevent":
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    if who == "eventlet":
        return getattr(sys.modules["eventlet.patcher"].original("_thread"), name)
    import _thread

    return getattr(_thread, name)


def native_lock() -> Any:
    """A lock between native threads. No greenlet may wait for anything while it holds one."""
    return _native("allocate_lock")()


def native_rlock() -> Any:
    """The same, but one that a thread which has it may take again.

    For what a signal handler or a finalizer may come by again while its thread is in there.
    """
    return _native("RLock")()


def native_ident() -> int:
    """Which native thread this is."""
    ident: int = _native("get_ident")()
    return ident


def start_native(run: Callable[[], object]) -> None:
    """Call `run` in a native thread, which ends with the process. It has greenlets of its own."""
    _native("start_new_thread")(run, ())


def end_hub() -> None:
    """This native thread is about to end, and with it its greenlets."""
    if patched() == "gevent":
        sys.modules["gevent"].get_hub().destroy(destroy_loop=True)


def current() -> Any:
    """The running greenlet, where threads are greenlets; else None."""
    return sys.modules["greenlet"].getcurrent() if patched() else None


def in_hub(call: Callable[[], object]) -> None:
    """Call `call` between two greenlets of this native thread, soon: none of them runs then."""
    if patched() == "gevent":
        sys.modules["gevent"].get_hub().loop.run_callback(call)
    else:
        sys.modules["eventlet.hubs"].get_hub().schedule_call_global(0, call)


def poll() -> Any:
    """Which of many files can be read, as `select.poll` tells; None where nothing can.

    eventlet has none, and its `select` wakes the caller once for each file that is ready: by the
    second time it may be in the midst of another wait, a `sleep` of the body's say, and take this
    for its end. So it is asked for one file: an epoll, of the system's own, of all the others.
    """
    if hasattr(select, "poll"):
        return select.poll()
    if patched() == "eventlet":
        native = sys.modules["eventlet.patcher"].original("select")
        if hasattr(native, "epoll"):
            return _Epoll(native.epoll())
    return None


class _Epoll:
    def __init__(self, epoll: Any) -> None:
        self._epoll = epoll

    def register(self, fd: int, events: int) -> None:
        self._epoll.register(fd, events)

    def unregister(self, fd: int) -> None:
        with contextlib.suppress(OSError):  # it is closed by now
            self._epoll.unregister(fd)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        select.select([self._epoll.fileno()], [], [], timeout / 1000)
        found: list[tuple[int, int]] = self._epoll.poll(0)
        return found


class Doorbell:
    """Rung in any native thread; one greenlet waits for it and stops no other meanwhile."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._rung = False

    def ring(self) -> None:
        """Wake who waits, or who will wait next. Say before what there is to hear of."""
        if not self._rung:
            self._rung = True
            os.write(self._write, b"!")

    def wait(self, timeout: float | None) -> None:
        """Wait for a ring; seconds, None for ever. Then look at all there may be to hear of."""
        if hasattr(select, "poll"):
            this = select.poll()
            this.register(self._read, READABLE)
            rung = bool(this.poll(None if timeout is None else timeout * 1000))
        else:
            rung = self._read in select.select([self._read], [], [], timeout)[0]
        if rung:
            os.read(self._read, 1)
            self._rung = False

    def __del__(self) -> None:
        # Not before: somebody may ring at any time, and the number be another file's by then.
        os.close(self._read)
        os.close(self._write)


class GreenletExecutor:
    """Does in a greenlet of this native thread what others ask for."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object] | None] = deque()
        self._bell = Doorbell()
        threading.Thread(target=self._run, name="celery_redlock errands", daemon=True).start()

    def ask(self, call: Callable[[], object]) -> None:
        """Have `call` called soon; from any native thread."""
        self._calls.append(call)
        self._bell.ring()

    def close(self) -> None:
        """Do what has been asked for, and end."""
        self._calls.append(None)
        self._bell.ring()

    def _run(self) -> None:
        while True:
            self._bell.wait(None)
            while self._calls:
                call = self._calls.popleft()
                if call is None:
                    return
                # Each in a greenlet of its own: a slow one must not keep others waiting.
                threading.Thread(target=self._do, args=(call,), daemon=True).start()

    def _do(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(SystemExit):
            try:
                call()
            except Exception:
                logger.exception("%r failed", call)
