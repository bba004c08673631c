"""Let any number of beats run, and one of them send each tick.

There is no leader. Every beat goes through its own schedule, and claims each tick before sending it
(`claims.py`). A beat that is refused goes on as if it had sent the tick itself. So if a beat dies,
the others send its ticks without any take-over.

The adapter wraps methods of any scheduler: all schedulers send through `apply_async`, and all but
celery-redbeat's share Celery's `tick`, which uses a heap of times. The wrapped methods are looked
up at each call, because other tools patch the scheduler's class, and perhaps after us: Sentry does
so for its cron monitors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from celery.beat import SchedulingError
from celery.schedules import schedstate

from ..config.settings import read_settings
from ..locking.redlock import Redlock
from ..protocol.errors import ConfigurationError, DuplicateTask, QuorumUnavailable
from ..protocol.texts import event
from ..protocol.values import quorum_of
from ..runtime.clock import monotonic
from .claims import (
    AFTER_OTHER_S,
    OPTION,
    RETRY_DELAY_S,
    SendDecision,
    TickClaims,
    stays_due,
)

__all__ = ["SchedulerAdapter", "guard"]

logger = logging.getLogger("celery_redlock.beat")

WRAPPED = ("tick", "is_due", "apply_entry", "apply_async", "_when", "should_sync")
"""The methods of a scheduler that are replaced by the adapter's."""
EARLY_S = 0.01
"""Seconds by which a beat wakes up before the requested time (`Scheduler.adjust`)."""
MIN_PATIENCE_PART = 0.8
"""The part of the node timeout that must be left to ask for one more entry in a pass: with less, a
slow answer would look like an outage."""


