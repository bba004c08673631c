"""One request for a lock: its tries, and its waits between them.

A node *notifies* (or calls) a waiter when a release has freed its resource (`wait_queue.py`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..events import Ask, emit, has_listeners
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.errors import NotAcquired, QuorumUnavailable, ResourceHeld
from ..protocol.lease import Lease
from ..protocol.names import Limits, grouped, of_each, slots_of, takeable
from ..protocol.round import Round, Steps, Verb
from ..protocol.values import SHARED, QueueEntry, quorum_of
from ..runtime.clock import monotonic
from ..stores.kinds import lock_key
from .request import LockRequest
from .wait_queue import JITTER, Waiter, all_refused

if TYPE_CHECKING:
    from .client import LockClient

__all__ = ["STAND_BACK_S", "Acquisition"]

POLL_S, POLL_MAX_S = 0.004, 0.5
"""Seconds between tries if no node will notify us: full jitter up to the first value, which is
doubled after each try, up to the second."""
SPLIT_MAX_S = 0.064
"""Maximum seconds between tries after a split vote, which no holder caused."""
LOOK_AFTER_S = (0.1, 0.2)
"""Seconds until the nodes are asked how long the holder's ttl lasts: most holders release before
that."""
FREE_AFTER_S = (0.1, 0.3)
"""Seconds until a waiter tries after it has looked and found the lock free: most likely the waiter
before it has just been notified, and a try now would only be in its way."""
RETRY_AFTER_S = (1.0, 2.0)
"""Seconds after which a waiter tries without a notification: a notification can be lost."""
STAND_BACK_S = (0.02, 0.06)
"""Seconds for which we leave a lock that we have just released to the waiter that was notified."""


class Acquisition:
    """One request for a lock, from its first try to its last.

    Args:
        client: The client that asks the nodes.
        request: The request.
        adopt: Called with the claim of each try before the nodes are asked, so that the caller can
            release it if it is interrupted.
    """

    def __init__(
        self, client: LockClient, request: LockRequest, adopt: Callable[[Claim], None]
    ) -> None:
        self._client = client
        self._request = request
        self._adopt = adopt
        self._tries = 0
        self._is_chosen = False  # True if a quorum had notified us before the last try

    async def run(self) -> Claim:
        """Acquire the lock, and report the outcome to listeners.

        Raises:
            NotAcquired: The last try was refused.
        """
        if not has_listeners():
            return await self._run()
        began = monotonic()
        try:
            claim = await self._run()
        except NotAcquired as refusal:
            self._report(began, None, refusal)
            raise
        self._report(began, claim.lease(monotonic), None)
        return claim

    def _report(self, began: float, lease: Lease | None, refusal: NotAcquired | None) -> None:
        request, nodes = self._request, len(self._client.addresses)
        ask = Ask(
            resource=request.resource,
            owner=request.owner or self._client.owner,
            lease=lease,
            refusal=refusal,
            waited=monotonic() - began,
            attempts=self._tries,
            nodes=nodes,
            quorum=quorum_of(nodes),
        )
        emit("acquire_finished", ask)

    async def _run(self) -> Claim:
        request = self._request
        names, wait = request.names, request.wait
        if wait > 0 and len(names) == 1 and self._client.has_notified(names[0], STAND_BACK_S[0]):
            return await self._wait(names, stand_back=True)
        try:
            return await self._try(known_full=False)
        except NotAcquired as error:
            # If it is known when the nodes will have a vote again, no try can succeed before.
            known = error.retry_after if isinstance(error, QuorumUnavailable) else None
            if wait <= (known or 0.0):
                raise
            names = self._in_the_way(error)
        return await self._wait(names)

    # -- One try ---------------------------------------------------------------------------------

    async def _try(self, entry: QueueEntry | None = None, *, known_full: bool = True) -> Claim:
        """Try once; join the wait queues of `entry` right before."""
        request = self._request
        try:
            if request.limit == 1 and request.rate is None:
                return await self._attempt(request.names, entry=entry)
            if entry is not None:
                await self._queue(entry, Verb.ENQUEUE)
            return await self._attempt_slots(request, known_full)
        except NotAcquired as error:
            raise self._client.refused(error) from None

    async def _attempt_slots(self, request: LockRequest, known_full: bool) -> Claim:
        """Acquire a slot of each name: a random one first; if it is taken, a slot seen to be free.

        If all are known to be taken (`known_full`), look for free slots at once.
        """
        names, limit, shown_as = request.names, request.limit, request.resource
        every = slots_of(names, limit)
        # Not under a lowered limit: a slot may be free although as many bodies run as may.
        if not (known_full or (isinstance(limit, Limits) and limit.wide)):
            with contextlib.suppress(ResourceHeld):
                return await self._attempt([JITTER.choice(slots) for slots in every], shown_as)
        ballot = await self._client.peek(names, limit)
        free = takeable(names, limit, outcome.free(ballot))
        for slots in free:
            JITTER.shuffle(slots)
        lost = None
        while all(free):
            try:
                return await self._attempt([slots[-1] for slots in free], shown_as)
            except ResourceHeld as error:
                lost = error.holder
                for slots in free:
                    if not error.conflicting or slots[-1] in error.conflicting:
                        slots.pop()
        queries = grouped(range(len(ballot.claims)), every)
        each = zip(names, of_each(names, limit), queries, free, strict=True)
        full = {name: (many, numbers) for name, many, numbers, slots in each if not slots}
        raise outcome.all_held(shown_as, full, ballot, self._client.nodes, lost, request.rate)

    async def _attempt(
        self, names: Sequence[str], shown_as: str = "", entry: QueueEntry | None = None
    ) -> Claim:
        """Ask the nodes for some names, with a new claim; raise the reason if it is not granted."""
        client, request = self._client, self._request
        claim = self._new_claim(names)
        claim.resource = shown_as or claim.resource
        self._tries += 1
        self._adopt(claim)
        client.remember(claim)
        patience = request.patience or client.patience(claim.ttl)

        def operation(now: float) -> Steps[Round]:
            if request.rate is not None:
                return quorum.start(claim, now, patience, request.rate)
            if not request.fencing:
                return quorum.acquire(claim, now, patience)
            # Make the proposal after `now`: if the process is stopped in between, it asks too late.
            return quorum.acquire(claim, now, patience, client.proposal(), client.wall())

        ahead = None if entry is None else partial(quorum.queue_round, entry)
        try:
            ballot = await client.ask(operation, ahead)
        except BaseException:
            if claim.ended:  # interrupted while it was being undone: some nodes may still have it
                await client.ask(lambda now: quorum.undo(claim, now))
            raise
        if claim.granted_at is not None:
            client.granted(claim, ballot)
            return claim
        client.forget(claim)
        error = outcome.refusal(claim.resource, ballot, client.nodes, claim.ttl)
        if isinstance(error, ResourceHeld) and (error.holder is None or error.holder.owner is None):
            look = await client.ask(lambda now: quorum.peek([claim], now, patience))
            if outcome.add_readers(ballot, look):
                raise outcome.refusal(claim.resource, ballot, client.nodes, claim.ttl)
            keys = [lock_key(client.addresses[0], client.prefix, name) for name in claim.resources]
            error = outcome.if_permanent(error, look, client.nodes, keys)
        raise error

    def _new_claim(self, names: Sequence[str]) -> Claim:
        client, request = self._client, self._request
        if request.rate is None and request.ttl > client.guard.longest:
            client.guard.expect(request.ttl)
        nonce = os.urandom(16).hex() + (SHARED if request.shared else "")
        token = (request.owner or client.owner).token(nonce, time.time())
        ttl = min(request.ttl, client.longest_ttl)
        claim = Claim(names, token, ttl, len(client.addresses))
        claim.recall = request.recall
        return claim

    # -- The wait for the next try ---------------------------------------------------------------

    async def _wait(self, names: tuple[str, ...], *, stand_back: bool = False) -> Claim:
        """Stand in the wait queues of `names`, and try when a release notifies us.

        Args:
            names: The names of the request that others hold.
            stand_back: Let the waiter that our last release notified try before us.
        """
        client, wait = self._client, self._request.wait
        with client.wakeup.waiter() as waiter:
            member = waiter.member + (SHARED if self._request.shared else "")
            self._entry = QueueEntry(names, len(client.addresses), member, waiter.since)
            verb = Verb.HAND_ON
            try:
                if stand_back:
                    waiter.forget()
                    await self._queue(self._entry, Verb.ENQUEUE)
                    await waiter.wait(min(wait, JITTER.uniform(*STAND_BACK_S)))
                claim = await self._retry(waiter, is_queued=stand_back)
                verb = Verb.DEQUEUE
                return claim
            finally:
                there = set(range(self._entry.nodes))
                if verb is Verb.DEQUEUE and len(self._entry.resources) == 1:
                    # A node whose notification is under way takes us out of its queue by itself, at
                    # the latest when we release. Asked before, it would notify the next waiter.
                    there = set() if self._is_chosen and waiter.left_by else there - waiter.left_by
                if there:
                    await self._queue(self._entry, verb, there)
                    if client.driver.is_leaving():  # a node may just have been lost
                        client.watchdog.retry_soon()

    async def _retry(self, waiter: Waiter, *, is_queued: bool) -> Claim:
        """Try until the lock is granted or the time is over.

        Args:
            waiter: Counts the nodes that notify us.
            is_queued: True if we stand in the queue behind a waiter that was notified just now.
                Then we do not try before we are notified, because that would only be in its way.
        """
        until = time.monotonic() + self._request.wait
        failures, notified = 0, True
        if is_queued and waiter.is_subscribed and not waiter.is_notified:
            notified = await self._wait_for_notification(waiter, until)
        while True:
            # A waiter that a quorum has notified will most likely be granted the lock: it tries
            # without joining the queue again.
            chosen = notified and waiter.sure and waiter.notifications >= waiter.quorum
            self._is_chosen = chosen
            if not chosen:
                self._client.wakeup.catch_up()  # late notifications must not count as new
                waiter.forget()
            try:
                return await self._try(None if chosen else self._entry)
            except NotAcquired as error:
                refusal = error
                if waiter.closed or time.monotonic() >= until:
                    raise
            was_queued = await self._queue_for(self._in_the_way(refusal))
            if chosen:
                waiter.forget()  # that notification was of no use: join the queue again
                continue
            held = waiter.is_subscribed and isinstance(refusal, ResourceHeld)
            if not (held and was_queued) or all_refused(refusal):
                # No release will notify us, or there is no holder to release it: try again soon.
                failures += 1
                most = min(SPLIT_MAX_S if held else POLL_MAX_S, POLL_S * 2.0 ** min(failures, 16))
                await waiter.wait(min(JITTER.uniform(0, most), until - time.monotonic()))
                continue
            failures = 0
            if notified:
                notified = await self._wait_for_notification(waiter, until)
            else:
                notified = await self._wait_for_holder(waiter, until)

    async def _wait_for_notification(self, waiter: Waiter, until: float) -> bool:
        """Wait to be notified, at first without asking the nodes; return True if we were."""
        soon = min(JITTER.uniform(*LOOK_AFTER_S), until - time.monotonic())
        notified = await waiter.wait(soon)
        return notified or await self._wait_for_holder(waiter, until)

    async def _wait_for_holder(self, waiter: Waiter, until: float) -> bool:
        """Wait to be notified, no longer than the holder's ttl; return True if we were.

        The holder may have died, and then nobody releases the lock.
        """
        seconds = JITTER.uniform(*RETRY_AFTER_S)
        with contextlib.suppress(QuorumUnavailable):
            part = self._request.part(self._entry.resources)
            ballot = await self._client.peek(part.names, part.limit, shared=part.shared)
            left = outcome.room_in(ballot, slots_of(part.names, part.limit))
            seconds = min(seconds, left if left > 0 else JITTER.uniform(*FREE_AFTER_S))
        return await waiter.wait(min(seconds, until - time.monotonic()))

    def _in_the_way(self, refusal: NotAcquired) -> tuple[str, ...]:
        """Return the names of ours that others hold; all names if the nodes did not say which."""
        conflicting = refusal.conflicting if isinstance(refusal, ResourceHeld) else ()
        return conflicting or self._request.names

    async def _queue_for(self, names: tuple[str, ...]) -> bool:
        """Stand in the queues of `names` from the next try on; return True if we already do."""
        entry = self._entry
        free = tuple(name for name in entry.resources if name not in names)
        if free:  # leave them to others; the release of one may have notified us
            left = replace(entry, resources=free)
            if self._request.limit != 1:
                # HAND_ON looks at one slot only, but always notifies if we stand in no queue.
                await self._queue(left, Verb.DEQUEUE)
            await self._queue(left, Verb.HAND_ON)
        self._entry = replace(entry, resources=names)
        return set(names) <= set(entry.resources)

    async def _queue(self, entry: QueueEntry, verb: Verb, nodes: set[int] | None = None) -> None:
        await self._client.ask(lambda now: quorum.queue(entry, now, verb, nodes))
