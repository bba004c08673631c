"""A program whose children publish under reservations, and are killed at random moments.

It is given, as JSON, the app's settings, the queue, how many children, and the keys' beginning; and
it says, when all are dead, how often each has published.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from itertools import count

from celery import Celery

from tests.promises.worker.reserving import declare
from tests.support.machine import end_with_parent


def publish(app: Celery, queue: str, key: str, out: int) -> None:
    """Publish forever, each time another key; a byte for each that is out."""
    end_with_parent()
    task = declare(app, lambda *_args: None)["until_executed"]
    for number in count():
        task.apply_async((f"{key}-{number}",), queue=queue)
        os.write(out, b".")


def main() -> None:
    conf, queue, children, key = json.loads(sys.argv[1])
    end_with_parent()
    app = Celery("tests.promises.worker.producer")
    app.conf.update(conf)
    sent = []
    for number in range(children):
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            publish(app, queue, f"{key}-{number}", into)
        os.close(into)
        os.read(out, 1)  # it is at work
        time.sleep(random.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        rest = 1
        while data := os.read(out, 65536):
            rest += len(data)
        os.close(out)
        sent.append(rest)
    print(json.dumps(sent))


if __name__ == "__main__":
    main()
