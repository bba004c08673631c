"""One of several clerks: moves money between accounts, each move under the locks of both.

    python -m benchmarks.bank HOW DIRECTORY SECONDS WORK URL...

HOW is `together` (one lock of both accounts) or `in-order` (one after the other, in sorted order,
as it is done with locks of one resource). The accounts are the files of DIRECTORY, each a balance
that is read, and some time later written: without a lock the sum does not stay. When it is ready it
writes a line, begins when it reads one, and in the end writes how many moves it has made.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from pathlib import Path

from celery_redlock import Redlock

WAIT = 60.0


def main() -> None:
    how, directory, seconds, work, *urls = sys.argv[1:]
    redlock = Redlock(urls, ttl=10.0, restart_guard="off")
    redlock.connect()
    accounts = sorted(Path(directory).glob("account-*"))
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + float(seconds)
    moves = 0
    while time.monotonic() < end:
        src, dst = random.sample(accounts, 2)
        with contextlib.ExitStack() as stack:
            if how == "together":
                stack.enter_context(redlock.lock([src.name, dst.name], wait=WAIT))
            else:
                for account in sorted((src, dst)):
                    stack.enter_context(redlock.lock(account.name, wait=WAIT))
            move(src, dst, random.randrange(1, 100), float(work))
        moves += 1
    print(moves, flush=True)
    redlock.close()


def move(src: Path, dst: Path, amount: int, work: float) -> None:
    """Read both balances, think for `work` seconds, write both."""
    one, other = int(src.read_text()), int(dst.read_text())
    time.sleep(work)
    src.write_text(str(one - amount))
    dst.write_text(str(other + amount))


if __name__ == "__main__":
    main()
