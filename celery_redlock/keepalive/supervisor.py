"""Extend the leases of processes that are late, and release the leases of dead processes.

Each process extends its own leases in a thread. That thread stands still while the process is
stopped or a C call keeps the GIL, and it ends with the process. So a supervisor in another process
(the main process of a prefork worker, or a sidecar, `sidecar.py`) reads the table in which holders
record their leases (`shared_table.py`). It extends a lease when more than half of its ttl is gone.
When a holder is dead, and its body with it, the supervisor deletes its tokens.

It watches the pids and relies on no other sign of a death. Celery's main process notices a child's
death 0.1 to 5 seconds late, and some deaths not at all; and it announces a hard time limit or a
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
import signal
import time
from functools import partial

from ..events import emit, has_listeners
from ..protocol import quorum
from ..protocol.claim import Claim
from ..protocol.lease import Lease
from ..protocol.names import RESERVED_SUFFIX
from ..protocol.round import Verb
from ..protocol.texts import event
from ..protocol.values import Owner
from ..runtime.clock import monotonic
from ..stores.driver import Driver
from .shared_table import LeaseRecord, SharedLeaseTable

__all__ = ["LeaseSupervisor"]

logger = logging.getLogger("celery_redlock.keeper")

LATE = 1 / 2
"""The part of the ttl after which the supervisor extends; a holder extends after a third."""
LOOK_EVERY = 1 / 10
"""Pause between two looks, as a part of the shortest ttl in the table."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.1
"""Limits of that pause. A look takes about 0.1 ms, so ten of them a second cost next to nothing,
and the supervisor sees a new lease or process in time without an announcement."""
LINGER_S = 0.8
"""Seconds in which the other processes of a dead client should end as well."""
RETRY_S = 1.0
"""Seconds before nodes are asked again to release a dead process's leases, if too few have
answered. The pause doubles, because a node that hangs will read all of these requests when it
answers again."""
REPORT_AFTER_S = 0.5
"""Seconds in which a holder should report its loss itself."""

Name = tuple[int, int]
"""The slot and generation of a record."""


