"""What a delivery does that was refused its lock: the conflict policies, and sending it again."""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from celery.exceptions import Reject, Retry

from .attempts import ATTEMPTS, attempts_of
from .errors import NotAcquired, ResourceHeld, printable
from .options import TaskOptions
from .skipped import Skipped
from .waiting import at_work, eta_of

__all__ = ["Refused"]

# One name for all that happens to a task's lock, whichever module tells of it.
logger = logging.getLogger("celery_redlock.task")

COUNTDOWN = 0.1
"""Seconds before a task is delivered again, at least: delivered at once it may overtake the worker
that still writes state RETRY over its SUCCESS (seen: 9 of 60)."""


class Refused:
    """A delivery that did not get its lock.

    Args:
        task: The task.
        request: Its request.
        options: How it is locked.
        resource: What it is refused.
        copy: Whether it is a second delivery of a message that may still be at work.
    """

    def __init__(
        self, task: Any, request: Any, options: TaskOptions, resource: str, copy: bool
    ) -> None:
        self._task = task
        self._request = request
        self._options = options
        self._resource = resource
        self._copy = copy

    def conflict(self, refusal: ResourceHeld) -> Any:
        """Another holds it: what the policy says."""
        if self._copy:
            # To skip it or to fail would be told of the first delivery, which has the same id; and
            # if that one dies, this is the message that is left.
            return self.later("held", refusal)
        if self._options.on_conflict == "raise":
            raise refusal
        if self._options.on_conflict == "skip":
            logger.info("%s is skipped: %s", self._called, refusal)
            return Skipped(self._resource, str(refusal.holder))
        return self.later("held", refusal)

    def later(self, why: str, refusal: NotAcquired) -> Any:
        """Send the message again, later, with the same id and none of the user's retries spent.

        Raises:
            Retry: It is sent.
            NotAcquired: It has been tried for too long.
        """
        options = self._options
        attempts = attempts_of(self._request)
        count = attempts[why] = attempts[why] + 1
        if self._copy:
            attempts["copy"] = True
        waited = time.time() - attempts["since"]
        deadline = None if self._copy else options.retry_deadline
        if deadline is not None and waited >= deadline:
            logger.error("%s gives up after %.1f s: %s", self._called, waited, refusal)
            raise refusal
        ceiling = min(options.retry_backoff_max, options.retry_backoff * 2.0 ** min(count - 1, 60))
        countdown = max(COUNTDOWN, random.uniform(0, ceiling))  # full jitter
        ordinary = isinstance(refusal, ResourceHeld) and not refusal.for_ever
        logger.log(
            logging.INFO if ordinary else logging.WARNING,
            "%s waits (%s, attempt %d, next in %.1f s): %s",
            self._called,
            why,
            count,
            countdown,
            refusal,
        )
        when: dict[str, Any] = {"countdown": countdown}
        if why == "held" and at_work(self._request):
            # Workers that park it know when it may run; for others it has an ETA as before.
            when = {"eta": eta_of(countdown, attempts)}
        headers = {**(self._request.headers or {}), ATTEMPTS: attempts}
        # Not self.retry(): that would spend the retries of the user.
        again = self._task.signature_from_request(
            self._request, retries=self._request.retries, headers=headers, **when
        )
        try:
            again.apply_async()
        except Exception as error:
            # The broker is away. With late acknowledgement the message can go back to it;
            # otherwise the task must fail, for all to see, or it would be lost without a word.
            if self._task.acks_late:
                raise Reject(error, requeue=True) from error
            raise
        raise Retry(str(refusal), exc=refusal, when=countdown, sig=again)  # type: ignore[arg-type]

    @property
    def _called(self) -> str:
        return printable(f"{self._task.name}[{self._request.id}]")
