"""Whose turn it is to send a tick: one beat's, of all that run.

A beat that is due claims the tick on the nodes, before it sends. Between the claim and the message
it may die, or the broker be away. Therefore a claim is short at first, extended while the message
is being sent, and then made long: it is *kept*, nobody gives it back, it expires when the next tick
is due (`ticks.py`). Who is refused can tell the two by what is left of the claim, for its token
says how long it was at first. If more is left, the tick is sent, and the entry moves on as if this
beat had sent it. If not, the entry stays due, and is tried again a second later.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.utils.time import maybe_make_aware

from ..config.checks import MIN_TTL
from ..keys.canonical import escape
from ..keys.template import shortened
from ..locking.held import HeldLease
from ..locking.redlock import Redlock
from ..locking.request import LockRequest
from ..messages.signals import beat_deduplicated, named
from ..protocol.errors import LeaseLost, QuorumUnavailable, ResourceHeld
from ..protocol.names import checked_names
from ..protocol.values import Holder, Owner
from ..runtime.clock import monotonic
from .outage import Outage
from .ticks import Tick, current_tick

__all__ = ["AGAIN", "LATE", "OPTION", "SendDecision", "Turns", "is_guarded", "stays_due"]

logger = logging.getLogger("celery_redlock.beat")

OPTION = "redlock"
"""An entry's option (or, where its scheduler has none, message header): False to leave it alone."""
AGAIN = 1.0
"""Seconds until an entry that could not be decided upon is tried again."""
SPLIT = 0.05
"""The same, at most, if several beats asked at once and none got a quorum; doubled each time."""
BROKEN = 60.0
"""The same, if its schedule cannot be understood; seconds."""
LATE = 0.01
"""Seconds after the last sender's turn at which the other beats have theirs."""
SHORT = 0.5
"""Seconds that a claim lasts at first, at least, if it is to be kept for so long."""
ATOM = 0.001
"""Seconds that nodes tell apart; and to wait for them at least."""


@dataclass(frozen=True)
class SendDecision:
    """What a beat does with a tick that is due.

    Attributes:
        entry: The entry, as it was when it was found to be due.
        send: Whether it is this beat's to send.
        claim: What it holds in that case; None if it sends without.
        kept: Until when the claim is kept once it is sent; seconds of the clock of leases.
        timeout: How long to wait for the nodes then; seconds.
        sent: Otherwise: whether another beat has certainly sent it.
        again: Seconds until the entry is looked at again; None for its regular time.
        last: When the entry is to remember that it was sent, if that is not now.
        count: How often it is to remember that it was, if not once more.
    """

    entry: Any
    send: bool = False
    claim: TickClaim | None = None
    kept: float = 0.0
    timeout: float = 0.0
    sent: bool = False
    again: float | None = None
    last: datetime | None = None
    count: int | None = None


def stays_due(entry: Any, again: float) -> SendDecision:
    """Not now: as if nobody had looked at it yet, in `again` seconds."""
    return SendDecision(entry, again=again, last=entry.last_run_at, count=entry.total_run_count)


class TickClaim(HeldLease):
    """A tick that is claimed, while its message is being sent.

    Attributes:
        tick: What it is called in the log.
    """

    tick = ""

    def _say_lost(self, loss: LeaseLost) -> None:
        logger.error(
            "%s is still being sent after %.1f s: its claim has ended (%s), and another beat sends"
            " it; does the broker hang?",
            self.tick,
            loss.held_for,
            loss.reason,
        )


