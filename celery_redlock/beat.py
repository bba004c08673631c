"""Any number of beats, each tick sent once, whichever of them sends it.

There is no leader. Every beat goes through its own schedule; before it sends a tick it claims it on
the nodes, and the claim is *kept*: nobody gives it back, it expires when the next tick is due (see
`tick.py`). A beat that is refused goes on as if it had sent the tick itself. So a beat that dies is
missed by nobody.

Between the claim and the message a beat may die, or the broker be away. Therefore a claim is short
at first, extended while the message is being sent, and made long by that. Who is refused can tell
the two by what is left of the claim: if it is not yet long, the entry stays due and is tried again
a second later, until it is.

Works by wrapping methods of the scheduler at hand, whichever it is: they all send through
`apply_async`, and all but celery-redbeat's share Celery's `tick`.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.schedules import schedstate
from celery.utils.time import maybe_make_aware

from .canonical import escape
from .driver import monotonic
from .errors import ConfigurationError, QuorumUnavailable, ResourceHeld
from .hold import HeldLease
from .key import shortened
from .lease import Holder, Owner, quorum_of
from .lock import Redlock
from .outage import Outage
from .settings import MIN_TTL, given_names, read_settings
from .tick import Tick, current_tick

__all__ = ["Guard", "guard"]

logger = logging.getLogger("celery_redlock.beat")

OPTION = "redlock"
"""An entry's option (or, where its scheduler has none, message header): False to leave it alone."""
AGAIN = 1.0
"""Seconds until an entry that could not be decided upon is tried again."""
SPLIT = 0.05
"""The same, at most, if several beats asked at once and none got a quorum; doubled each time."""
BROKEN = 60.0
"""The same, if its schedule cannot be understood; seconds."""
SHORT = 0.5
"""Seconds that a claim lasts at first, at least, if it is to be kept for so long."""
LATE = 0.01
"""Seconds after the last sender's turn at which the other beats have theirs."""
EARLY = 0.01
"""Seconds by which a beat wakes up before the time it was told (`Scheduler.adjust`)."""


@dataclass(frozen=True)
class Turn:
    """What a beat does with a tick that is due.

    Attributes:
        entry: The entry, as it was when it was found to be due.
        send: Whether it is this beat's to send.
        claim: What it holds in that case; None if it sends without.
        kept: Until when the claim is kept once it is sent; seconds of the clock of leases.
        again: Otherwise: seconds until the entry is looked at again; None for its regular time.
        last: When the entry is to remember that it was sent, if that is not now.
        count: How often it is to remember that it was, if not once more.
    """

    entry: Any
    send: bool = False
    claim: HeldLease | None = None
    kept: float = 0.0
    again: float | None = None
    last: datetime | None = None
    count: int | None = None


