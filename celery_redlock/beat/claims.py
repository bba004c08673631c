"""Claim ticks, so that each tick is sent by one of the running beats.

Before a beat sends a due tick, it claims the tick on the nodes. Between the claim and the message
the beat may die, or the broker may be down. Therefore a claim is short at first, extended while the
message is being sent, and then made long: it is *kept*. Nobody releases a kept claim; it expires
when the next tick is due (`ticks.py`). A beat that is refused can distinguish the two by the time
left of the claim, because its token contains its first ttl. If more is left than that, the tick is
sent, and the entry moves on as if this beat had sent it. If not, the entry stays due, and is tried
again a second later.
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
from ..protocol.texts import event
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
"""Name of an entry's option (or, if its scheduler has no options, of a message header); with False
the entry is sent without a claim."""
ROUTING = ("queue", "exchange", "routing_key")
"""Options of an entry that route its message."""
DEFAULT_QUEUE = "celery"
"""The queue of a message without such options (`task_default_queue`)."""
RETRY_DELAY_S = 1.0
"""Seconds until an undecided entry is tried again; so late a tick may be."""
BROKEN_DELAY_S = 60.0
"""Seconds until an entry is tried again if its schedule raises: its author has to correct it, and
the log has the traceback."""
AFTER_OTHER_S = 0.01
"""Seconds by which a beat looks later than the beat that sent last, so that it finds the claim of
that beat."""
MIN_SHORT_S = 0.5
"""Minimum first ttl of a claim in seconds, unless it is kept for less: time to send."""
NODE_RESOLUTION_S = 0.001
"""The resolution of the nodes' times, in seconds."""


@dataclass(frozen=True)
class SendDecision:
    """The decision of a beat about a tick that is due.

    Attributes:
        entry: The entry, in its state when it was found due.
        send: True if this beat sends the tick.
        claim: The claim of this beat, if it sends; None if it sends without a claim.
        sent: If this beat does not send: True if another beat has certainly sent the tick.
        again: Seconds until the entry is looked at again; None for its regular time.
        last: The time to store as the entry's last run, if that is not now.
        count: The count of runs to store in the entry, if not one more.
    """

    entry: Any
    send: bool = False
    claim: TickClaim | None = None
    sent: bool = False
    again: float | None = None
    last: datetime | None = None
    count: int | None = None


def stays_due(entry: Any, again: float) -> SendDecision:
    """Return the decision to leave an entry unchanged and look at it again in `again` seconds."""
    return SendDecision(entry, again=again, last=entry.last_run_at, count=entry.total_run_count)


class TickClaim(HeldLease):
    """The claim of a tick while its message is being sent.

    Attributes:
        tick: The name of the tick in the log.
        kept: The time until which the claim is kept after sending; seconds of the leases' clock.
        left: How long to wait for the nodes then; seconds.
    """

    tick = ""
    kept = left = 0.0

    def finish(self, sent: bool, *, ended: bool = False) -> None:
        """Keep the claim if the message was sent; else release it, for another beat to send.

        `ended` is True if this beat was ended meanwhile. Then the broker may have the message all
        the same.
        """
        late = self.lost
        if sent and not self.keep(self.kept - monotonic(), timeout=self.left):
            logger.warning(
                "%s was sent after its claim had ended: another beat may have sent it too"
                if late
                else "%s was sent, but a quorum has not confirmed that: another beat may send it"
                " again",
                self.tick,
                extra=event("tick_may_repeat"),
            )
        elif not sent:
            self.release()
            if not late:
                logger.warning(
                    "%s may have been sent when this beat was stopped: its claim is released, and"
                    " another beat sends it, perhaps again"
                    if ended
                    else "%s could not be sent from here: its claim is released for another beat",
                    self.tick,
                    extra=event("tick_unsent"),
                )

    def delete_expired(self, holder: Holder) -> bool:
        """Delete our own expired claim if the store still has it (etcd); return True if deleted.

        Args:
            holder: The holder that the nodes report.
        """
        mine = monotonic() >= self.kept and holder.digest == token_digest(self.token)
        if mine:
            blocking(
                self.redlock.client.ask(partial(quorum.release, self._known_claim(), patience=0.0))
            )
        return mine

    def _log_lost(self, loss: LeaseLost) -> None:
        logger.error(
            "%s is still being sent after %.1f s: its claim has ended (%s), and another beat sends"
            " it; does the broker hang?",
            *(self.tick, loss.held_for, loss.reason),
            extra=event("tick_sending_slowly"),
        )