class LeaseSupervisor:
    """The extender for the leases of one table. Runs in one thread.

    Args:
        table: The leases of the other processes.
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
        self._over: dict[Name, float] = {}  # since when; infinity once it is reported
        self._watched: dict[int, int | None] = {}  # pidfd by block
        self._dead: dict[int, tuple[float, float]] = {}  # by block: since when, and when to retry
        self._killed: set[int] = set()  # pids, until they are dead
        self._poll = select.poll()
        self._alone = False
        self._client = client
        if client is not None:
            self._poll.register(client, select.POLLIN)
        self._pause = 0.0
        self._looked = math.inf
        self._away = 0.0  # seconds in which this process did not run, in all
        self._silent: dict[Name, tuple[float, float]] = {}  # see `_is_silent_too_long`

    def run(self) -> None:
        """Supervise until the client is gone; then release the leases of its processes."""
        self._driver.connect(0.1)  # begun now: a late lease has no time to wait for it
        while not self._alone:
            self.run_once()
        self._finish()

    def run_once(self) -> None:
        """Wait for the next look, or a death; extend late leases, release those of the dead."""
        try:
            ready = self._wait(self._pause)
            self._alone = self._client in ready
            if not self._alone:
                self._look(ready)
        except BaseException:
            # Leases must not end because of one bug; the next look may do better.
            logger.exception(
                "the extender could not check the leases of other processes",
                extra=event("supervision_failed"),
            )
            with contextlib.suppress(BaseException):
                time.sleep(MAX_PAUSE_S)

    def _finish(self) -> None:
        """Release the leases of processes that are being killed; extend nothing more."""
        if self._client is not None:
            self._poll.unregister(self._client)
        until = monotonic() + LINGER_S
        over = False
        while any(self._table.blocks()) and not over:
            # One more look after the time is over: this process may have stood still as well.
            over = monotonic() >= until
            self._living(self._wait(MIN_PAUSE_S))

    def _wait(self, seconds: float) -> set[int]:
        """Wait for a death; return the descriptors of processes that have ended."""
        return {fd for fd, _event in self._poll.poll(seconds * 1000)}

    def _living(self, ready: set[int]) -> list[tuple[int, int]]:
        """Release the leases of dead processes; return the other blocks, each with its pid."""
        living = []
        for block, pid in list(self._table.blocks()):
            if block in self._dead:
                if self._dead[block][1] <= monotonic():
                    self._reap(block)
                continue
            pidfd = self._watched.get(block)
            if pidfd is not None:
                dead = pidfd in ready
            else:
                self._watched[block] = pidfd = _pidfd(pid)
                dead = pidfd is None and _is_dead(pid)
                if pidfd is not None:  # its number may be that of a closed one in `ready`
                    self._poll.register(pidfd, select.POLLIN)
            if dead:
                del self._watched[block]
                if pidfd is not None:
                    self._poll.unregister(pidfd)
                    os.close(pidfd)
                self._killed.discard(pid)
                self._reap(block)
            else:
                living.append((block, pid))
        return living

    def _look(self, ready: set[int]) -> None:
        """Look through the whole table for dead holders and late leases."""
        now, here = monotonic(), time.monotonic()
        away, before = here - self._looked - self._pause, self._away
        self._away += away if away > MAX_PAUSE_S else 0.0
        self._looked = here
        seen: dict[Name, Claim] = {}
        late: list[tuple[LeaseRecord, Claim]] = []
        shortest = MAX_PAUSE_S / LOOK_EVERY
        for block, pid in self._living(ready):
            for record in self._table.records(block):
                shortest = min(shortest, record.ttl)
                if not record.held:
                    continue
                if self._is_silent_too_long(record, here, before) and pid not in self._killed:
                    self._kill(record, pid, self._watched[block])
                claim = seen[record.name] = self._claim(record, now)
                if not claim.held(now):
                    self._report(record, claim, pid, now)
                    continue
                self._over.pop(record.name, None)
                if now < record.until and claim.deadline - now < record.ttl * LATE:
                    late.append((record, claim))
        self._claims = seen
        self._silent = {name: known for name, known in self._silent.items() if name in seen}
        self._over = {name: since for name, since in self._over.items() if name in seen}
        self._pause = min(max(shortest * LOOK_EVERY, MIN_PAUSE_S), MAX_PAUSE_S)
        if late and self._driver.nodes[0].kind.can.ttl_per_key:  # else only its holder can
            self._extend(late, now)

    def _is_silent_too_long(self, record: LeaseRecord, here: float, before: float) -> bool:
        """Return True if a body has been silent for so long that its process may be killed.

        Time in which this process did not run does not count: most likely the whole worker was
        stopped, its processes wake up one by one, and the body could not report either. So each
        `patience` is remembered with the total of such time `before` the look that saw it first.
        """
        patience, since = self._silent.get(record.name, (math.nan, before))
        if patience != record.patience:  # the body has reported since
            since = before
        self._silent[record.name] = record.patience, since
        return record.patience + self._away - since <= here

    def _kill(self, record: LeaseRecord, pid: int, pidfd: int | None) -> None:
        """Kill a pool child whose body hangs; its leases are released once it is dead."""
        if not self._table.stands(*record.name):
            return  # it has just ended
        self._killed.add(pid)
        logger.error(
            "killing process %d: its work under the lock %s held by %s has reported no progress for"
            " twice its progress_timeout, and has not ended after it was interrupted",
            *(pid, record.resource, Owner.of(record.token)),
            extra=event("stalled_process_killed", record.resource),
        )
        with contextlib.suppress(ProcessLookupError):
            if pidfd is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _claim(self, record: LeaseRecord, now: float) -> Claim:
        """Return the supervisor's own claim for a record, with the expiries its holder noted."""
        claim = self._claims.get(record.name)
        if claim is not None:
            news = claim.learn(record.expiries)
            if claim.lost is None or not news:
                return claim
        # A new record; or the lease seemed lost here, but its holder has later expiries.
        fresh = _OthersClaim(self._table, record)
        if claim is None and record.kept:
            fresh.expiries = list(record.kept)  # from the previous supervisor
        fresh.learn(record.expiries)
        fresh.granted_at = now
        return fresh

    def _extend(self, late: list[tuple[LeaseRecord, Claim]], now: float) -> None:
        claims = [claim for _record, claim in late]
        patience = min(min(c.deadline - now, c.ttl / 10, self._node_timeout) for c in claims)
        deadlines = [claim.deadline for claim in claims]
        self._driver.extend(claims, max(0.001, patience), Verb.RENEW)
        for (record, claim), deadline in zip(late, deadlines, strict=True):
            self._table.extended(record, claim.acknowledgements())
            if claim.lost is not None:
                # Until its deadline the nodes have only forgotten it: its holder may set it again.
                self._over[record.name] = deadline

    def _report(self, record: LeaseRecord, claim: Claim, pid: int, now: float) -> None:
        """Report a loss once, unless its holder does so itself in time."""
        if now - self._over.setdefault(record.name, now) >= REPORT_AFTER_S:
            self._over[record.name] = math.inf
            logger.error(
                "lost the lock %s held by %s: %s; process %d is stopped or busy and has not"
                " noticed: its work may overlap with another's",
                record.resource,
                Owner.of(record.token),
                claim.lost,
                pid,
                extra=event("lease_lost", record.resource),
            )

    def _reap(self, block: int) -> None:
        """Release the leases of a dead process; try again later if too few nodes confirm."""
        now = monotonic()
        again = block in self._dead
        died, _ = self._dead.setdefault(block, (now, now))
        self._dead[block] = died, now + max(RETRY_S, now - died)
        left = [r for r in self._table.records(block) if now - died < r.ttl]
        claims = [Claim(r.resources, r.token, r.ttl, self._table.nodes) for r in left]
        frees = [partial(quorum.free, claim, patience=self._node_timeout) for claim in claims]
        freed = self._driver.run_all(frees) if frees else []
        sure = [round_.quorum_answered for round_ in freed]
        for record, round_ in zip(left, freed, strict=True):
            who = Owner.of(record.token)
            if round_.quorum_answered:
                if round_.yes or again:  # otherwise the process had released it itself
                    logger.warning(
                        "freed %s, which %s held when it died",
                        record.resource,
                        who,
                        extra=event("dead_holder_released", record.resource),
                    )
                if (
                    has_listeners()
                    and record.held
                    and not record.resource.endswith(RESERVED_SUFFIX)
                ):
                    self._report_release(record)
                self._table.remove(record)
            elif not again:
                logger.warning(
                    "%s cannot be freed yet (%s held it when it died): too few nodes answer; they"
                    " are asked again until its ttl is over or this process ends",
                    record.resource,
                    who,
                    extra=event("dead_holder_unreleased", record.resource),
                )
        if all(sure):
            self._table.clear(block)
            del self._dead[block]

    def _report_release(self, record: LeaseRecord) -> None:
        """Report a release to listeners, in place of the dead holder.

        The time of the grant is read from its token, because the holder's own clock is gone.
        """
        now, wall = monotonic(), time.time()
        owner = Owner.of(record.token)
        claim = self._claim(record, now)
        lease = Lease(
            *(record.resource, record.token, record.ttl, claim.deadline, monotonic),
            resources=record.resources,
            granted_at=now - max(0.0, wall - ((owner and owner.since) or wall)),
        )
        emit("released", lease, claim.held(now))


class _OthersClaim(Claim):
    """A claim of another process. It ends as soon as its holder removes the record."""

    __slots__ = ("_name", "_table")

    def __init__(self, table: SharedLeaseTable, record: LeaseRecord) -> None:
        self._table = table
        self._name = record.name
        super().__init__(record.resources, record.token, record.ttl, table.nodes)

    @property
    def ended(self) -> bool:
        return not self._table.stands(*self._name)

    @ended.setter
    def ended(self, _ended: bool) -> None:
        """Do nothing: only its holder can end it."""


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that signals the end of a process; None if there is none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # it is gone, or may not be watched


def _is_dead(pid: int) -> bool:
    """Return True if a process has ended. Do not reap a zombie: its parent needs its status."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is another user's
    return False
