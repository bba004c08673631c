"""Publishes tasks that are reserved from their publishing on, until it is killed.

    python -m tests.campaign.worker.producer [rounds]

A line `call` before each `delay()`, and `gave` behind it: what a call that came back has promised.
"""

from __future__ import annotations

import itertools
import sys
import time

from tests.campaign.worker.project import PRODUCED, pen, reserved


def main(rounds: int | None) -> None:
    """Call the tasks of all keys in turn, again and again or so many times."""
    for _round in range(rounds) if rounds is not None else itertools.count():
        for key in PRODUCED:
            pen.write("call", "", "", key)
            result = reserved.delay(key, 0.01)
            pen.write("gave", result.id, "", key)
            time.sleep(0.005)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
