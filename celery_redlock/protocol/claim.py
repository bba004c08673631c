"""Claims: the mutable book-keeping behind leases, one per token, by the rules of `lease.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from .lease import FENCE_LIMIT, NEVER, Lease, drift
from .texts import names_of, shown
from .values import quorum_of

__all__ = ["Claim", "acknowledged"]


class Claim:
    """The expiry of one token on each node, and the deadline that follows from them.

    The mutable book-keeping behind a `Lease`. A claim is *pending* until it is granted, then
    *held* until it is lost or ended. Every attempt makes a new one, with a new token.

    Args:
        resource: The name to claim, or several names: all are granted, or none.
        token: The proof of its holder.
        ttl: The ttl that the nodes are asked for; seconds.
        nodes: The number of nodes.

    Attributes:
        resource: The name or names as one text, for people.
        resources: The names on the nodes, each once, in their order.
        expiries: Per node, send time of the last acknowledged request plus ttl, in seconds. The
            list is replaced, never changed: leases that are extended together share it.
        deadline: The lease is held while the clock is before this; seconds.
        written: A bit for each node to which a request that may set our token was ever written.
        ended: True once the holder has released it, or failed to get it: no extension may follow.
        lost: The reason of its loss, or None. Never unset.
        proposal: The least fencing token that it may get; None if it asks for none.
        ceiling: The largest fencing token that it may get; see `quorum.FENCE_AHEAD`.
        fencing_token: Its fencing token, set before the grant; None without one.
        granted_at: When it was granted, or None while pending; seconds.
        mark: A key that its release sets on each node, and the ttl of that key in seconds; or None.
        below: A RENEW extends it only on nodes where at most this much of it is left; seconds.
        recall: For how long an earlier grant of its names may count, if that may be longer than
            any ttl. A node that may have forgotten such a grant has no vote on this claim; seconds.
        silent: The nodes that did not answer the last request for it, each with the reason.
        kept: Function that returns, per node, the expiry that a supervisor in another process has
            had confirmed for this token. It is called before the lease is declared lost.
    """

    # Slots, because ten thousand claims may be alive.
    __slots__ = (
        *("_learnt", "below", "ceiling", "deadline", "ended", "expiries", "fencing_token"),
        *("granted_at", "kept", "lost", "mark", "nodes", "proposal", "recall", "resource"),
        *("resources", "silent", "token", "ttl", "written"),
    )

    def __init__(self, resource: str | Iterable[str], token: str, ttl: float, nodes: int) -> None:
        self.resources = names_of(resource)
        self.resource = shown(self.resources)
        self.token = token
        self.ttl = ttl
        self.nodes = nodes
        self.expiries = self._learnt = _no_expiries(nodes)
        self.written = 0
        self.deadline = NEVER
        self.granted_at: float | None = None
        self.lost: str | None = None
        self.ended = False
        self.mark: tuple[str, float] | None = None
        self.below = math.inf
        self.recall = 0.0
        self.proposal: int | None = None
        self.ceiling = FENCE_LIMIT
        self.fencing_token: int | None = None
        self.kept: Callable[[], Sequence[float]] | None = None
        self.silent: Mapping[int, str] = {}

    def acknowledged(self, node: int, sent: float, now: float) -> None:
        """Note that `node` confirmed our token: it was asked at `sent`, and answered by `now`."""
        if self.granted_at is not None and not self._open(now):
            return
        expiry = sent + self.ttl
        if expiry > self.expiries[node]:
            self._put(node, expiry)
            if self.granted_at is not None:
                self._settle(now)

    def forgotten(self, node: int, now: float) -> bool:
        """Note that `node` does not hold our token; return True if it lost the token early."""
        if not self._open(now):
            return False
        self._ask_supervisor()  # learn now what this node confirmed to it: later it must not count
        amnesia = self.expiries[node] > now
        if self.expiries[node] != NEVER:
            self._put(node, NEVER)
            self._settle(now)
        return amnesia

    def grant(self, now: float) -> bool:
        """Grant a pending claim if time is left of it; return True if granted. This is final."""
        self._settle(now)
        if self.ended or self.deadline <= now:
            return False
        self.granted_at = now
        return True

    def held(self, now: float) -> bool:
        """Return True if the lease is held at `now`: granted, never lost, before its deadline."""
        if self.granted_at is None or self.ended:
            return False
        # The short way is taken nearly always: ten thousand are checked several times a second.
        return self.lost is None if now < self.deadline else self._open(now)

    def lease(self, clock: Callable[[], float]) -> Lease:
        """Return the present state of the lease as a value; `clock` is the holder's."""
        return Lease(
            self.resource,
            self.token,
            self.ttl,
            self.deadline,
            clock,
            self.fencing_token,
            self.resources,
            self.granted_at or 0.0,
        )

    def lose(self, reason: str) -> None:
        """Mark the lease as lost for `reason`; the first reason stays."""
        if self.lost is None:
            self.lost = reason

    def learn(self, expiries: Sequence[float]) -> bool:
        """Count the expiries that nodes confirmed to another process for this very token.

        The other process followed the rule of `acknowledged`, and its deadline was never later than
        the one that follows from its expiries and ours together. So there has been no moment
        without a quorum. Each expiry counts once, because the node may have forgotten the token
        since.

        Args:
            expiries: Per node, as in `self.expiries`; empty if there are none.

        Returns:
            True if any of them is new.
        """
        news = False
        for node, expiry in enumerate(expiries):
            if expiry > self._learnt[node]:
                news = True
                self._learnt = _with_expiry(self._learnt, node, expiry)
                self._put(node, max(expiry, self.expiries[node]))
        self._count()
        return news

    def acknowledgements(self) -> list[float]:
        """Return per-node expiries confirmed to this claim itself, without those it has learnt.

        Another process may learn only these. If its own expiries came back to it, a node that it
        has already struck off as forgetful would count again.
        """
        pairs = zip(self.expiries, self._learnt, strict=True)
        return [expiry if expiry > learnt else NEVER for expiry, learnt in pairs]

    def _put(self, node: int, expiry: float) -> None:
        self.expiries = _with_expiry(self.expiries, node, expiry)

    def _ask_supervisor(self) -> None:
        if self.kept is not None:
            self.learn(self.kept())

    def _open(self, now: float) -> bool:
        """Return True if answers still count; past the deadline, mark the lease as lost."""
        if self._over(now):
            self.lose("expired")
        return self.lost is None

    def _settle(self, now: float) -> None:
        self._count()
        if self._over(now):
            self.lose("refused")

    def _count(self) -> None:
        count = len(self.expiries)
        self.deadline = sorted(self.expiries)[count - quorum_of(count)] - drift(self.ttl)

    def _over(self, now: float) -> bool:
        """Return True if the deadline has passed, and a supervisor has no later one."""
        if self.granted_at is None or self.lost is not None or now < self.deadline:
            return False
        self._ask_supervisor()
        return now >= self.deadline


