"""The lease and the arithmetic of time.

A lease is a promise of N independent nodes, each with a clock of its own, so its holder counts for
itself, and always to its own disadvantage. For every node it keeps one number: the time *before*
the acknowledged request was sent, plus the ttl. No node drops our token before that moment (its
own countdown began later), save for the difference of clock rates, for which the *drift* is
deducted. A quorum of nodes holds our token until the q-th largest of these numbers: that is the
deadline. The same rule serves acquisition, late answers, partial extensions and repair, and
nothing else ever moves the deadline.

Once the clock has reached the deadline the lease is lost for good, decided here, without a word
from any node. An extension that is acknowledged later cannot revive it, for in between another
may have held the resource.

Times are seconds on a monotonic clock which the caller owns; this module never looks at one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .errors import LeaseLost, printable

__all__ = [
    "FENCE_LIMIT",
    "NEVER",
    "Claim",
    "Holder",
    "Lease",
    "Owner",
    "drift",
    "names_of",
    "quorum_of",
    "shown",
]

NEVER = -math.inf

DRIFT_RATE = 0.01
"""Allowance for clocks that run at different rates (Redis page, "Safety arguments")."""
DRIFT_FLOOR = 0.002
"""Allowance in seconds for the 1 ms granularity of expiry on a node, at both ends."""

FENCE_LIMIT = 2**53 - 1
"""Scripts count in doubles, exactly up to here: microseconds until the year 2255."""


def quorum_of(nodes: int) -> int:
    """How many of `nodes` masters are a quorum: more than half."""
    return nodes // 2 + 1


def drift(ttl: float) -> float:
    """Seconds of a ttl that are never counted as held, for clock drift (Redis page)."""
    return DRIFT_RATE * ttl + DRIFT_FLOOR


def names_of(resource: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several: each once, in an order that is the same whoever asks."""
    return (resource,) if isinstance(resource, str) else tuple(sorted(set(resource)))


def shown(resources: Sequence[str]) -> str:
    """Some names as one, for people."""
    return " + ".join(resources)


