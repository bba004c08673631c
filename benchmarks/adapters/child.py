"""The child's half of the line protocol that lets all contestants be measured in turns.

A contestant is a process of its own, with an interpreter and packages of its own, so this file and
the adapters beside it import nothing from the rest of `benchmarks`. It reads a command a line from
standard input and answers with a JSON object a line:

    round N           N times acquire and release      -> {"seconds": [...], "failed": n}
    acquire N BUDGET  N times acquire, release untimed -> the same; stops after BUDGET seconds
    reset             forget the client, make a new one -> {}

and, where an adapter can wait for a lock that is held, with times on one clock of the machine:

    take KEY          acquire                            -> {}
    free              release what was taken             -> {"at": when it began to}
    wait KEY          acquire and release                -> {"at": when it was acquired}
    rush KEY AT FOR N from AT on, for FOR seconds or N times: acquire, sleep 1 ms, release
                                                         -> {"at": [...], "end": ..., ...}

Closing standard input ends it. A call that takes longer than `LIMIT` is broken off and counts as
failed, because some clients never return from a hung server.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from time import monotonic, perf_counter, sleep
from typing import Any

LIMIT = 2.0  # seconds a call may take
WAITING = ("take", "free", "wait", "rush")
SECTION = 0.001  # seconds that a lock is held in a rush

Pair = tuple[Callable[[str], Any], Callable[[str, Any], object]]


class TooLong(BaseException):
    """The call was broken off. Not an Exception, which some clients swallow."""


def _broken_off(signum: int, frame: object) -> None:
    raise TooLong


def _measure(pair: Pair, resource: str, with_release: bool) -> tuple[float, bool]:
    """Return how long one lock took in seconds, and whether it was taken."""
    acquire, release = pair
    signal.setitimer(signal.ITIMER_REAL, LIMIT, 0.25)  # again and again, past any bare `except:`
    start = perf_counter()
    lease = None
    try:
        lease = acquire(resource)
        taken = perf_counter()
        if lease:
            release(resource, lease)
        end = perf_counter() if with_release else taken
    except (Exception, TooLong) as error:
        end = perf_counter()
        lease = None
        print(f"{resource}: {error!r}", file=sys.stderr)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return end - start, bool(lease)


def _rush(pair: Pair, key: str, start: float, seconds: float, most: int) -> dict[str, Any]:
    acquire, release = pair
    sleep(max(0.0, start - monotonic()))
    at: list[float] = []
    end = start
    while len(at) < most and monotonic() < start + seconds:
        lease = acquire(key)
        if lease:
            at.append(monotonic())
            sleep(SECTION)
            release(key, lease)
            end = monotonic()
    return {"at": at, "end": end}


def serve(
    name: str,
    connect: Callable[[list[str]], Pair],
    waiting: Callable[[list[str]], Pair] | None = None,
    counted: Callable[[], dict[str, int]] = dict,
) -> None:
    """Obey commands until standard input ends.

    Args:
        name: makes the resources of this contestant its own.
        connect: makes a client of the URLs; returns its acquire(resource), which returns a lease
            or something false, and its release(resource, lease).
        waiting: the same, with an acquire that waits for half a minute.
        counted: what else a rush is to tell.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGALRM, _broken_off)
    urls = sys.argv[1:]
    pair = connect(urls)
    waiter: Pair | None = None  # made when it is first asked for: it may cost the others something
    kept: list[Any] = []
    count = 0
    print("{}", flush=True)  # ready
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: dict[str, Any] = {}
        if waiter is None and command in WAITING:
            waiter = (waiting or connect)(urls)
        if command == "reset":
            pair = connect(urls)
        elif command == "take":
            kept = [arguments[0], waiter[0](arguments[0])]
        elif command == "free":
            answer = {"at": monotonic()}
            waiter[1](*kept)
        elif command == "wait":
            lease = waiter[0](arguments[0])
            answer = {"at": monotonic()}
            waiter[1](arguments[0], lease)
        elif command == "rush":
            key, start, seconds, most = arguments
            answer = _rush(waiter, key, float(start), float(seconds), int(most)) | counted()
        else:
            budget = float(arguments[1]) if command == "acquire" else float("inf")
            answer = {"seconds": [], "failed": 0}
            for _ in range(int(arguments[0])):
                count += 1
                seconds, taken = _measure(pair, f"{name}:{count}", command == "round")
                answer["seconds"].append(seconds)
                answer["failed"] += not taken
                budget -= seconds
                if budget < 0:
                    break
        print(json.dumps(answer), flush=True)
