"""Claim ticks: of all beats that run, one sends each.

A beat that is due claims the tick on the nodes, before it sends. Between the claim and the message
it may die, or the broker be away. Therefore a claim is short at first, extended while the message
is being sent, and then made long: it is *kept*, nobody gives it back, it expires when the next tick
is due (`ticks.py`). A beat that is refused can tell the two by what is left of the claim, because
its token says how long it was at first. If more is left, the tick is sent, and the entry moves on
as if this beat had sent it. If not, the entry stays due, and is tried again a second later.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from hashlib import blake2b
from typing import Any

from celery.utils.time import maybe_make_aware

from ..config.checks import MIN_TTL
from ..keys.canonical import CannotKey, escape, text_of
from ..keys.template import shortened
from ..locking.held import HeldLease
from ..locking.redlock import Redlock
from ..locking.request import LockRequest
from ..messages.signals import beat_deduplicated, named
from ..protocol import quorum
from ..protocol.errors import LeaseLost, QuorumUnavailable, ResourceHeld
from ..protocol.names import checked_names
from ..protocol.values import Holder, Owner, token_digest
from ..runtime.blocking import blocking
from ..runtime.clock import monotonic
from .outage import Outage
from .ticks import Tick, current_tick

__all__ = [
    "AFTER_OTHER_S",
    "OPTION",
    "RETRY_DELAY_S",
    "SendDecision",
    "TickClaims",
    "stays_due",
]

logger = logging.getLogger("celery_redlock.beat")

OPTION = "redlock"
"""An entry's option (or, where its scheduler has none, message header): False to leave it alone."""
ROUTING = ("queue", "exchange", "routing_key")
"""Options of an entry that say where its message goes."""
USUAL_QUEUE = "celery"
"""Where it goes if nothing says so (`task_default_queue`)."""
RETRY_DELAY_S = 1.0
"""Seconds until an entry that could not be decided upon is tried again; how late a tick may be."""
BROKEN_DELAY_S = 60.0
"""The same if its schedule raises: its author has to correct it, and the log has the traceback."""
AFTER_OTHER_S = 0.01
"""Seconds by which a beat looks later than the one that sent last, so that it finds that claim."""
MIN_SHORT_S = 0.5
"""Seconds that a claim lasts at first, at least, if it is to be kept for so long: time to send."""
NODE_RESOLUTION_S = 0.001
"""Seconds that nodes tell apart."""


