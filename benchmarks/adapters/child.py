"""The child's half of the line protocol that lets all contestants be measured in turns.

A contestant is a process of its own, with an interpreter and packages of its own, so this file and
the adapters beside it import nothing from the rest of `benchmarks`. It reads a command a line from
standard input and answers with a JSON object a line:

    round N           N times acquire and release      -> {"seconds": [...], "cpu": of one}
    acquire N BUDGET  N times acquire, release untimed -> {"seconds": [...], "failed": n};
                                                          stops after BUDGET seconds
    reset             forget the client, make a new one -> {}
    extend N          acquire N, where they are not yet, and extend all of them
                                                         -> {"seconds": [of the extension]}

and, where an adapter can wait for a lock that is held, with times on one clock of the machine:

    take KEY          acquire                            -> {}
    free              release what was taken             -> {"at": when it began to}
    wait KEY          acquire and release                -> {"at": when it was acquired}
    rush KEY AT FOR N from AT on, for FOR seconds or N times: acquire, sleep 1 ms, release
                                                         -> {"at": [...], "end": ..., "cpu": ...}

Closing standard input ends it. An acquire that takes longer than `LIMIT` is broken off and counts
as failed, because some clients never return from a hung server.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from time import monotonic, perf_counter, process_time, sleep
from typing import Any

LIMIT = 2.0  # seconds a call may take
WAITING = ("take", "free", "wait", "rush")
SECTION = 0.001  # seconds that a lock is held in a rush

Pair = tuple[Callable[[str], Any], Callable[[str, Any], object]]
Extension = Callable[[], int]


class TooLong(BaseException):
    """The call was broken off. Not an Exception, which some clients swallow."""


def _broken_off(signum: int, frame: object) -> None:
    raise TooLong


def _round(pair: Pair, resources: list[str]) -> dict[str, Any]:
    """On healthy nodes, without a timer around each call: it would be part of what is measured."""
    acquire, release = pair
    seconds = []
    cpu = process_time()
    for resource in resources:
        start = perf_counter()
        lease = acquire(resource)
        if not lease:
            raise RuntimeError(f"{resource}: failed on healthy nodes")
        release(resource, lease)
        seconds.append(perf_counter() - start)
    return {"seconds": seconds, "cpu": (process_time() - cpu) / len(resources)}


def _acquire(pair: Pair, resource: str) -> tuple[float, bool]:
    """Return how long one lock took in seconds, and whether it was taken."""
    acquire, release = pair
    signal.setitimer(signal.ITIMER_REAL, LIMIT, 0.25)  # again and again, past any bare `except:`
    start = end = perf_counter()
    lease = None
    try:
        lease = acquire(resource)
        end = perf_counter()
        if lease:
            release(resource, lease)
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
    end, cpu = start, process_time()
    while len(at) < most and monotonic() < start + seconds:
        lease = acquire(key)
        if lease:
            at.append(monotonic())
            sleep(SECTION)
            release(key, lease)
            end = monotonic()
    return {"at": at, "end": end, "cpu": process_time() - cpu}


def serve(
    name: str,
    connect: Callable[[list[str]], Pair],
    waiting: Callable[[list[str]], Pair] | None = None,
    counted: Callable[[], dict[str, int]] = dict,
    extending: Callable[[list[str], list[str]], Extension] | None = None,
) -> None:
    """Obey commands until standard input ends.

    Args:
        name: makes the resources of this contestant its own.
        connect: makes a client of the URLs; returns its acquire(resource), which returns a lease
            or something false, and its release(resource, lease).
        waiting: the same, with an acquire that waits for half a minute.
        counted: what else a rush is to tell.
        extending: acquires these names; returns what extends them all, and says how many it did.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGALRM, _broken_off)
    urls = sys.argv[1:]
    pair = connect(urls)
    waiter: Pair | None = None  # made when it is first asked for: it may cost the others something
    kept: list[Any] = []
    extension: Extension | None = None
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
        elif command == "extend" and extending:
            names = [f"{name}:kept:{number}" for number in range(int(arguments[0]))]
            extension = extension or extending(urls, names)
            start = perf_counter()
            done = extension()
            answer = {"seconds": [perf_counter() - start]}
            if done != len(names):
                raise RuntimeError(f"{done} of {len(names)} leases were extended")
        elif command == "round":
            count += int(arguments[0])
            resources = [f"{name}:{number}" for number in range(count - int(arguments[0]), count)]
            answer = _round(pair, resources)
        else:
            budget = float(arguments[1])
            answer = {"seconds": [], "failed": 0}
            for _ in range(int(arguments[0])):
                count += 1
                seconds, taken = _acquire(pair, f"{name}:{count}")
                answer["seconds"].append(seconds)
                answer["failed"] += not taken
                budget -= seconds
                if budget < 0:
                    break
        print(json.dumps(answer), flush=True)
