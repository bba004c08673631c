"""A script with a beat in a thread.

python -m tests.promises.beat.embedded -s FILE --scheduler NAME
"""

from __future__ import annotations

import sys

from celery.beat import EmbeddedService

from tests.promises.beat.project import app

if __name__ == "__main__":
    app.log.setup(loglevel="INFO")
    beat = EmbeddedService(
        app, thread=True, schedule_filename=sys.argv[2], scheduler_cls=sys.argv[4]
    )
    beat.start()
    beat.join()
