"""Tasks of the workers of this directory. This text is written into the worker's directory."""

from __future__ import annotations

import time

from celery import shared_task

from celery_redlock import SingletonTask


@shared_task(base=SingletonTask, name="setups.work", lock_on_conflict="skip", lock_key="work:<key>")
def work(key: str, seconds: float = 0.0) -> str:
    """Work for some seconds."""
    print(f"begins {key}", flush=True)
    time.sleep(seconds)
    return f"worked on {key}"
