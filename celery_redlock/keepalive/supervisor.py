"""Extends the leases of processes that are late, and releases the leases of dead processes.

Each process extends its own leases in a thread. That thread stands still while the process is
stopped or a C call keeps the GIL, and it ends with the process. So a supervisor in another process
(the main process of a prefork worker, or a sidecar, `sidecar.py`) reads the table in which holders
record what they hold (`shared_table.py`). It extends a lease when more than half of its ttl is
gone. When a holder is dead, and its body with it, the supervisor deletes its tokens.

It does not assume a death, it watches the pids. Celery's main process learns of a child's death 0.1
to 5 seconds late, and of some deaths not at all; and it announces a hard time limit or a
terminating revocation while the child is still alive.

A supervisor never sets a missing key again (`Verb.RENEW`): its connections are not the holder's, so
its request may arrive after the release.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import time
from functools import partial

from ..events import emit, heard
from ..protocol import quorum
from ..protocol.claim import Claim
from ..protocol.commands import RESERVED_SUFFIX
from ..protocol.lease import Lease
from ..protocol.round import Verb
from ..protocol.values import Owner
from ..runtime.clock import monotonic
from ..stores.redis.driver import Driver
from .shared_table import LeaseRecord, SharedLeaseTable

__all__ = ["LeaseSupervisor"]

logger = logging.getLogger("celery_redlock.keeper")

LATE = 1 / 2
"""A holder extends when a third of the ttl is gone; the supervisor when this part is."""
LOOKS = 1 / 10
"""How long it waits between two looks, as a part of the shortest ttl in the table."""
OFTEN, SELDOM = 0.02, 0.5
"""Seconds between two looks, at least and at most."""
UNWATCHED = 0.1
"""Seconds between two looks where the system cannot tell of a death by itself."""
LINGER = 0.8
"""Seconds for the processes of a client that is gone to be dead as well."""
SILENCE = 0.5
"""Seconds that a holder has to report its loss itself."""

Name = tuple[int, int]
"""The slot and generation of a record."""


class LeaseSupervisor:
    """Watches over the leases of one table. Runs in one thread.

    Args:
        table: What the other processes hold.
        driver: The nodes, over the supervisor's own connections.
        node_timeout: How long to wait for a node, in seconds.
        client: A descriptor that reaches its end when the client that owns the table ends; None if
            that is this process.
    """

    def __init__(
        self,
        table: SharedLeaseTable,
        driver: Driver,
        node_timeout: float,
        client: int | None = None,
    ) -> None:
        self._table = table
        self._driver = driver
        self._node_timeout = node_timeout
        self._claims: dict[Name, Claim] = {}
        self._over: dict[Name, float] = {}
        self._watched: dict[int, int | None] = {}  # pidfd by block
        self._poll = select.poll()
        self._poll.register(table.ring, select.POLLIN)
        self._alone = False
        self._client = client
        if client is not None:
            self._poll.register(client, select.POLLIN)
        self._period = SELDOM

    def run(self) -> None:
        """Keep, until the client is gone; then free what its processes leave as they die."""
        # Begun now and not waited for later: what is late has no time.
        self._driver.connect(0.1)
        while not self._alone:
            self.run_once()
        self._finish()

    def run_once(self) -> None:
        """Do what is to be done, and wait for more."""
        try:
            self._look()
            self._await()
        except BaseException:
            # Leases must not end for one bug; the next look may do better.
            logger.exception("could not keep the locks of other processes")
            with contextlib.suppress(BaseException):
                select.select([], [], [], self._period)

    def _finish(self) -> None:
        """Free what is left by processes that are being killed; extend nothing more."""
        until = monotonic() + LINGER
        while True:
            # Asked once more after the last moment: this process may have stood still as well.
            over = monotonic() >= until
            for block, pid in list(self._table.blocks()):
                if self._dead(block, pid):
                    self._reap(block, pid)
            if over or not any(self._table.blocks()):
                return
            select.select([], [], [], OFTEN)

    def _await(self) -> None:
        period = self._period
        if None in self._watched.values():
            period = min(period, UNWATCHED)
        for fd, _event in self._poll.poll(period * 1000):
            if fd == self._client:
                self._alone = True
            elif fd == self._table.ring:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)

    def _look(self) -> None:
        """Look through the whole table for dead holders and late leases."""
        now = monotonic()
        seen: dict[Name, Claim] = {}
        late: list[tuple[LeaseRecord, Claim]] = []
        shortest = SELDOM / LOOKS
        for block, pid in list(self._table.blocks()):
            if self._dead(block, pid):
                self._reap(block, pid)
                continue
            for note in self._table.records(block):
                shortest = min(shortest, note.ttl)
                if not note.held:
                    continue
                name = note.name
                claim = seen[name] = self._claim(note, now)
                if not claim.held(now):
                    self._lost(name, note, claim, pid, now)
                elif now < note.until and claim.deadline - now < note.ttl * LATE:
                    late.append((note, claim))
        self._claims = seen
        self._over = {name: since for name, since in self._over.items() if name in seen}
        self._period = min(max(shortest * LOOKS, OFTEN), SELDOM)
        self._table.looks_every(self._period)
        if late:
            self._extend(late, now)

    def _claim(self, note: LeaseRecord, now: float) -> Claim:
        """What this keeper knows of a note, and what its holder has written since."""
        claim = self._claims.get(note.name)
        if claim is not None:
            news = claim.learn(note.expiries)
            if claim.lost is None or not news:
                return claim
        # Unknown; or lost, as far as was known here, but its holder has known better.
        fresh = _Charge(self._table, note)
        if claim is None and note.kept:
            fresh.expiries = list(note.kept)  # of a keeper that is no more; now this one's
        fresh.learn(note.expiries)
        fresh.granted_at = now
        return fresh

    def _extend(self, late: list[tuple[LeaseRecord, Claim]], now: float) -> None:
        claims = [claim for _note, claim in late]
        patience = min(min(c.deadline - now, c.ttl / 10, self._node_timeout) for c in claims)
        self._driver.extend(claims, max(0.001, patience), Verb.RENEW)
        for note, claim in late:
            self._table.extended(note, claim.acknowledgements())

    def _lost(self, name: Name, note: LeaseRecord, claim: Claim, pid: int, now: float) -> None:
        """Its holder tells of a loss; unless it cannot."""
        if now - self._over.setdefault(name, now) >= SILENCE:
            self._over[name] = math.inf
            logger.error(
                "lost the lock %s held by %s: %s; process %d is stopped or busy and has not"
                " noticed: its work may overlap with another's",
                note.resource,
                Owner.of(note.token),
                claim.lost,
                pid,
            )

    def _reap(self, block: int, pid: int) -> None:
        """Release the leases of a dead process."""
        left = list(self._table.records(block))
        claims = [Claim(n.resources, n.token, n.ttl, self._table.nodes) for n in left]
        frees = [partial(quorum.free, claim, patience=self._node_timeout) for claim in claims]
        freed = self._driver.run_all(frees) if frees else []
        for note, round_ in zip(left, freed, strict=True):
            if round_.yes + round_.no >= round_.quorum:
                logger.warning("freed %s, which process %d held when it died", note.resource, pid)
                if heard() and note.held and not note.resource.endswith(RESERVED_SUFFIX):
                    self._tell(note)
            else:
                logger.warning(
                    "cannot free %s, which process %d held when it died: too few nodes answer; its"
                    " ttl will",
                    note.resource,
                    pid,
                )
        self._table.clear(block)
        pidfd = self._watched.pop(block, None)
        if pidfd is not None:
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _tell(self, note: LeaseRecord) -> None:
        """A lock was freed in its dead holder's stead. Its own clock is gone; its token tells."""
        now = monotonic()
        owner = Owner.of(note.token)
        since = owner.since if owner is not None and owner.since else time.time()
        claim = self._claim(note, now)
        granted_at = now - max(0.0, time.time() - since)
        lease = Lease(
            note.resource,
            note.token,
            note.ttl,
            claim.deadline,
            monotonic,
            resources=note.resources,
            granted_at=granted_at,
        )
        emit("released", lease, claim.held(now))

    def _dead(self, block: int, pid: int) -> bool:
        """Whether the process of a block has ended. Watches it from now on."""
        if block not in self._watched:
            self._watched[block] = pidfd = self._pidfd(pid)
            if pidfd is not None:
                self._poll.register(pidfd, select.POLLIN)
        pidfd = self._watched[block]
        if pidfd is None:
            return _is_dead(pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _pidfd(self, pid: int) -> int | None:
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None  # gone, or not to be watched


class _Charge(Claim):
    """A claim of another process. It ends when the note is struck off, whenever that is."""

    __slots__ = ("_name", "_table")

    def __init__(self, table: SharedLeaseTable, note: LeaseRecord) -> None:
        self._table = table
        self._name = note.name
        super().__init__(note.resources, note.token, note.ttl, table.nodes)

    @property
    def ended(self) -> bool:
        return not self._table.stands(*self._name)

    @ended.setter
    def ended(self, _ended: bool) -> None:
        """That is not for the keeper to say."""


def _is_dead(pid: int) -> bool:
    """Whether a process has ended. One that waits to be reaped is not asked for its remains."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