class Turns:
    """One beat's turns.

    Args:
        app: The Celery app, whose name tells its entries from another's.
        redlock: Where ticks are claimed.
        on_unavailable: "hold" or "send".
    """

    def __init__(self, app: Any, redlock: Redlock, on_unavailable: str) -> None:
        self._app = app
        self._redlock = redlock
        self._owner = Owner(socket.gethostname(), os.getpid())
        self._outage = Outage(AGAIN, send=on_unavailable == "send")
        self._told: dict[str, str] = {}
        self._splits: dict[str, int] = {}
        self._warned: set[str] = set()

    @property
    def resources(self) -> str:
        """What the names of all that is claimed begin with."""
        return f"beat:{escape(str(self._app.main or ''))}:"

    def pause(self) -> float:
        """Seconds in which nothing can be sent, for want of a quorum; 0 if all is well."""
        return 0.0 if self._outage.send else self._outage.pause(monotonic())

    def hold(self, entries: Iterable[Any]) -> None:
        """These are due, and wait for a quorum."""
        for entry in entries:
            self._outage.met(entry.name, None, monotonic())

    def take(self, entry: Any, timeout: float) -> SendDecision:
        """Whose turn an entry is that is due. Never raises.

        Args:
            entry: A `celery.beat.ScheduleEntry`.
            timeout: How long to wait for the nodes at most, in seconds, in all. They are asked
                twice: for the tick, and then either who has it or to keep it.
        """
        try:
            wish = _wish(entry)
            if wish is False:
                return SendDecision(entry, send=True)
            if not isinstance(wish, bool) and entry.name not in self._warned:
                self._warned.add(entry.name)
                logger.warning(
                    "%s: the option %r must be True or False, it is %r: claimed like others",
                    *(entry.name, OPTION, wish),
                )
            if self._outage.pause(monotonic()):
                return self._without_quorum(entry)
            return self._claim(entry, current_tick(entry.schedule, entry.last_run_at), timeout)
        except QuorumUnavailable as error:
            return self._without_quorum(entry, error)
        except Exception:
            # A schedule of the user's own. An error here would end the whole beat.
            logger.exception("%s: cannot tell which tick is due; it is not sent", entry.name)
            return stays_due(entry, BROKEN)

    def end(self, turn: SendDecision, sent: bool) -> None:
        """This beat's turn is over: keep its claim, or let another send the tick."""
        if turn.claim is None:
            return
        claim, late = turn.claim, turn.claim.lost
        if not sent:
            claim.release()
            if not late:
                logger.warning(
                    "%s could not be sent from here: its claim is freed, for another beat",
                    claim.tick,
                )
        elif not claim.keep(turn.kept - monotonic(), timeout=turn.timeout):
            logger.warning(
                "%s was sent after its claim had ended: another beat may have sent it too"
                if late
                else "%s is sent, but a quorum could not be told: another beat may send it again",
                claim.tick,
            )

    def _claim(self, entry: Any, tick: Tick, timeout: float) -> SendDecision:
        resource = shortened(f"{self.resources}{escape(str(entry.name))}:{tick.name}")
        now = monotonic()
        # Half of what it is to be kept, that one can tell; but long enough to ask nodes for.
        short = max(MIN_TTL, min(self._redlock.ttl, max(tick.kept / 2, min(tick.kept, SHORT))))
        patience = min(timeout, short / 2)
        owner = replace(self._owner, stamp=f"{short:.3f}")
        request = LockRequest(
            names=checked_names(resource), ttl=short, owner=owner, patience=patience
        )
        # One that hangs between claim and message must not keep the others waiting for ever.
        claim = TickClaim(self._redlock, request, max_lifetime=self._redlock.ttl)
        claim.tick = _called(entry, tick)
        granted = True
        try:
            claim.acquire()
        except ResourceHeld:
            granted = False
        except QuorumUnavailable as error:
            return self._without_quorum(entry, error, for_all=patience == timeout)
        left = max(ATOM, timeout - (monotonic() - now))
        if granted:
            self._splits.pop(entry.name, None)
            turn = SendDecision(entry, True, claim, kept=now + tick.kept, timeout=left)
        else:
            turn = self._refuse(entry, tick, self._redlock.holder(resource, timeout=left), short)
        self._outage.ended(monotonic())
        return turn

    def _refuse(self, entry: Any, tick: Tick, holder: Holder | None, short: float) -> SendDecision:
        left = 0.0 if holder is None else holder.expires_in or 0.0
        sent = left > _short_of(holder, short) + ATOM
        if holder is None or (holder.nodes < holder.quorum and not sent):
            return self._split(entry)
        self._splits.pop(entry.name, None)
        ours = holder.owner is not None and replace(holder.owner, stamp="") == self._owner
        self._tell(entry, tick, holder, sent, ours)
        if sent and not ours:
            beat_deduplicated.send(
                sender=named(entry.task, self._app),
                resource=holder.resource,
                entry=entry,
                tick=tick.name,
                where="beat",
            )
        if tick.period is None:
            if sent:
                return SendDecision(entry, sent=True)
            coming = math.inf if tick.next_in is None else max(0.0, tick.next_in)
            return stays_due(entry, min(AGAIN, left, coming) + LATE)
        # Due when the one who sent it is due, and after him: he goes on, unless he is gone.
        again = left + tick.margin + LATE
        if sent:
            return SendDecision(
                entry, sent=True, again=again, last=_ago(entry, tick.period - again)
            )
        telling = (tick.kept - short) / 2  # then one could tell
        return stays_due(entry, min(AGAIN, again, telling if telling > LATE else again))

    def _split(self, entry: Any) -> SendDecision:
        """Several beats asked at once, and none got a quorum: again soon, with full jitter."""
        count = self._splits[entry.name] = self._splits.get(entry.name, 0) + 1
        return stays_due(entry, random.uniform(LATE, min(AGAIN, SPLIT * 2.0 ** min(count, 9))))

    def _without_quorum(
        self, entry: Any, error: QuorumUnavailable | None = None, *, for_all: bool = True
    ) -> SendDecision:
        self._outage.met(entry.name, error, monotonic(), for_all=for_all)
        return SendDecision(entry, send=True) if self._outage.send else stays_due(entry, AGAIN)

    def _tell(self, entry: Any, tick: Tick, holder: Holder, sent: bool, ours: bool) -> None:
        if self._told.get(entry.name) == holder.digest:
            return
        self._told[entry.name] = holder.digest
        logger.log(
            logging.DEBUG if ours else logging.INFO,
            "%s %s sent by %s",
            _called(entry, tick),
            "was" if sent else "is being",
            holder.owner or "another program, which holds our key",
        )


def is_guarded(entry: Any) -> bool:
    """Whether an entry is sent by one beat of all, as it is unless its options say otherwise."""
    return _wish(entry) is not False


def _wish(entry: Any) -> Any:
    """What an entry's options, or headers, say of claiming it; True if nothing."""
    # Whatever else they are made of: sending will fail, as it does without us.
    options = entry.options if isinstance(entry.options, Mapping) else {}
    headers = options.get("headers")
    default = headers.get(OPTION, True) if isinstance(headers, Mapping) else True
    return options.get(OPTION, default)


def _called(entry: Any, tick: Tick) -> str:
    return f"{entry.name} ({'due ' if tick.due else ''}{tick.name})"


def _short_of(holder: Holder | None, default: float) -> float:
    """How long the holder's claim was at first; seconds."""
    try:
        return float(holder.owner.stamp) if holder and holder.owner else default
    except ValueError:
        return default  # made by somebody else


def _ago(entry: Any, seconds: float) -> datetime:
    now = maybe_make_aware(entry.default_now())
    then = now.astimezone(timezone.utc) - timedelta(seconds=seconds)
    return then.astimezone(now.tzinfo)