class TickClaims:
    """The claims of one beat.

    Args:
        app: The Celery app; its name distinguishes its entries from those of other apps.
        redlock: The nodes where ticks are claimed.
        on_unavailable: "hold" or "send".
    """

    def __init__(self, app: Any, redlock: Redlock, on_unavailable: str) -> None:
        redlock.client.require("redlock_beat (set it to False, and run one beat)", "ttl_per_key")
        self._app = app
        self._redlock = redlock
        self._owner = Owner(socket.gethostname(), os.getpid())
        self._outage = Outage(RETRY_DELAY_S, send=on_unavailable == "send")
        self._logged: dict[str, str] = {}
        self._warned: set[str] = set()
        self._kept: dict[str, TickClaim] = {}

    @property
    def resources(self) -> str:
        """The prefix of the names of all claims."""
        return f"beat:{escape(str(self._app.main or ''))}:"

    def decide(self, entry: Any, timeout: float) -> SendDecision:
        """Claim the tick of an entry that is due; return the decision about it.

        In all, this waits at most `timeout` seconds for the nodes, which get two requests. The
        first one acquires the claim. The second one makes it long, or looks for its holder if it
        was refused.
        """
        try:
            wish = _claim_option(entry)
            if wish is False:
                return SendDecision(entry, send=True)
            if not isinstance(wish, bool) and entry.name not in self._warned:
                self._warned.add(entry.name)
                logger.warning(
                    "%s is claimed like others: its option %r must be True or False, but is %r",
                    *(entry.name, OPTION, wish),
                    extra=event("tick_option_invalid"),
                )
            if self._outage.pause(monotonic()):
                return self._without_quorum(entry)
            return self._claim(entry, current_tick(entry.schedule, entry.last_run_at), timeout)
        except QuorumUnavailable as error:
            return self._without_quorum(entry, error)
        except Exception:
            # A user's own schedule may raise anything, and an error here would end the whole beat.
            logger.exception(
                "%s is not sent: its schedule raised an error, so the due tick is unknown",
                entry.name,
                extra=event("tick_unknown"),
            )
            return stays_due(entry, BROKEN_DELAY_S)

    def _claim(self, entry: Any, tick: Tick, timeout: float) -> SendDecision:
        names = f"{escape(str(entry.name))}:{_message(entry, self._app.conf)}"
        resource = shortened(f"{self.resources}{names}:{tick.name}")
        now = monotonic()
        # At most half of the time for which it is kept, so that a short claim can be distinguished
        # from a kept one; but long enough to ask the nodes.
        longest = max(tick.kept / 2, min(tick.kept, MIN_SHORT_S))
        short = max(MIN_TTL, min(self._redlock.ttl, longest))
        patience = min(timeout, short / 2)
        owner = replace(self._owner, stamp=f"{short:.3f}")
        request = LockRequest(
            names=checked_names(resource), ttl=short, owner=owner, patience=patience
        )
        # A beat that hangs between claim and message must not keep the others waiting forever.
        claim = TickClaim(self._redlock, request, max_lifetime=self._redlock.ttl)
        claim.tick = _log_name(entry, tick)
        claim.kept = now + tick.kept
        decision: SendDecision | None = SendDecision(entry, True, claim)
        try:
            claim.acquire()
            self._kept[entry.name] = claim
        except ResourceHeld:
            decision = None
        except QuorumUnavailable as error:
            # Another entry may allow a longer patience.
            return self._without_quorum(entry, error, for_all=patience == timeout)
        claim.left = max(NODE_RESOLUTION_S, timeout - (monotonic() - now))
        if decision is None:
            holder = self._redlock.holder(resource, timeout=claim.left)
            before = self._kept.get(entry.name)
            if holder is not None and before is not None and before.delete_expired(holder):
                decision = stays_due(entry, AFTER_OTHER_S)
            elif holder is not None and (decision := refused(entry, tick, holder, short)):
                self._report(decision, tick, holder)
        self._outage.ended(monotonic())
        # Several beats asked at once, and none got a quorum. The random pause lets one ask first.
        most = min(RETRY_DELAY_S, timeout)
        return decision or stays_due(entry, random.uniform(AFTER_OTHER_S, most))

    def _without_quorum(
        self, entry: Any, error: QuorumUnavailable | None = None, *, for_all: bool = True
    ) -> SendDecision:
        self._outage.met(entry.name, error, monotonic(), for_all=for_all)
        if self._outage.send:
            return SendDecision(entry, send=True)
        return stays_due(entry, RETRY_DELAY_S)

    def _report(self, decision: SendDecision, tick: Tick, holder: Holder) -> None:
        """Log once which beat sends a tick, and send the signal if it is sent."""
        entry, sent = decision.entry, decision.sent
        ours = holder.owner is not None and replace(holder.owner, stamp="") == self._owner
        if self._logged.get(entry.name) != holder.digest:
            self._logged[entry.name] = holder.digest
            logger.log(
                logging.DEBUG if ours else logging.INFO,
                "%s %s sent by %s",
                _log_name(entry, tick),
                "was" if sent else "is being",
                holder.owner or "another program, which holds our key",
                extra=event("tick_sent_elsewhere"),
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
    """Return the decision after another beat's claim; None if no beat has the tick.

    `short` is the first ttl that a claim of ours would have, in seconds.
    """
    left = holder.expires_in or 0.0
    at_first = short
    with suppress(ValueError):  # the stamp is not a number if another program has made the key
        at_first = float(holder.owner.stamp) if holder.owner else short
    sent = left > at_first + NODE_RESOLUTION_S
    if holder.nodes < holder.quorum and not sent:
        return None
    if tick.period is None:
        if sent:
            return SendDecision(entry, sent=True)
        coming = math.inf if tick.next_in is None else max(0.0, tick.next_in)
        return stays_due(entry, min(RETRY_DELAY_S, left, coming) + AFTER_OTHER_S)
    # For an interval: become due shortly after the beat that sent it. So that beat goes on sending,
    # and another takes over only if it is gone.
    again = left + tick.margin + AFTER_OTHER_S
    if sent:
        return SendDecision(entry, sent=True, again=again, last=_ago(entry, tick.period - again))
    decidable_in = (tick.kept - short) / 2  # by then a kept claim can be distinguished
    soon = decidable_in if decidable_in > AFTER_OTHER_S else again
    return stays_due(entry, min(RETRY_DELAY_S, again, soon))


def _message(entry: Any, conf: Any) -> str:
    """Return a name for an entry's message: its task, and a digest of its arguments and queue.

    Apps with the same name may share a Redis and have entries with the same name. If their messages
    differ, none may keep the other from sending. Arguments without a stable text do not count.
    """
    options = entry.options if isinstance(entry.options, Mapping) else {}
    prefix = (conf.broker_transport_options or {}).get("global_keyprefix", "")
    queue = f"{prefix}{conf.task_default_queue}"
    where = {name: str(options[name]) for name in ROUTING if options.get(name)}
    if queue != DEFAULT_QUEUE:
        where["default"] = queue
    arguments = ""
    with suppress(CannotKey):
        arguments = text_of([entry.args, entry.kwargs]) if entry.args or entry.kwargs else ""
    if not where and not arguments:
        return escape(str(entry.task))
    digest = blake2b((text_of(where) + arguments).encode("ascii"), digest_size=6).hexdigest()
    return f"{escape(str(entry.task))}~{digest}"


def _claim_option(entry: Any) -> Any:
    """Return the value of `OPTION` in an entry's options, or its headers; True without one."""
    # Options of a wrong type are ignored here: sending will fail, as it would without us.
    options = entry.options if isinstance(entry.options, Mapping) else {}
    headers = options.get("headers")
    default = headers.get(OPTION, True) if isinstance(headers, Mapping) else True
    return options.get(OPTION, default)


def _log_name(entry: Any, tick: Tick) -> str:
    return f"{entry.name} ({'due ' if tick.due else ''}{tick.name})"


def _ago(entry: Any, seconds: float) -> datetime:
    now = maybe_make_aware(entry.default_now())
    then = now.astimezone(timezone.utc) - timedelta(seconds=seconds)
    return then.astimezone(now.tzinfo)
