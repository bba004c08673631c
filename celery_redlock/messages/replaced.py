"""Take the place of a queued call (`on_duplicate="replace"`), in an order that loses neither call.

The reservation of the old call is released first. Then the reservation of the new call is taken,
and then its message is sent: only in this order no worker can release it too early. The old call is
revoked when the new one is out. If a worker begins the old call before that, it runs, and sets a
mark on the nodes. If the new message cannot be sent, the reservation of the old call is restored,
unless that mark shows that the old call has begun.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from ..locking.redlock import Redlock
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.texts import event, printable
from ..protocol.values import Owner, Query, token_digest
from .headers import short_id
from .reservation import BEGUN, HOUR, REPLACED, free, mark_of, take, unsent_ttl
from .revokes import end

__all__ = ["Places", "note_begun"]

logger = logging.getLogger("celery_redlock.task")

BEGUN_LIFE_S = 600.0
"""The ttl of the mark that a message has begun whose place was just taken, in seconds: longer than
the new call tries to send its own message."""


class Places:
    """The queued calls whose reservations were released for a new call.

    At the end of its `with` block the new call takes their places, or they are restored.

    Args:
        redlock: The nodes where they are reserved.
        task: The task that is called.
        task_id: The id that was given to the new call, if any.
        ttl: The ttl of the body's lock; seconds.

    Attributes:
        freed: Claims on the released reservations; the ttl of each is the time it had left, in
            seconds.
        taken: True if the message of the new call is out.
    """

    def __init__(self, redlock: Redlock, task: Any, task_id: Any, ttl: float) -> None:
        self._redlock = redlock
        self._task = task
        self._task_id = task_id
        self._short = unsent_ttl(ttl)
        self.freed: list[Claim] = []
        self.taken = False

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_error: object) -> None:
        for claim in reversed(self.freed):
            (self._revoke if self.taken else self._restore)(claim)

    def _revoke(self, freed: Claim) -> None:
        """Revoke a call whose place is taken. It never raises, because the new call is out."""
        owner = Owner.of(freed.token)
        assert owner is not None
        called = printable(self._task.name), printable(owner.task_id)
        if owner.task_id == short_id(self._task_id):
            why = "revoking it would revoke this one as well; leave task_id out to replace it"
            logger.warning(
                f"%s is queued twice under the id %s: {why}",
                *called,
                extra=event("replaced_task_stays"),
            )
            return
        try:
            # Workers forget a revoke when they end, and it does not reach workers that start later.
            _set_mark(self._redlock, freed, REPLACED, max(freed.ttl, HOUR))
            end(self._task.app, owner.task_id, token_digest(freed.token))
            logger.info("%s replaces task %s", *called, extra=event("queued_task_replaced"))
        except Exception as error:
            line = "%s replaces task %s, which could not be revoked and may run as well: %r"
            logger.warning(line, *called, error, extra=event("replaced_task_stays"))

    def _restore(self, freed: Claim) -> None:
        """Reserve the key again for a message that stays, unless its body has begun meanwhile.

        A body that begins sets its mark before it can release a reservation that is set here. So
        the mark is read after the reservation is set. The reservation gets a short ttl at first,
        because this process may end before it has the answer.
        """
        redlock = self._redlock
        claim = Claim(freed.resources, freed.token, min(freed.ttl, self._short), freed.nodes)
        if take(redlock, claim) is not None:
            return
        asked = Query((mark_of(claim, BEGUN),), claim.nodes)
        patience = redlock.node_timeout
        ballot = redlock.client.driver.run(lambda now: quorum.peek([asked], now, patience))
        if outcome.tokens(ballot):  # one node is enough: a forged mark can only cost a duplicate
            free(redlock, claim)
        elif freed.ttl > self._short and ballot.yes >= ballot.quorum:
            # No node counts as sure here: it may have been released on any of them by now.
            redlock.client.prolonging.soon(claim, freed.ttl, (), below=math.inf)


def note_begun(redlock: Redlock, claim: Claim) -> None:
    """Set a mark on the nodes: a message has begun without the reservation that it had."""
    _set_mark(redlock, claim, BEGUN, BEGUN_LIFE_S)


def _set_mark(redlock: Redlock, claim: Claim, what: str, life: float) -> None:
    """Set the mark `what` for the message of a claim, for `life` seconds."""
    bearer = Claim(claim.resources, claim.token, claim.ttl, claim.nodes)
    bearer.mark = mark_of(claim, what), life
    free(redlock, bearer, redlock.node_timeout)
