"""What one token may hold: the mutable book-keeping behind a lease, by the rules of `lease.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from .lease import FENCE_LIMIT, NEVER, Lease, drift
from .texts import names_of, shown
from .values import quorum_of

__all__ = ["Claim", "acknowledged"]


class Claim:
    """What one token may hold: until when on each node, and the deadline that follows.

    The mutable book-keeping behind a `Lease`. A claim is *pending* until it is granted, then
    *held* until it is lost or ended. Every attempt makes a new one, with a new token.

    Args:
        resource: What it claims: a name, or several of which it gets all or none.
        token: The proof of who holds it.
        ttl: For how long the nodes are asked; seconds.
        nodes: How many there are.

    Attributes:
        resource: What is exclusive, for people.
        resources: Its names on the nodes, each once, in their order.
        expiries: Per node, send time of the last acknowledged request plus ttl, in seconds. The
            list is replaced, never changed: leases that are extended together share it.
        deadline: The lease is held while the clock is before this; seconds.
        written: A bit for each node to which a request that may set our token was ever written.
        ended: The holder gave it back (or never got it): nothing may be extended any more.
        lost: Why it was lost, or None. Never unset.
        proposal: What its fencing token is to be at least; None: it asks for none.
        ceiling: What its fencing token can be at most; see `quorum.FENCE_AHEAD`.
        fencing_token: Its fencing token, from before it is granted on; None without one.
        granted_at: When it was granted, or None while pending; seconds.
        mark: A key that its release sets on each node, and for how long, in seconds; or None.
        below: A RENEW extends it only where no more than this is left of it; seconds.
        recall: For how long an earlier grant of its names may count, where that may be longer than
            any ttl; a node that may have forgotten it has no vote on this claim; seconds.
        silent: Nodes that did not answer the last request for it, and why not.
        kept: Returns, per node, the expiry that a supervisor in another process had confirmed for
            this token. It is asked before the lease is called lost.
    """

    # Ten thousand of them may be alive.
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
        self.expiries = self._learnt = _nothing(nodes)
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
        """Note that `node` confirmed our token: asked at `sent`, its answer was read at `now`."""
        if self.granted_at is not None and not self._open(now):
            return
        expiry = sent + self.ttl
        if expiry > self.expiries[node]:
            self._put(node, expiry)
            if self.granted_at is not None:
                self._settle(now)

    def forgotten(self, node: int, now: float) -> bool:
        """Note that `node` does not hold our token; return whether it lost it before its time."""
        if not self._open(now):
            return False
        self._ask_supervisor()  # what the node told it before must not count after this
        amnesia = self.expiries[node] > now
        if self.expiries[node] != NEVER:
            self._put(node, NEVER)
            self._settle(now)
        return amnesia

    def grant(self, now: float) -> bool:
        """Make a pending claim a held one, if time is left of it. The answer is final."""
        self._settle(now)
        if self.ended or self.deadline <= now:
            return False
        self.granted_at = now
        return True

    def held(self, now: float) -> bool:
        """Whether the lease is held at `now`: granted, never lost, and before its deadline."""
        if self.granted_at is None or self.ended:
            return False
        # Nearly always: ten thousand are asked several times a second.
        return self.lost is None if now < self.deadline else self._open(now)

    def lease(self, clock: Callable[[], float]) -> Lease:
        """Return the lease as it stands, as a value; `clock` is the holder's."""
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
        """Give the lease up for `reason`; the first reason stays."""
        if self.lost is None:
            self.lost = reason

    def learn(self, expiries: Sequence[float]) -> bool:
        """Count what another process was acknowledged for this very token.

        It has kept to the rule of `acknowledged`, and knew of no later deadline than this claim and
        itself together: so there has been no moment without a quorum. Each counts once: a node may
        have forgotten since.

        Args:
            expiries: Per node, as in `expiries`; empty for nothing.

        Returns:
            Whether there was anything new in it.
        """
        news = False
        for node, expiry in enumerate(expiries):
            if expiry > self._learnt[node]:
                news = True
                self._learnt = _with(self._learnt, node, expiry)
                self._put(node, max(expiry, self.expiries[node]))
        self._count()
        return news

    def acknowledgements(self) -> list[float]:
        """Per node, what was acknowledged to this claim itself and stands, not what it has learnt.

        This alone is for another to learn: an echo of its own words would bring back a node that it
        knows to have forgotten.
        """
        pairs = zip(self.expiries, self._learnt, strict=True)
        return [expiry if expiry > learnt else NEVER for expiry, learnt in pairs]

    def _put(self, node: int, expiry: float) -> None:
        self.expiries = _with(self.expiries, node, expiry)

    def _ask_supervisor(self) -> None:
        if self.kept is not None:
            self.learn(self.kept())

    def _open(self, now: float) -> bool:
        """Return whether answers still count; past the deadline, note that the lease is lost."""
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
        """Whether a lease has reached its deadline, and no supervisor knows of a later one."""
        if self.granted_at is None or self.lost is not None or now < self.deadline:
            return False
        self._ask_supervisor()
        return now >= self.deadline


def acknowledged(claims: Iterable[Claim], node: int, sent: float, now: float) -> None:
    """Call `Claim.acknowledged` for each; for a row of claims that are alike, only for the first.

    Leases that are extended together mostly have the same numbers, before and after: the others
    take over what the first was given.
    """
    known, until, ttl = _nothing(0), NEVER, 0.0
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
            until = math.nan  # it was over, or has asked its supervisor: none is like it
        then, deadline = claim.expiries, claim.deadline


@cache
def _nothing(nodes: int) -> list[float]:
    return [NEVER] * nodes


def _with(expiries: list[float], node: int, expiry: float) -> list[float]:
    # Nodes that were asked at once share one float: five separate ones would be 120 bytes a lease.
    expiries = expiries.copy()
    expiries[node] = expiries[expiries.index(expiry)] if expiry in expiries else expiry
    return expiries