class Guard:
    """Stands between one scheduler and the broker: lets each tick through in one beat of all.

    Args:
        scheduler: A `celery.beat.Scheduler`, of whatever class.
        redlock: Where ticks are claimed.
        on_unavailable: "hold" or "send".
    """

    def __init__(self, scheduler: Any, redlock: Redlock, on_unavailable: str) -> None:
        self._scheduler = scheduler
        self._redlock = redlock
        self._outage = Outage(AGAIN, send=on_unavailable == "send")
        self._owner = Owner(socket.gethostname(), os.getpid())
        self._granted: Turn | None = None
        self._refused: Turn | None = None
        self._sent = False
        self._told: dict[str, str] = {}
        self._put_off: set[str] = set()
        self._failed: dict[str, str] = {}
        self._splits: dict[str, int] = {}
        self._publishing = False
        self._wake = math.inf
        self._own_tick, scheduler.tick = scheduler.tick, self.tick
        self._own_is_due, scheduler.is_due = scheduler.is_due, self.is_due
        self._own_apply_entry, scheduler.apply_entry = scheduler.apply_entry, self.apply_entry
        self._own_apply_async, scheduler.apply_async = scheduler.apply_async, self.apply_async
        self._own_when, scheduler._when = scheduler._when, self._when
        self._own_should_sync, scheduler.should_sync = scheduler.should_sync, self.should_sync

    # -- In place of the scheduler's own ----------------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """One pass over the schedule. Seconds until the next one."""
        self._wake = math.inf
        wait: float = self._own_tick(*args, **kwargs)
        return min(wait, self._wake)

    def is_due(self, entry: Any) -> Any:
        """Whether an entry is due, and when next. One that was put off is not, until then."""
        if entry.name in self._put_off:
            # Celery up to 5.6 asks for the first entry whenever it wakes up, before its time too.
            heap = self._scheduler._heap
            if heap and heap[0][2] is entry:
                wait = heap[0][0] - self._own_when(entry, 0)
                if wait > 0:
                    return schedstate(False, wait)
            self._put_off.discard(entry.name)
        return self._own_is_due(entry)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry, and log it; or see that another beat does."""
        turn = self._take(entry)
        if turn.send:
            with self._sending(turn):
                self._own_apply_entry(entry, producer=producer)
        else:
            self._refused = turn

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send an entry, or see that another beat does: then None.

        Args:
            entry: A schedule entry that is due.
            producer: To send with.
            advance: Whether the schedule does not yet know that this entry had its turn. One that
                keeps it elsewhere for all beats (celery-redbeat) hears it from the one that sends.
            **kwargs: As the scheduler knows them.
        """
        granted = self._granted
        if granted is not None and granted.entry.name == entry.name:
            return self._publish(granted, entry, producer, advance, kwargs)
        turn = self._take(entry)
        if not turn.send:
            if advance:
                self._wake = min(self._wake, math.inf if turn.again is None else turn.again)
            else:
                self._refused = turn
            return None
        if turn.claim is None or not advance:
            with self._sending(turn):
                return self._publish(turn, entry, producer, advance, kwargs)
        # What all beats share must not say that it is sent before it is.
        try:
            with self._sending(turn):
                result = self._publish(turn, entry, producer, False, kwargs)
        except Exception:
            self._failed_to_send(entry, turn.claim.resource)
            raise
        self._failed.pop(entry.name, None)
        self._scheduler.reserve(entry)
        return result

    def _when(self, entry: Any, next_time_to_run: float, *args: Any, **kwargs: Any) -> float:
        """When to look at an entry again. That of a refused turn is told here."""
        turn, self._refused = self._refused, None
        if turn is not None and turn.entry.name == entry.name:
            if turn.again is not None:
                next_time_to_run = turn.again + EARLY
                self._put_off.add(entry.name)
            if turn.last is not None:
                _set_last_run(entry, turn.last, turn.count)
        return self._own_when(entry, next_time_to_run, *args, **kwargs)  # type: ignore[no-any-return]

    def should_sync(self) -> bool:
        """Whether to write the schedule to its disk or database; not between message and claim."""
        return not self._publishing and self._own_should_sync()

    # -- Claims -----------------------------------------------------------------------------------

    def _take(self, entry: Any) -> Turn:
        if not _is_guarded(entry):
            return Turn(entry, send=True)
        try:
            if self._outage.goes_on(monotonic()):
                return self._without_quorum(entry)
            return self._claim(entry, current_tick(entry.schedule, entry.last_run_at))
        except QuorumUnavailable as error:
            return self._without_quorum(entry, error)
        except Exception:
            # A schedule of the user's own. An error here would end the whole beat.
            logger.exception("%s: cannot tell which tick is due; it is not sent", entry.name)
            return _stays_due(entry, BROKEN)

    def _claim(self, entry: Any, tick: Tick) -> Turn:
        app = escape(str(self._scheduler.app.main or ""))
        resource = shortened(f"beat:{app}:{escape(str(entry.name))}:{tick.name}")
        now = monotonic()
        # Half of what it is to be kept, that one can tell; but long enough to ask nodes for.
        short = max(MIN_TTL, min(self._redlock.ttl, max(tick.kept / 2, min(tick.kept, SHORT))))
        patience = min(self._redlock.node_timeout, short / 2)
        claim = HeldLease(self._redlock, resource, short, owner=self._owner, patience=patience)
        # One that hangs between claim and message must not keep the others waiting for ever.
        claim.max_lifetime = self._redlock.ttl
        try:
            claim.acquire()
            turn = Turn(entry, True, claim, kept=now + tick.kept)
            self._splits.pop(entry.name, None)
        except ResourceHeld:
            turn = self._refuse(entry, tick, self._redlock.holder(resource), short)
        except QuorumUnavailable as error:
            # Who can wait for longer may still have one.
            return self._without_quorum(entry, error, patience >= self._redlock.node_timeout)
        self._outage.ended(monotonic())
        return turn

    def _refuse(self, entry: Any, tick: Tick, holder: Holder | None, short: float) -> Turn:
        left = 0.0 if holder is None else holder.expires_in or 0.0
        sent = left > short
        if holder is None or (holder.nodes < holder.quorum and not sent):
            return self._split(entry)
        self._splits.pop(entry.name, None)
        self._tell(entry, tick, holder, sent)
        if tick.period is not None:
            # Due when the one who sent is due, and after him: he goes on unless he is gone.
            again = left + tick.margin + LATE
            if sent:
                return Turn(entry, again=again, last=_ago(entry, tick.period - again))
            return _stays_due(entry, min(AGAIN, again))
        coming = math.inf if tick.next_in is None else tick.next_in
        if sent:
            # In an hour that is repeated in autumn, Celery may take what was sent for due.
            return Turn(entry, again=None if coming > 0 else AGAIN)
        return _stays_due(entry, max(0.0, min(AGAIN, left, coming)) + LATE)

    def _split(self, entry: Any) -> Turn:
        """Several beats asked at once, and none got a quorum: again soon, with full jitter."""
        count = self._splits[entry.name] = self._splits.get(entry.name, 0) + 1
        return _stays_due(entry, random.uniform(LATE, min(AGAIN, SPLIT * 2.0 ** min(count, 9))))

    @contextmanager
    def _sending(self, turn: Turn) -> Iterator[None]:
        """All that is sent in here is sent in this turn. Its claim is kept if anything was."""
        self._granted, self._sent = turn, False
        try:
            yield
        finally:
            self._granted = None
            if turn.claim is None:
                pass
            elif not self._sent:
                turn.claim.release()
            elif not turn.claim.keep(turn.kept - monotonic()):
                logger.warning(
                    "%s is sent, but a quorum could not be told: another beat may send it again",
                    turn.entry.name,
                )
        if self._scheduler.should_sync():
            try:
                self._scheduler._do_sync()
            except Exception:
                logger.exception("the schedule could not be written")

    def _publish(
        self, turn: Turn, entry: Any, producer: Any, advance: bool, kwargs: Mapping[str, Any]
    ) -> Any:
        if turn.claim is not None and turn.claim.lost and not self._sent:
            self._refused = _stays_due(turn.entry, LATE)  # this process was stopped for so long
            raise turn.claim.loss()
        options = entry.options
        if options and OPTION in options:  # it is ours, and no option of a message
            entry.options = {name: options[name] for name in options if name != OPTION}
        self._publishing = True
        try:
            result = self._own_apply_async(entry, producer=producer, advance=advance, **kwargs)
        finally:
            self._publishing = False
            entry.options = options
        self._sent = True
        return result

    def _failed_to_send(self, entry: Any, resource: str) -> None:
        """It is still due, for all beats. Once more, then the schedule moves on: not for ever."""
        if self._failed.pop(entry.name, None) == resource:
            self._scheduler.reserve(entry)
        else:
            self._failed[entry.name] = resource
            self._wake = min(self._wake, AGAIN)

    def _without_quorum(
        self, entry: Any, error: QuorumUnavailable | None = None, for_all: bool = True
    ) -> Turn:
        self._outage.met(entry.name, error, monotonic(), for_all=for_all)
        return Turn(entry, send=True) if self._outage.send else _stays_due(entry, AGAIN)

    def _tell(self, entry: Any, tick: Tick, holder: Holder, sent: bool) -> None:
        if self._told.get(entry.name) == holder.digest:
            return
        self._told[entry.name] = holder.digest
        ours = holder.owner == self._owner
        logger.log(
            logging.DEBUG if ours else logging.INFO,
            "%s (%s) %s sent by %s",
            entry.name,
            f"due {tick.name}" if tick.due else tick.name,
            "was" if sent else "is being",
            holder.owner or "another program, which holds our key",
        )