class SchedulerAdapter:
    """A filter between one scheduler and the broker: each tick passes in one of all beats.

    Args:
        scheduler: A `celery.beat.Scheduler`, of any class.
        redlock: The nodes where ticks are claimed.
        on_unavailable: "hold" or "send".

    Attributes:
        resources: The prefix of the names of all claims.
    """

    def __init__(self, scheduler: Any, redlock: Redlock, on_unavailable: str) -> None:
        self._scheduler = scheduler
        self._claims = TickClaims(scheduler.app, redlock, on_unavailable)
        self.resources = self._claims.resources
        self._timeout = redlock.node_timeout
        # The decision that is being carried out, and True if a message of it was sent (None: not
        # tried).
        self._granted: SendDecision | None = None
        self._sent: bool | None = None
        # A decision not to send, until the scheduler asks when to look at its entry again.
        self._refused: SendDecision | None = None
        self._put_off: set[str] = set()
        # For schedules that all beats share. By entry: the time until which it is left alone, and
        # True if another beat was found to have sent it. Then by entry: the claim of a tick that
        # could not be sent once. Then: when to wake up, and when this pass began.
        self._left_alone: dict[str, tuple[float, bool]] = {}
        self._failed: dict[str, str] = {}
        self._wake = math.inf
        self._began = math.inf
        # Methods that another tool has replaced on this very scheduler, and not on its class.
        self._overrides = {
            name: vars(scheduler)[name] for name in WRAPPED if name in vars(scheduler)
        }
        for name in WRAPPED:
            setattr(scheduler, name, getattr(self, name))

    def _own(self, name: str) -> Any:
        """Return the scheduler's own method, looked up now."""
        if name in self._overrides:
            return self._overrides[name]
        return getattr(type(self._scheduler), name).__get__(self._scheduler)

    # -- Replacements of the scheduler's methods --------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> float | None:
        """Go over the schedule once; return the seconds until the next time."""
        self._wake, self._began = math.inf, monotonic()
        try:
            wait: float | None = self._own("tick")(*args, **kwargs)
        finally:
            self._began = math.inf
        return wait if wait is None else min(wait, self._wake)

    def is_due(self, entry: Any) -> Any:
        """Return the `schedstate` of an entry; one that was put off is not due until its time."""
        if entry.name in self._put_off:
            # Celery up to 5.6 asks for the first entry at each wake-up, also before its time.
            heap = self._scheduler._heap
            if heap and heap[0][2] is entry:
                wait = heap[0][0] - self._own("_when")(entry, 0)
                if wait > 0:
                    return schedstate(False, wait + EARLY_S)
            self._put_off.discard(entry.name)
        return self._own("is_due")(entry)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry and log it, unless another beat does."""
        decision = self._decide(entry)
        if decision.send:
            with self._sending(decision):
                self._own("apply_entry")(entry, producer=producer)

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send an entry and return its result; None if another beat sends it.

        `advance` is True if the schedule has not moved on to the entry's next run yet. A schedule
        that all beats share (celery-redbeat's) is advanced by the beat that sends.
        """
        granted = self._granted
        if granted is not None and granted.entry.name == entry.name:
            return self._publish(granted, entry, producer, advance=advance, **kwargs)
        if advance:
            return self._apply_shared(entry, producer, kwargs)
        decision = self._decide(entry)
        if not decision.send:
            return None
        with self._sending(decision):
            return self._publish(decision, entry, producer, advance=advance, **kwargs)

    def _when(self, entry: Any, next_time_to_run: Any, *args: Any, **kwargs: Any) -> Any:
        """Return when to look at an entry again, also for an entry that was not sent."""
        refused, self._refused = self._refused, None
        if refused is not None and refused.entry.name == entry.name:
            again = refused.again
            if again is None and next_time_to_run is not None and next_time_to_run <= 0:
                again = RETRY_DELAY_S  # it happens in the hour that is repeated in autumn
            if again is not None:
                next_time_to_run = again + EARLY_S
                self._put_off.add(entry.name)
            if refused.last is not None:
                # If the entry is stored in a database (django-celery-beat), change its row, too.
                for record in filter(None, (entry, getattr(entry, "model", None))):
                    record.last_run_at = refused.last
                    if refused.count is not None:
                        record.total_run_count = refused.count
        return self._own("_when")(entry, next_time_to_run, *args, **kwargs)

    def should_sync(self) -> bool:
        """Return True if the schedule must be written now; never between claim and message."""
        return self._granted is None and bool(self._own("should_sync")())

    # -- Sending ----------------------------------------------------------------------------------

    def _decide(self, entry: Any) -> SendDecision:
        decision = self._claims.decide(entry, self._timeout)
        if not decision.send:
            self._refused = decision
        return decision

    def _apply_shared(self, entry: Any, producer: Any, kwargs: Mapping[str, Any]) -> Any:
        """Send an entry of a scheduler that handles all due entries in one pass, and advance it."""
        now = monotonic()
        left = self._timeout - max(0.0, now - self._began)
        until, was_sent = self._left_alone.get(entry.name, (0.0, False))
        if until > now or left < self._timeout * MIN_PATIENCE_PART:
            self._wake = min(self._wake, max(0.0, until - now))
            return None
        decision = self._claims.decide(entry, left)
        if not decision.send:
            if decision.sent and was_sent:
                # It is still due: the beat that sent it died before it could advance the schedule.
                self._scheduler.reserve(entry)
            again = RETRY_DELAY_S if decision.again is None else decision.again
            again = min(RETRY_DELAY_S, again)
            self._left_alone[entry.name] = now + again, decision.sent and not was_sent
            self._wake = min(self._wake, again)
            return None
        self._left_alone.pop(entry.name, None)
        if decision.claim is None:
            return self._publish(decision, entry, producer, advance=True, **kwargs)
        # Advance the shared schedule only after the message was sent.
        try:
            with self._sending(decision):
                result = self._publish(decision, entry, producer, advance=False, **kwargs)
        except Exception:
            if self._failed.pop(entry.name, None) == decision.claim.resource:
                self._scheduler.reserve(entry)  # it failed for the second time: move on
            else:
                self._failed[entry.name] = decision.claim.resource
                self._wake = min(self._wake, RETRY_DELAY_S)
            raise
        self._failed.pop(entry.name, None)
        self._scheduler.reserve(entry)
        return result

    @contextmanager
    def _sending(self, decision: SendDecision) -> Iterator[None]:
        """Treat everything that is sent in this block as one tick; keep its claim if any was."""
        self._granted, self._sent, ended = decision, None, False
        try:
            yield
            if self._sent is None:
                self._sent = True  # a user's own scheduler may send in another way
        except BaseException as error:
            ended = not isinstance(error, Exception)  # such as SystemExit after SIGTERM
            raise
        finally:
            self._granted = None
            if decision.claim is not None:
                decision.claim.finish(bool(self._sent), ended=ended)
        if self._scheduler.should_sync():
            try:
                self._scheduler._do_sync()
            except Exception:
                logger.exception(
                    "the schedule could not be written", extra=event("beat_schedule_unwritten")
                )

    def _publish(
        self, decision: SendDecision, entry: Any, producer: Any, *, advance: bool, **kwargs: Any
    ) -> Any:
        self._sent = bool(self._sent)
        if decision.claim is not None and decision.claim.lost and not self._sent:
            # This process was stopped between the claim and the message.
            self._refused = stays_due(decision.entry, AFTER_OTHER_S)
            raise decision.claim.loss()
        options = entry.options
        if options and OPTION in options:  # the option is for us, and not for the message
            if advance:  # Celery's own method also does this first; the schedule keeps the option
                entry, advance = self._scheduler.reserve(entry), False
            entry.options = {name: options[name] for name in options if name != OPTION}
        try:
            result = self._own("apply_async")(entry, producer=producer, advance=advance, **kwargs)
        except (SchedulingError, DuplicateTask) as error:
            duplicate = error if isinstance(error, DuplicateTask) else error.__context__
            if not isinstance(duplicate, DuplicateTask):
                raise
            # Its task is queued already: no beat needs to send this tick, and that has been logged.
            result = self._scheduler.app.AsyncResult(duplicate.task_id)
        finally:
            entry.options = options
        self._sent = True
        return result