class Claim:
    """What one token may claim: its expiry at every node, and the deadline that follows.

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
        expiries: Per node, send time of the last acknowledged request plus ttl, in seconds.
        deadline: The lease is held while the clock is before this; seconds.
        written: Per node, whether a request that may set our token was ever written to it.
        ended: The holder gave it back (or never got it): nothing may be extended any more.
        lost: Why it was lost, or None. Never unset.
        proposal: What its fencing token is to be at least; None: it asks for none.
        ceiling: What its fencing token can be at most; see `quorum.FENCE_AHEAD`.
        fencing_token: Its fencing token, from before it is granted on; None without one.
        granted_at: When it was granted, or None while pending; seconds.
        mark: A key that its release sets on each node, and for how long, in seconds; or None.
        below: A RENEW extends it only where no more than this is left of it; seconds.
        since: Of a place in line: since when it stands there, in microseconds since 1970.
        called: How many nodes called somebody who waits when this was released.
        silent: Nodes that did not answer the last request for it, and why not.
        kept: Tells, per node, what a keeper in another process was acknowledged for this token; it
            is asked before the lease is called lost.
    """

    __slots__ = (
        "_answered",
        "_learnt",
        "below",
        "called",
        "ceiling",
        "deadline",
        "ended",
        "expiries",
        "fencing_token",
        "granted_at",
        "kept",
        "lost",
        "mark",
        "proposal",
        "resource",
        "resources",
        "silent",
        "since",
        "token",
        "ttl",
        "written",
    )

    def __init__(self, resource: str | Iterable[str], token: str, ttl: float, nodes: int) -> None:
        self.resources = names_of(resource)
        self.resource = shown(self.resources)
        self.token = token
        self.ttl = ttl
        self.expiries = [NEVER] * nodes
        self.written = [False] * nodes
        self.deadline = NEVER
        self.granted_at: float | None = None
        self.lost: str | None = None
        self.ended = False
        self.mark: tuple[str, float] | None = None
        self.below = math.inf
        self.since = self.called = 0
        self.proposal: int | None = None
        self.ceiling = FENCE_LIMIT
        self.fencing_token: int | None = None
        self.kept: Callable[[], Sequence[float]] | None = None
        self._learnt: list[float] | None = None
        self._answered = [NEVER] * nodes
        self.silent: Mapping[int, str] = {}

    def acknowledged(self, node: int, sent: float, now: float) -> None:
        """`node` confirmed our token, to a request sent at `sent`; the answer was read at `now`."""
        if not self._open(now) or self.outdated(node, sent):
            return
        expiry = sent + self.ttl
        if expiry > self.expiries[node]:
            self.expiries[node] = expiry
            if self.granted_at is not None:
                self._settle(now)

    def forgotten(self, node: int, now: float) -> bool:
        """`node` does not hold our token. Whether it should have: then it lost its memory."""
        if not self._open(now):
            return False
        self._ask_keeper()  # what it was told before must not count after this
        amnesia = self.expiries[node] > now
        if self.expiries[node] != NEVER:
            self.expiries[node] = NEVER
            self._settle(now)
        return amnesia

    def outdated(self, node: int, sent: float) -> bool:
        """Whether `node` has answered a request that was sent after this one.

        Never over one connection. Who extends over another (`native.py`) may read late what was
        answered long before; what a node said last is what counts.
        """
        if sent < self._answered[node]:
            return True
        self._answered[node] = sent
        return False

    def grant(self, now: float) -> bool:
        """Make a pending claim a held one, if time is left of it. The answer is final."""
        self._settle(now)
        if self.ended or self.deadline <= now:
            return False
        self.granted_at = now
        return True

    def held(self, now: float) -> bool:
        """Whether the lease is held at `now`: granted, never lost, and before its deadline."""
        return self.granted_at is not None and not self.ended and self._open(now)

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
        if self._learnt is None:
            self._learnt = [NEVER] * len(self.expiries)
        news = False
        for node, expiry in enumerate(expiries):
            if expiry > self._learnt[node]:
                news = True
                self._learnt[node] = expiry
                self.expiries[node] = max(expiry, self.expiries[node])
        self._count()
        return news

    def acknowledgements(self) -> list[float]:
        """Per node, what was acknowledged to this claim itself and stands, not what it has learnt.

        This alone is for another to learn: an echo of its own words would bring back a node that it
        knows to have forgotten.
        """
        learnt = self._learnt or [NEVER] * len(self.expiries)
        return [
            expiry if expiry > heard else NEVER
            for expiry, heard in zip(self.expiries, learnt, strict=True)
        ]

    def _ask_keeper(self) -> None:
        if self.kept is not None:
            self.learn(self.kept())

    def _open(self, now: float) -> bool:
        """Whether answers still count; notices a deadline that has passed."""
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
        """Whether a lease has reached its deadline, and no keeper knows of a later one."""
        if self.granted_at is None or self.lost is not None or now < self.deadline:
            return False
        self._ask_keeper()
        return now >= self.deadline