def guard(sender: Any = None, **_signal: Any) -> None:
    """A beat begins: let each tick through it only if no other beat has sent it.

    Celery logs what a signal handler raises and goes on; it does not so with SystemExit.
    """
    scheduler = sender.scheduler
    app = scheduler.app
    try:
        if not given_names(app.conf):
            return
        settings = read_settings(app)
        _check_entries(app.conf.beat_schedule or {})
    except ConfigurationError as error:
        logger.critical("celery_redlock: %s", error)
        raise SystemExit(1) from None
    if not settings.beat or isinstance(getattr(scheduler.tick, "__self__", None), Guard):
        return
    if not settings.enabled:
        logger.warning("redlock_enabled is False: every beat sends every tick")
        return
    redlock = Redlock.from_app(app)
    redlock.connect()
    Guard(scheduler, redlock, settings.beat_on_unavailable)
    logger.info(
        "each tick is sent by one beat: claims on %s, quorum %d, without one: %s",
        ", ".join(redlock.nodes),
        quorum_of(len(redlock.nodes)),
        settings.beat_on_unavailable,
    )


def _check_entries(schedule: Mapping[str, Any]) -> None:
    for name, entry in schedule.items():
        options = entry.get("options") if isinstance(entry, Mapping) else entry.options
        value = (options or {}).get(OPTION, True)
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"beat_schedule[{name!r}]: the option {OPTION!r} must be False, to have every beat"
                f" send it, or True; it is {value!r}"
            )


def _is_guarded(entry: Any) -> bool:
    options = entry.options or {}
    headers = options.get("headers") or {}
    return options.get(OPTION) is not False and headers.get(OPTION) is not False


def _stays_due(entry: Any, again: float) -> Turn:
    return Turn(entry, again=again, last=entry.last_run_at, count=entry.total_run_count)


def _ago(entry: Any, seconds: float) -> datetime:
    now = maybe_make_aware(entry.default_now())
    then = now.astimezone(timezone.utc) - timedelta(seconds=seconds)
    return then.astimezone(now.tzinfo)


def _set_last_run(entry: Any, last: datetime, count: int | None) -> None:
    """Let an entry remember another last run than now; also where that is kept in a database."""
    for keeper in (entry, getattr(entry, "model", None)):  # django-celery-beat's row
        if keeper is not None:
            keeper.last_run_at = last
            if count is not None:
                keeper.total_run_count = count