def guard(sender: Any = None, **_signal: Any) -> None:
    """Adapt the scheduler of a beat that begins, so that it sends only ticks that no other sends.

    An error is turned into SystemExit, because after any other exception of a signal handler Celery
    would go on, without a guard.
    """
    try:
        _guard(sender.scheduler)
    except ConfigurationError as error:
        logger.critical(
            "celery_redlock: %s%s",
            error,
            _disabling_hint(sender.scheduler.app),
            extra=event("configuration_error"),
        )
        raise SystemExit(1) from None
    except Exception:
        logger.critical(
            "celery_redlock: cannot guard this beat, so it ends",
            exc_info=True,
            extra=event("beat_unguarded"),
        )
        raise SystemExit(1) from None


def _disabling_hint(app: Any) -> str:
    """Return a hint on starting a beat without claims, if no setting asks for them; else ""."""
    if app.conf.get("redlock_beat") is not None or app.conf.get("redlock_nodes") is not None:
        return ""
    return " (if this is the only beat, redlock_beat = False starts it without claims)"


def _guard(scheduler: Any) -> None:
    app = scheduler.app
    try:
        settings = read_settings(app)
    except ConfigurationError as error:
        wish = app.conf.get("redlock_beat")
        if wish or not error.no_node:
            raise
        if wish is None:
            logger.warning(
                "this beat sends every tick, and so does every other: the broker is not a Redis,"
                " and redlock_nodes is not set. If several beats run, set redlock_nodes, so that"
                " each tick is sent once; if only one runs, set redlock_beat = False",
                extra=event("beat_unlocked"),
            )
        return
    if settings.beat is False:
        return
    if isinstance(getattr(scheduler.tick, "__self__", None), SchedulerAdapter):
        return
    if not settings.enabled:
        logger.warning(
            "redlock_enabled is False: every beat sends every tick", extra=event("beat_disabled")
        )
        return
    redlock = Redlock.from_app(app)
    for warning in redlock.check():
        logger.warning("%s", warning, extra=event("configuration_warning"))
    redlock.connect()
    policy = settings.beat_on_unavailable
    resources = SchedulerAdapter(scheduler, redlock, policy).resources
    logger.info(
        "each tick is sent by one beat: claims %s* on %s, quorum %d, ttl %g s, without a quorum:"
        " %s",
        *(redlock.prefix + resources, ", ".join(redlock.nodes)),
        *(quorum_of(len(redlock.nodes)), redlock.ttl, policy),
        extra=event("beat_started"),
    )
    if not app.main:
        logger.warning(
            "the app has no name: if another app without a name has the same entry, on these nodes,"
            " only one of the two sends it; name the app, as in Celery('shop')",
            extra=event("beat_app_unnamed"),
        )
    try:
        redlock.holder(resources)
    except QuorumUnavailable as error:
        until = "nothing is" if policy == "hold" else "every tick is, by every beat,"
        logger.error(
            "no quorum yet, %s sent until there is one: %s",
            until,
            error,
            extra=event("beat_no_quorum"),
        )
