"""One Redis master, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.claim import Claim
from ..protocol.names import base_of
from ..protocol.replies import DONE
from ..protocol.round import REFUSED, RENEWED, SET_AGAIN, Held, Verb
from ..protocol.values import QueueEntry

FOREIGN = "<not a lock>"
"""What a node answers for the token where a key of another type lies under our name."""


class FakeNode:
    """One Redis master, as far as a lock can tell: keys that hold a token until they expire.

    Attributes:
        held: Per resource, its token and when that expires, by the clock of the caller; seconds.
        fences: Per resource, the last fencing token. (A server drops it after a week.)
        lines: Per resource, who stands in line for it, and since when.
        listening: The processes that hear calls.
        called: Who was called, in order.
        full: Whether it has no memory for another key; what is there can be renewed and deleted.
        witness: Called with (resource, token before, token after, claim) at every change that a
            request makes; for tests.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, float]] = {}
        self.fences: dict[str, int] = {}
        self.lines: dict[str, dict[str, int]] = {}
        self.listening: set[str] = set()
        self.called: list[str] = []
        self.full = False
        self.witness: Callable[[str, str | None, str | None, Claim], None] | None = None

    def execute(self, verb: Verb, claims: Sequence[Any], now: float) -> Any:
        """Do what a round asks for; what `Round.answer` takes for a reply."""
        if verb.extends:
            return "".join([self._extend(verb, claim, now) for claim in claims])
        if verb is Verb.PEEK:
            seen = [self._peek(claim, now) for claim in claims]
            return seen if len(seen) > 1 else seen[0]
        claim = claims[0]
        if verb is Verb.FENCE:
            return self._fence(claim, self.token(claim.resources[0], now))
        if verb is Verb.ACQUIRE:
            return self._acquire(claim, now)
        if verb in (Verb.ENQUEUE, Verb.DEQUEUE, Verb.HAND_ON):
            return self._line_up(verb, claim, now)
        if verb is Verb.RELEASE and claim.mark is not None and not self.full:
            name, life = claim.mark
            self.held[name] = (DONE, now + life)
        freed = [self._delete(claim, name, self.token(name, now)) for name in claim.resources]
        if verb is Verb.RELEASE and any([self._call(base_of(name)) for name in claim.resources]):
            return all(freed) + 2
        return all(freed)

    def forget(self) -> None:
        """Lose all memory."""
        self.held.clear()
        self.lines.clear()
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

    def _line_up(self, verb: Verb, place: QueueEntry, now: float) -> bool:
        stood = []
        for name in place.resources:
            line = self.lines.setdefault(name, {})
            stood.append(line.pop(place.token, None) is not None)
            if verb is Verb.ENQUEUE:
                line[place.token] = place.since
            elif verb is Verb.HAND_ON and not (stood[-1] and self.token(name, now)):
                self._call(name)
        return verb is Verb.ENQUEUE or all(stood)

    def _call(self, name: str) -> bool:
        """Call the first in line whose process listens."""
        line = self.lines.get(name, {})
        while line:
            first = min(line, key=lambda member: (line[member], member))
            del line[first]
            process, _, waiter = first.rpartition(":")
            if self._hears(process, waiter):
                return True
        return False

    def _hears(self, process: str, waiter: str) -> bool:
        """Call a waiter; return whether its process listens."""
        if process in self.listening:
            self.called.append(f"{process}:{waiter}")
        return process in self.listening

    def _acquire(self, claim: Claim, now: float) -> str | int | None:
        tokens = [self.token(name, now) for name in claim.resources]
        for name, token in zip(claim.resources, tokens, strict=True):
            if token not in (None, claim.token):
                return Held(str(token), name)
        if claim.proposal is not None:
            return self._acquire_fenced(claim, tokens[0], now)
        if len(tokens) == 1 and tokens[0] is not None:
            return claim.token  # SET NX GET: what is there stays as it is
        for name, token in zip(claim.resources, tokens, strict=True):
            self._set(claim, name, token, now)
        return None

    def _acquire_fenced(self, claim: Claim, token: str | None, now: float) -> int:
        (name,) = claim.resources
        fence = max(claim.proposal or 0, self.fences.get(name, 0) + 1)
        self.fences[name] = fence
        self._set(claim, name, token, now)
        return fence

    def _fence(self, claim: Claim, token: str | None) -> bool:
        if token != claim.token:
            return False
        fence = claim.fencing_token or 0
        self.fences[claim.resources[0]] = max(fence, self.fences.get(claim.resources[0], 0))
        return True

    def _peek(self, claim: Claim, now: float) -> tuple[str, float] | None:
        held = [name for name in claim.resources if self.token(name, now) is not None]
        if not held:
            return None
        return self.held[held[0]][0], max(self.held[name][1] for name in held) - now

    def _extend(self, verb: Verb, claim: Claim, now: float) -> str:
        tokens = {name: self.token(name, now) for name in claim.resources}
        if any(token not in (None, claim.token) for token in tokens.values()):
            return REFUSED
        whole = None not in tokens.values()
        if not whole and (verb is Verb.RENEW or self.full):
            return REFUSED
        for name, token in tokens.items():
            left = self.held[name][1] - now if verb is Verb.RENEW else 0.0
            if left <= min(claim.ttl, claim.below):
                self._set(claim, name, token, now)
        return RENEWED if whole else SET_AGAIN

    def _set(self, claim: Claim, name: str, before: str | None, now: float) -> None:
        # A server counts whole milliseconds, from one that has begun already.
        self.held[name] = (claim.token, int(now * 1000) / 1000 + claim.ttl)
        if self.witness is not None:
            self.witness(name, before, claim.token, claim)

    def _delete(self, claim: Claim, name: str, token: str | None) -> bool:
        if token != claim.token:
            return False
        del self.held[name]
        if self.witness is not None:
            self.witness(name, token, None, claim)
        return True
