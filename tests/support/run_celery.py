"""Run as `python -m tests.support.run_celery worker ...`: Celery, started in half the time.

What others plug into Celery's command line (Flower, a prompt, our own commands) takes as long to
import as all the rest, and is imported by each of the hundred workers and beats that tests start.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import socket
import sys
import types

prompt = types.ModuleType("click_repl")
prompt.register_repl = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
sys.modules.setdefault("click_repl", prompt)
sys.modules["opentelemetry.sdk.metrics"] = None  # type: ignore[assignment]  # redis-py imports it

plugged_in = importlib.metadata.entry_points()
"""All of them: to read them takes a tenth of a start, and forks need not do it again."""


def others(**asked: str) -> object:
    return () if asked.get("group") == "celery.commands" else plugged_in.select(**asked)


if __name__ == "__main__":
    importlib.metadata.entry_points = others  # type: ignore[assignment]
    if sys.argv[1] == "--serve":
        from tests.support import forked

        forked.serve(socket.socket(fileno=int(sys.argv[2])), forked.GREEN in sys.argv)
    if sys.argv[1] == "--program":  # any other, which prints its own errors
        del sys.argv[:2]
        if sys.argv[0] == "-m":
            sys.path.insert(0, "")
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
            runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    if "gevent" in sys.argv:
        # Celery does this, but gevent 26 asks all objects for their class, one of which then
        # imports kombu: its pause between two tries to connect stops all greenlets.
        from gevent import monkey

        monkey.patch_all()
    from celery.__main__ import main

    main()