@dataclass(frozen=True)
class SendDecision:
    """What a beat does with a tick that is due.

    Attributes:
        entry: The entry, as it was when it was found to be due.
        send: Whether it is this beat's to send.
        claim: What it holds in that case; None if it sends without.
        sent: Otherwise: whether another beat has certainly sent it.
        again: Seconds until the entry is looked at again; None for its regular time.
        last: When the entry is to remember that it was sent, if that is not now.
        count: How often it is to remember that it was, if not once more.
    """

    entry: Any
    send: bool = False
    claim: TickClaim | None = None
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
        kept: Until when it is kept once it is sent; seconds of the clock of leases.
        left: How long to wait for the nodes then; seconds.
    """

    tick = ""
    kept = left = 0.0

    def finish(self, sent: bool, *, ended: bool = False) -> None:
        """Keep it, because its message has left; or let another beat send it.

        `ended`: this beat was told to end meanwhile. The broker may have the message all the same.
        """
        late = self.lost
        if sent and not self.keep(self.kept - monotonic(), timeout=self.left):
            logger.warning(
                "%s was sent after its claim had ended: another beat may have sent it too"
                if late
                else "%s is sent, but a quorum could not be told: another beat may send it again",
                self.tick,
            )
        elif not sent:
            self.release()
            if not late:
                logger.warning(
                    "%s may have been sent as this beat was ended: its claim is freed, and another"
                    " beat sends it, perhaps again"
                    if ended
                    else "%s could not be sent from here: its claim is freed, for another beat",
                    self.tick,
                )

    def outlived(self, holder: Holder) -> bool:
        """Free it if it is what a node still keeps past its end (etcd does); return whether."""
        mine = monotonic() >= self.kept and holder.digest == token_digest(self.token)
        if mine:
            blocking(
                self.redlock.client.ask(partial(quorum.release, self._known_claim(), patience=0.0))
            )
        return mine

    def _say_lost(self, loss: LeaseLost) -> None:
        logger.error(
            "%s is still being sent after %.1f s: its claim has ended (%s), and another beat sends"
            " it; does the broker hang?",
            *(self.tick, loss.held_for, loss.reason),
        )


class TickClaims:
    """The claims of one beat.

    Args:
        app: The Celery app, whose name tells its entries from another's.
        redlock: Where ticks are claimed.
        on_unavailable: "hold" or "send".
    """

    def __init__(self, app: Any, redlock: Redlock, on_unavailable: str) -> None:
        self._app = app
        self._redlock = redlock
        self._owner = Owner(socket.gethostname(), os.getpid())
        self._outage = Outage(RETRY_DELAY_S, send=on_unavailable == "send")
        self._told: dict[str, str] = {}
        self._warned: set[str] = set()
        self._kept: dict[str, TickClaim] = {}

    @property
    def resources(self) -> str:
        """What the names of all that is claimed begin with."""
        return f"beat:{escape(str(self._app.main or ''))}:"

    def decide(self, entry: Any, timeout: float) -> SendDecision:
        """Claim the tick of an entry that is due; return what to do with it.

        The nodes are waited for `timeout` seconds at most, in all: they are asked for the tick, and
        then either for its holder or to keep it.
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
            return stays_due(entry, BROKEN_DELAY_S)

    def _claim(self, entry: Any, tick: Tick, timeout: float) -> SendDecision:
        names = f"{escape(str(entry.name))}:{_message(entry, self._app.conf)}"
        resource = shortened(f"{self.resources}{names}:{tick.name}")
        now = monotonic()
        # Half of what it is to be kept, so that one can tell; but long enough to ask nodes for.
        longest = max(tick.kept / 2, min(tick.kept, MIN_SHORT_S))
        short = max(MIN_TTL, min(self._redlock.ttl, longest))
        patience = min(timeout, short / 2)
        owner = replace(self._owner, stamp=f"{short:.3f}")
        request = LockRequest(
            names=checked_names(resource), ttl=short, owner=owner, patience=patience
        )
        # One that hangs between claim and message must not keep the others waiting for good.
        claim = TickClaim(self._redlock, request, max_lifetime=self._redlock.ttl)
        claim.tick = _in_log(entry, tick)
        claim.kept = now + tick.kept
        decision: SendDecision | None = SendDecision(entry, True, claim)
        try:
            claim.acquire()
            self._kept[entry.name] = claim
        except ResourceHeld:
            decision = None
        except QuorumUnavailable as error:
            # Another entry may be less in a hurry.
            return self._without_quorum(entry, error, for_all=patience == timeout)
        claim.left = max(NODE_RESOLUTION_S, timeout - (monotonic() - now))
        if decision is None:
            holder = self._redlock.holder(resource, timeout=claim.left)
            before = self._kept.get(entry.name)
            if holder is not None and before is not None and before.outlived(holder):
                decision = stays_due(entry, AFTER_OTHER_S)
            elif holder is not None and (decision := refused(entry, tick, holder, short)):
                self._tell(decision, tick, holder)
        self._outage.ended(monotonic())
        # Several beats asked at once, and none got a quorum: one is to ask before the others.
        most = min(RETRY_DELAY_S, timeout)
        return decision or stays_due(entry, random.uniform(AFTER_OTHER_S, most))

    def _without_quorum(
        self, entry: Any, error: QuorumUnavailable | None = None, *, for_all: bool = True
    ) -> SendDecision:
        self._outage.met(entry.name, error, monotonic(), for_all=for_all)
        if self._outage.send:
            return SendDecision(entry, send=True)
        return stays_due(entry, RETRY_DELAY_S)

    def _tell(self, decision: SendDecision, tick: Tick, holder: Holder) -> None:
        """Say who sends a tick: to the log once, and to the signal if it is sent."""
        entry, sent = decision.entry, decision.sent
        ours = holder.owner is not None and replace(holder.owner, stamp="") == self._owner
        if self._told.get(entry.name) != holder.digest:
            self._told[entry.name] = holder.digest
            logger.log(
                logging.DEBUG if ours else logging.INFO,
                "%s %s sent by %s",
                _in_log(entry, tick),
                "was" if sent else "is being",
                holder.owner or "another program, which holds our key",
            )
        if sent and not ours:
            beat_deduplicated.send(
                sender=named(entry.task, self._app),
                resource=holder.resource,
                entry=entry,
                tick=tick.name,
                where="beat",
            )


