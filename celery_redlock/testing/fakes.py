"""The clock and one Redis master, without time and without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import quorum
from ..lease import Claim
from ..quorum import EXTENDING, Verb

FOREIGN = "<not a lock>"
"""What a node answers for the token where a key of another type lies under our name."""


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Let time pass; the new time in seconds."""
        self.now += seconds
        return self.now


class FakeNode:
    """One Redis master, as far as a lock can tell: keys that hold a token until they expire.

    Attributes:
        held: Per resource, its token and when that expires, by the clock of the caller; seconds.
        fences: Per resource, the last fencing token. (A server drops it after a week.)
        full: Whether it has no memory for another key; what is there can be renewed and deleted.
        witness: Called with (resource, token before, token after, claim) at every change that a
            request makes; for tests.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, float]] = {}
        self.fences: dict[str, int] = {}
        self.full = False
        self.witness: Callable[[str, str | None, str | None, Claim], None] | None = None

    def execute(self, verb: Verb, claims: Sequence[Claim], now: float) -> Any:
        """Do what a round asks for; what `Round.answer` takes for a reply."""
        if verb in EXTENDING:
            return "".join([self._extend(verb, claim, now) for claim in claims])
        claim = claims[0]
        token = self.token(claim.resource, now)
        if verb is Verb.ACQUIRE:
            if claim.proposal is not None:
                return self._acquire_fenced(claim, token, now)
            if token is None:
                self._set(claim, None, now)
            return token
        if verb is Verb.FENCE:
            return self._fence(claim, token)
        if verb is Verb.PEEK:
            return None if token is None else (token, self.held[claim.resource][1] - now)
        return self._delete(claim, token)

    def forget(self) -> None:
        """Lose all memory."""
        self.held.clear()
        self.fences.clear()

    def token(self, resource: str, now: float) -> str | None:
        """The token that `resource` holds, or None."""
        entry = self.held.get(resource)
        if entry is None:
            return None
        if now >= entry[1]:
            del self.held[resource]
            return None
        return entry[0]

    def occupy(self, resource: str) -> None:
        """Put a key of another type, without an expiry, under the name of `resource`."""
        self.held[resource] = (FOREIGN, float("inf"))

    def _acquire_fenced(self, claim: Claim, token: str | None, now: float) -> str | int:
        if token is not None and token != claim.token:
            return token
        fence = max(claim.proposal or 0, self.fences.get(claim.resource, 0) + 1)
        self.fences[claim.resource] = fence
        self._set(claim, token, now)
        return fence

    def _fence(self, claim: Claim, token: str | None) -> bool:
        if token != claim.token:
            return False
        fence = claim.fencing_token or 0
        self.fences[claim.resource] = max(fence, self.fences.get(claim.resource, 0))
        return True

    def _extend(self, verb: Verb, claim: Claim, now: float) -> str:
        token = self.token(claim.resource, now)
        if token == claim.token:
            self._set(claim, token, now)
            return quorum.RENEWED
        if token is None and verb is Verb.EXTEND and not self.full:
            self._set(claim, None, now)
            return quorum.SET_AGAIN
        return quorum.REFUSED

    def _set(self, claim: Claim, before: str | None, now: float) -> None:
        # A server counts whole milliseconds, from one that has begun already.
        self.held[claim.resource] = (claim.token, int(now * 1000) / 1000 + claim.ttl)
        if self.witness is not None:
            self.witness(claim.resource, before, claim.token, claim)

    def _delete(self, claim: Claim, token: str | None) -> bool:
        if token != claim.token:
            return False
        del self.held[claim.resource]
        if self.witness is not None:
            self.witness(claim.resource, token, None, claim)
        return True