@dataclass(frozen=True, slots=True)
class Lease:
    """A resource that is ours until a deadline. A value: extending one returns a new one.

    Attributes:
        resource: What is exclusive; several names in one text, where it is more than one.
        token: The random proof of who holds it, new for every attempt. Not a fencing token: the
            resource cannot tell an old one from a new one by it.
        ttl: What the nodes were asked for, in seconds.
        deadline: Held while the clock is before this, in seconds of that clock.
        clock: The monotonic clock of the driver that granted it.
        fencing_token: Larger than that of any earlier holder of the resource, so the resource can
            refuse a write that comes late; None unless asked for (`fencing=True`).
        resources: Each name of what is exclusive.
        granted_at: When it was granted, in seconds of that clock; 0.0 if that is not known.
    """

    resource: str
    token: str = field(repr=False)
    ttl: float
    deadline: float
    clock: Callable[[], float] = field(repr=False, compare=False)
    fencing_token: int | None = None
    resources: tuple[str, ...] = field(default=(), repr=False)
    granted_at: float = field(default=0.0, repr=False, compare=False)

    def remaining(self, now: float | None = None) -> float:
        """Seconds left, drift already deducted (the paper's *validity*); 0.0 when over."""
        return max(0.0, self.deadline - (self.clock() if now is None else now))

    @property
    def lost(self) -> bool:
        """Whether this lease is over. Extending may have made a newer one that is not."""
        return self.remaining() <= 0.0

    def ensure(self, seconds: float = 0.0) -> None:
        """Raise unless more than `seconds` are left.

        Raises:
            LeaseLost: The lease is over, or will be in `seconds`.
        """
        left = self.remaining()
        if left <= seconds:
            raise LeaseLost(
                f"{self.resource}: {left:.3f} s are left of the lease, more than {seconds:g} s"
                " were asked for; stop writing, another may hold the resource",
                resource=self.resource,
                lease=self,
            )


@dataclass(frozen=True, slots=True)
class Owner:
    """Who asks for a lock, as an operator wants to read it. It travels inside the token.

    Attributes:
        host: Host name.
        pid: Process id on that host.
        task_id: The Celery task's id; empty outside Celery.
        retries: How often Celery had retried that task.
        stamp: Names one delivery of a message: a task id can be delivered twice at once.
        task: The Celery task's name; empty outside Celery.
        since: When it asked, by its own wall clock, in seconds since 1970; 0.0 if it does not say.
            For people to read: no decision hangs on it.
    """

    host: str
    pid: int
    task_id: str = ""
    retries: int = 0
    stamp: str = ""
    task: str = ""
    since: float = field(default=0.0, compare=False)

    def token(self, nonce: str, now: float = 0.0) -> str:
        """The token of one attempt of this owner, made at `now`, in seconds since 1970.

        `nonce` holds at least 128 random bits.
        """
        host = self.host.replace("|", "")
        task_id, task = _escape(self.task_id), _escape(self.task)
        asked = int(now * 1e3)
        return f"{self.stamp}|{host}|{self.pid}|{task_id}|{self.retries}|{task}|{asked}|{nonce}"

    @classmethod
    def of(cls, token: str) -> Owner | None:
        """Who made `token`; None if it is not one of this library."""
        parts = token.split("|")
        if len(parts) != 8 or not all(_is_count(parts[i]) for i in (2, 4, 6)):
            return None
        stamp, host, pid, task_id, retries, task, asked, _nonce = parts
        return cls(
            *(host, int(pid), _unescape(task_id), int(retries), stamp, _unescape(task)),
            since=int(asked) / 1e3,
        )

    def __str__(self) -> str:
        task = f"task {self.task_id} of " if self.task_id else ""
        return printable(f"{task}pid {self.pid} on {self.host}")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a resource, as the nodes tell it.

    Attributes:
        resource: What is held.
        owner: Who made the token, or None if another program's value lies under our name.
        nodes: How many nodes hold this token.
        quorum: How many nodes a lock needs: with fewer, this is a split vote or the rest of one.
        expires_in: Seconds until enough nodes will have dropped it for somebody else to be granted
            the lock, unless it is extended; None if that was not asked.
        digest: The first eight hex digits of the token's SHA-256, to compare in logs. The token
            itself is never shown: whoever knows it could free the lock.
    """

    resource: str
    owner: Owner | None
    nodes: int
    quorum: int
    expires_in: float | None = None
    digest: str = ""

    def __str__(self) -> str:
        who = str(self.owner) if self.owner else "another program's key"
        nodes = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"{who} ({nodes}, token {self.digest})"


def token_digest(token: str) -> str:
    """A short name of a token that is safe to log."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("|", "%7C")


def _unescape(text: str) -> str:
    return text.replace("%7C", "|").replace("%25", "%")


def _is_count(text: str) -> bool:
    # Python refuses to read numbers of thousands of digits, with a ValueError.
    return text.isdecimal() and len(text) <= 20