def acknowledged(claims: Iterable[Claim], node: int, sent: float, now: float) -> None:
    """Call `Claim.acknowledged` for each claim, but only once for a run of equal claims.

    Leases that are extended together mostly have equal expiries, before and after. So the claims
    of such a run copy the result of its first one.
    """
    known, until, ttl = _no_expiries(0), NEVER, 0.0
    then, deadline = known, until
    for claim in claims:
        if (
            claim.deadline == until
            and (claim.expiries is known or claim.expiries == known)
            and claim.ttl == ttl
            and claim.lost is None
        ):
            claim.expiries, claim.deadline = then, deadline
            continue
        known, until, ttl = claim.expiries, claim.deadline, claim.ttl
        claim.acknowledged(node, sent, now)
        if now >= until or claim.lost is not None:
            until = math.nan  # it was over, or has asked its supervisor: copy it to no other claim
        then, deadline = claim.expiries, claim.deadline


@cache
def _no_expiries(nodes: int) -> list[float]:
    return [NEVER] * nodes


def _with_expiry(expiries: list[float], node: int, expiry: float) -> list[float]:
    # Nodes that were asked together share one float: five floats would take 120 bytes a lease.
    expiries = expiries.copy()
    expiries[node] = expiries[expiries.index(expiry)] if expiry in expiries else expiry
    return expiries