def refused(entry: Any, tick: Tick, holder: Holder, short: float) -> SendDecision | None:
    """Return what follows from another beat's claim; None if no beat has the tick.

    A claim of ours would last `short` seconds at first.
    """
    left = holder.expires_in or 0.0
    at_first = short
    with suppress(ValueError):  # of a key that somebody else has made
        at_first = float(holder.owner.stamp) if holder.owner else short
    sent = left > at_first + NODE_RESOLUTION_S
    if holder.nodes < holder.quorum and not sent:
        return None
    if tick.period is None:
        if sent:
            return SendDecision(entry, sent=True)
        coming = math.inf if tick.next_in is None else max(0.0, tick.next_in)
        return stays_due(entry, min(RETRY_DELAY_S, left, coming) + AFTER_OTHER_S)
    # Due when the beat that sent it is due, and after it: that one goes on, unless it is gone.
    again = left + tick.margin + AFTER_OTHER_S
    if sent:
        return SendDecision(entry, sent=True, again=again, last=_ago(entry, tick.period - again))
    telling = (tick.kept - short) / 2  # then one could tell
    soon = telling if telling > AFTER_OTHER_S else again
    return stays_due(entry, min(RETRY_DELAY_S, again, soon))


def _message(entry: Any, conf: Any) -> str:
    """Name what an entry sends: by its task, and a digest of its arguments and its queue, if any.

    Apps of one name may share a Redis and have entries of one name, and none may keep the other
    from sending what is another message. Where arguments have no stable text, they do not count.
    """
    options = entry.options if isinstance(entry.options, Mapping) else {}
    prefix = (conf.broker_transport_options or {}).get("global_keyprefix", "")
    queue = f"{prefix}{conf.task_default_queue}"
    where = {name: str(options[name]) for name in ROUTING if options.get(name)}
    if queue != USUAL_QUEUE:
        where["default"] = queue
    arguments = ""
    with suppress(CannotKey):
        arguments = text_of([entry.args, entry.kwargs]) if entry.args or entry.kwargs else ""
    if not where and not arguments:
        return escape(str(entry.task))
    digest = blake2b((text_of(where) + arguments).encode("ascii"), digest_size=6).hexdigest()
    return f"{escape(str(entry.task))}~{digest}"


def _wish(entry: Any) -> Any:
    """What an entry's options, or headers, say of claiming it; True if nothing."""
    # Whatever else they are made of: sending will fail, as it does without us.
    options = entry.options if isinstance(entry.options, Mapping) else {}
    headers = options.get("headers")
    default = headers.get(OPTION, True) if isinstance(headers, Mapping) else True
    return options.get(OPTION, default)


def _in_log(entry: Any, tick: Tick) -> str:
    return f"{entry.name} ({'due ' if tick.due else ''}{tick.name})"


def _ago(entry: Any, seconds: float) -> datetime:
    now = maybe_make_aware(entry.default_now())
    then = now.astimezone(timezone.utc) - timedelta(seconds=seconds)
    return then.astimezone(now.tzinfo)
