"""`python -m celery_redlock.demo`: local servers, a worker, two beats, faults, a verdict."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from celery_redlock.demo.display import make_display
from celery_redlock.demo.scenario import run
from celery_redlock.demo.shutdown import leave_on_signals
from celery_redlock.protocol.errors import RedlockError


def main() -> int:
    """Run it; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="plain lines on a terminal as well")
    parser.add_argument(
        "--timeline",
        type=Path,
        default=Path("demo-timeline.svg"),
        help="where to write the picture (default: %(default)s)",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep journals and log there")
    parser.add_argument(
        "--without-locks", action="store_true", help="switch the locks off, and see it fail"
    )
    options = parser.parse_args()

    # The worker's log tells of dead nodes; here they are no news.
    logging.getLogger("celery_redlock").addHandler(logging.NullHandler())

    leave_on_signals()
    try:
        display = make_display(options.plain)
        return run(display, options.timeline, options.keep, locks=not options.without_locks)
    except RedlockError as error:
        print(f"the demonstration cannot start: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
