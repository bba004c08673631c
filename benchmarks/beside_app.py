"""One library at the events of the README's table, in a process and an environment of its own.

See `beside.py`. `BESIDE_KIND` says which library, `BESIDE_NODES` where its locks are; what happens
is printed in the table's own words.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import redis
from celery import Celery, chord
from celery.exceptions import TimeoutError as NotEnded

KIND = os.environ["BESIDE_KIND"]
NODES = os.environ["BESIDE_NODES"].split()
BROKER = os.environ["BESIDE_BROKER"]
HERE = Path(os.environ["BESIDE_DIRECTORY"])
LATE = 8.0
"""Seconds after which what has not happened does not happen."""
SHORT = 2
"""Seconds of the short timeout; the body takes twice as long."""
TICK = 2.0
CELERY = [sys.executable, "-m", "celery", "-A", "benchmarks.beside_app"]
WORKER = [*CELERY, "worker"]

app = Celery("beside", broker=BROKER, backend=BROKER)
app.conf.update(
    worker_hijack_root_logger=False,
    beat_schedule={"tick": {"task": "tick", "schedule": TICK}},
    broker_transport_options={"visibility_timeout": 3600},
)


def ours(name: str, ttl: int | None, _bind: bool) -> dict[str, Any]:
    from celery_redlock import SingletonTask

    app.conf.update(redlock_nodes=NODES, redlock_restart_guard="off")
    options: dict[str, Any] = {"lock_key": name + ":{mark}"} if name != "tick" else {}
    return {"base": SingletonTask, **options, **({"lock_ttl": ttl} if ttl else {})}


def once(_name: str, ttl: int | None, _bind: bool) -> dict[str, Any]:
    from celery_once import QueueOnce

    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": NODES[0], "default_timeout": 3600},
    }
    return {"base": QueueOnce, **({"once": {"timeout": ttl}} if ttl else {})}


def singleton(_name: str, ttl: int | None, _bind: bool) -> dict[str, Any]:
    from celery_singleton import Singleton

    app.conf.singleton_backend_url = NODES[0]
    return {"base": Singleton, **({"lock_expiry": ttl} if ttl else {})}


def task(name: str, ttl: int | None = None, bind: bool = False) -> Callable[[Any], Any]:
    if KIND == "lock":
        return lambda body: app.task(name=name, bind=bind)(in_a_lock(name, ttl or 60, body))
    return app.task(name=name, bind=bind, **globals()[KIND](name, ttl, bind))


def in_a_lock(name: str, timeout: int, body: Any) -> Any:
    def locked(*arguments: Any) -> Any:
        marks = [str(one) for one in arguments if isinstance(one, str)]
        with redis.Redis.from_url(NODES[0]).lock(":".join([name, *marks]), timeout=timeout):
            return body(*arguments)

    return locked


def note(*words: Any) -> None:
    line = " ".join(map(str, (*words, f"{time.time():.3f}", os.getpid()))) + "\n"
    with open(HERE / "journal", "a") as journal:
        journal.write(line)


def work_for(mark: str, seconds: float) -> None:
    note("begin", mark)
    time.sleep(seconds)
    note("end", mark)


work = task("work")(work_for)
brief = task("brief", ttl=SHORT)(work_for)


def try_again(self: Any, mark: str) -> None:
    note("begin", mark)
    if self.request.retries < 2:
        raise self.retry(countdown=0.2, max_retries=2)


def write_tick() -> None:
    note("begin", "tick")


again = task("again", bind=True)(try_again)
tick = task("tick")(write_tick)


@app.task(name="done")
def done(*_results: Any) -> None:
    """The body of the chord."""


# -- What happens


def lines(word: str, mark: str) -> list[tuple[float, int]]:
    text = (HERE / "journal").read_text() if (HERE / "journal").exists() else ""
    found = re.findall(rf"^{word} {mark} (\S+) (\d+)$", text, re.M)
    return [(float(at), int(pid)) for at, pid in found]


def wait(met: Callable[[], Any], seconds: float = LATE) -> Any:
    """Return what is met, or what it is when the time is over."""
    until = time.monotonic() + seconds
    while not (found := met()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def send(of: Any, *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # refused to a duplicate; in the journal it is missing
        of.delay(*arguments)


def left() -> str:
    """What stays of locks, and for how long."""
    with redis.Redis.from_url(NODES[0]) as client:
        ttls = [client.ttl(key) for key in client.scan_iter("*")]
    if not ttls:
        return "nothing stays"
    if -1 in ttls:
        return "stays for ever"
    if max(ttls) > 3000:
        return "stays, an hour"
    return "stays until its timeout" if max(ttls) > 30 else "freed within 30 s"


def child_killed() -> str:
    work.delay("killed", 60)
    ((_begun, pid),) = wait(lambda: lines("begin", "killed"))
    os.kill(pid, signal.SIGKILL)
    at = time.time()
    for _ in range(20):  # one that is refused is sent again
        send(work, "killed", 0)
        if wait(lambda: len(lines("begin", "killed")) > 1, 0.2):
            assert lines("begin", "killed")[1][0] < at + 1.5
            return "freed within a second"
    return left()


def worker_killed() -> str:
    with running([*WORKER, "-Q", "doomed", "-c", "1"], "doomed") as worker:
        work.apply_async(("doomed", 60), queue="doomed")
        ((_begun, pid),) = wait(lambda: lines("begin", "doomed"))
        for one in (worker, pid):
            os.kill(one, signal.SIGKILL)
    return left()


def longer() -> str:
    brief.delay("longer", 2 * SHORT)
    ((_begun, first),) = wait(lambda: lines("begin", "longer"))
    time.sleep(SHORT + 0.5)
    send(brief, "longer", 0)
    end = min(wait(lambda: [at for at, pid in lines("end", "longer") if pid == first]))
    others = [at for at, _ in lines("begin", "longer")[1:]]
    return "a second one runs" if others and others[0] < end else "extended"


def revoked_or_expired() -> str:
    for mark in ("revoked", "expired"):
        empty()
        if mark == "revoked":
            result = work.apply_async((mark, 0), countdown=1.5)
            app.control.revoke(result.id)
        else:
            past = datetime.now(timezone.utc) - timedelta(seconds=5)
            result = work.apply_async((mark, 0), expires=past)
        wait(lambda: result.state == "REVOKED")  # noqa: B023
        assert not lines("begin", mark)
        if (found := left()) != "nothing stays":
            return found
    return found


def retried() -> str:
    again.delay("retried")
    runs = wait(lambda: len(lines("begin", "retried")) == 3)
    return ("keeps its turn" if KIND == "ours" else "works") if runs else "the retry is dropped"


def equal_members() -> str:
    try:
        result = chord([work.si("chord", 0.3), work.si("chord", 0.3)])(done.si())
    except Exception:
        return "raises at the producer"
    try:
        result.get(timeout=LATE)
    except NotEnded:
        return "never ends"
    return "ends"


def two_beats() -> str:
    with contextlib.ExitStack() as stack:
        for name in "ab":
            stack.enter_context(running([*CELERY, "beat", "-s", str(HERE / name)], f"beat-{name}"))
        wait(lambda: lines("begin", "tick"), 4 * LATE)
        begin = time.time()
        time.sleep(5 * TICK)
        sent = len([at for at, _ in lines("begin", "tick") if at > begin - 0.5])
    return "sent twice" if sent > 7 else "sent once"


def server_lost() -> str:
    os.kill(int(os.environ["BESIDE_PID"]), signal.SIGKILL)
    send(work, "lost", 0)
    begun = wait(lambda: lines("begin", "lost"), 4.0)
    return "goes on, with three or five" if begun else "stops"


def empty() -> None:
    for url in NODES:
        with redis.Redis.from_url(url) as client:
            client.flushall()


ROWS = {
    "pool child killed, out of memory": child_killed,
    "worker killed, or its machine": worker_killed,
    "body longer than the timeout": longer,
    "revoked or expired before its start": revoked_or_expired,
    "`self.retry()`": retried,
    "a chord with two equal members": equal_members,
    "two beats, one entry": two_beats,
    "a Redis server lost": server_lost,
}


@contextlib.contextmanager
def running(command: list[str], name: str) -> Iterator[int]:
    with open(HERE / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGQUIT if "worker" in command else signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    found = {}
    with running([*WORKER, "-c", "3"], "worker"):
        for row, happens in ROWS.items():
            empty()
            found[row] = happens()
    print(json.dumps(found))


if __name__ == "__main__":
    from benchmarks import beside_app  # the tasks' module, by the name that the worker knows

    beside_app.main()
