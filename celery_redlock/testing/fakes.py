"""Model of one Redis master, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.claim import Claim
from ..protocol.names import MAX_DEAD_WAITERS, base_of
from ..protocol.replies import DONE
from ..protocol.round import REFUSED, RENEWED, SET_AGAIN, Held, Verb
from ..protocol.values import SHARED, Owner, Query, QueueEntry, is_shared

BARRIER_S = 1.0
"""Seconds for which no new reader passes a writer that the last reader's release has woken."""
FOREIGN = "<not a lock>"
"""The node's answer for the token, if a key of another type is under our name."""


class FakeNode:
    """One Redis master, as a lock sees it: keys that hold a token until they expire.

    Attributes:
        held: Per resource, its token and when that expires, by the clock of the caller; seconds.
        readers: Per resource, the token of each reader and when that expires.
        fences: Per resource, the last fencing token. (A server drops it after a week.)
        lines: Per resource, its wait queue: each waiter, with the time since which it waits.
        listening: The processes that receive notifications.
        notified: The waiters that were notified, in order.
        full: True if it has no memory for another key; existing keys can be renewed and deleted.
        witness: Called with (resource, token before, token after, claim) at every change that a
            request makes; for tests.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, float]] = {}
        self.readers: dict[str, dict[str, float]] = {}
        self.fences: dict[str, int] = {}
        self.lines: dict[str, dict[str, int]] = {}
        self.barriers: dict[str, tuple[float, str]] = {}
        self.listening: set[str] = set()
        self.notified: list[str] = []
        self.full = False
        self.witness: Callable[[str, str | None, str | None, Claim], None] | None = None

    def execute(self, verb: Verb, claims: Sequence[Any], now: float) -> Any:
        """Execute the request of a round; return a reply that `Round.answer` accepts."""
        if verb.extends:
            return "".join([self._extend(verb, claim, now) for claim in claims])
        if verb is Verb.PEEK:
            seen = [self._peek(query, now) for query in claims]
            return seen if len(seen) > 1 else seen[0]
        claim = claims[0]
        if verb is Verb.FENCE:
            return self._fence(claim, self.token(claim.resources[0], now))
        if verb is Verb.ACQUIRE:
            if is_shared(claim.token) and (other := self._in_the_way(claim, now)):
                return other[0]
            return self._acquire(claim, now)
        if verb in (Verb.ENQUEUE, Verb.DEQUEUE, Verb.HAND_ON):
            return self._queue(verb, claim, now)
        if verb is Verb.RELEASE and claim.mark is not None and not self.full:
            name, life = claim.mark
            self.held[name] = (DONE, now + life)
        names = claim.resources
        freed = [self._delete(claim, name, self.token(name, now, claim.token)) for name in names]
        if verb is Verb.UNDO or (is_shared(claim.token) and self.token(names[0], now)):
            return all(freed)
        called = [self._wake_next(base_of(name), claim.token, now) for name in names]
        return all(freed) + 2 if any(called) else all(freed)

    def forget(self) -> None:
        """Lose all memory."""
        self.held.clear()
        self.readers.clear()
        self.barriers.clear()
        self.lines.clear()
        self.fences.clear()

    def token(self, resource: str, now: float, seen_by: str = "") -> str | None:
        """Return the token of `resource`, as its claimer `seen_by` sees it, or None.

        A reader sees its own token, and no other reader's. Others see that of any one reader.
        """
        readers = self.readers.get(resource, {})
        for reader in [reader for reader, until in readers.items() if now >= until]:
            del readers[reader]
        if seen_by in readers:
            return seen_by
        if readers and not is_shared(seen_by):
            return next(iter(readers))
        entry = self.held.get(resource)
        if entry is None:
            return None
        if now >= entry[1]:
            del self.held[resource]
            return None
        return entry[0]

    def until(self, resource: str, token: str) -> float:
        """Return when the key that `token` holds expires."""
        if is_shared(token):
            return self.readers[resource][token]
        return self.held[resource][1]

    def occupy(self, resource: str) -> None:
        """Put a key of another type, without an expiry, under the name of `resource`."""
        self.held[resource] = (FOREIGN, float("inf"))

    def _queue(self, verb: Verb, place: QueueEntry, now: float) -> bool:
        stood = []
        for name in place.resources:
            line = self.lines.setdefault(name, {})
            stood.append(line.pop(place.token, None) is not None)
            if verb is Verb.ENQUEUE:
                line[place.token] = place.since
            elif verb is Verb.HAND_ON:
                held = self.token(name, now)
                first = min(line, key=lambda member: (line[member], member), default="")
                behind = is_shared(held or "") and is_shared(first)
                if behind or not (stood[-1] and held):
                    self._wake_next(name, "", now)
        return verb is Verb.ENQUEUE or all(stood)

    def _wake_next(self, name: str, freed_by: str, now: float) -> bool:
        """Notify the first waiter whose process listens; after a reader also the next readers."""
        line = self.lines.get(name, {})
        self.barriers.pop(name, None)
        called, dead = False, 0
        while line and dead < MAX_DEAD_WAITERS:
            first = min(line, key=lambda member: (line[member], member))
            if called and not is_shared(first):
                break
            del line[first]
            process, _, waiter = first.rpartition(":")
            if self._notifies(process, waiter):
                called = True
                if not is_shared(first):
                    if is_shared(freed_by):
                        self.barriers[name] = (now + BARRIER_S, freed_by)
                    break
            else:
                dead += 1
        return called

    def _in_the_way(self, asks: Claim | Query, now: float) -> tuple[str, float] | None:
        """Return the token that blocks a new reader, if any, and until when.

        It belongs to a reader for the same message; or a writer waits, or was just woken.
        """
        (name,), token = asks.resources, getattr(asks, "token", SHARED)
        if self.token(name, now, token) is not None:
            return None
        readers, mine = self.readers.get(name, {}), Owner.of(token)
        for one in readers:
            other = Owner.of(one)
            if mine and other and mine.task_id and _message_key(mine) == _message_key(other):
                return one, readers[one]
        line = self.lines.get(name, {})
        if readers and any(not is_shared(one) and self._listens(one) for one in line):
            return next(iter(readers)), max(readers.values())
        until, freed_by = self.barriers.get(name, (now, ""))
        return (freed_by, until) if now < until else None

    def _listens(self, member: str) -> bool:
        """Return True if the process of a waiter listens."""
        return member.rpartition(":")[0] in self.listening

    def _notifies(self, process: str, waiter: str) -> bool:
        """Notify a waiter; return True if its process listens."""
        if process in self.listening:
            self.notified.append(f"{process}:{waiter}")
        return process in self.listening

    def _acquire(self, claim: Claim, now: float) -> str | int | None:
        tokens = [self.token(name, now, claim.token) for name in claim.resources]
        for name, token in zip(claim.resources, tokens, strict=True):
            if token not in (None, claim.token):
                return Held(str(token), name)
        if claim.proposal is not None:
            return self._acquire_fenced(claim, tokens[0], now)
        if len(tokens) == 1 and tokens[0] is not None:
            return claim.token  # SET NX GET: an existing value stays as it is
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

    def _peek(self, claim: Claim | Query, now: float) -> tuple[str, float] | None:
        if getattr(claim, "shared", False) and self.token(claim.resources[0], now, SHARED) is None:
            other = self._in_the_way(claim, now)
            return other and (other[0], other[1] - now)
        seen = [(name, self.token(name, now)) for name in claim.resources]
        held = [(name, token) for name, token in seen if token is not None]
        if not held:
            return None
        untils = [u for name, _ in held for u in self.readers.get(name, {}).values()]
        untils += [self.held[name][1] for name, _ in held if name in self.held]
        return held[0][1], max(untils) - now

    def _extend(self, verb: Verb, claim: Claim, now: float) -> str:
        tokens = {name: self.token(name, now, claim.token) for name in claim.resources}
        if any(token not in (None, claim.token) for token in tokens.values()):
            return REFUSED
        whole = None not in tokens.values()
        if not whole and (verb is Verb.RENEW or self.full):
            return REFUSED
        if self.full and is_shared(claim.token):
            return REFUSED
        for name, token in tokens.items():
            left = self.until(name, claim.token) - now if verb is Verb.RENEW else 0.0
            if left <= min(claim.ttl, claim.below):
                self._set(claim, name, token, now)
        return RENEWED if whole else SET_AGAIN

    def _set(self, claim: Claim, name: str, before: str | None, now: float) -> None:
        # A server counts whole milliseconds, rounded down.
        until = int(now * 1000) / 1000 + claim.ttl
        if is_shared(claim.token):
            self.readers.setdefault(name, {})[claim.token] = until
        else:
            self.held[name] = (claim.token, until)
        if self.witness is not None:
            self.witness(name, before, claim.token, claim)

    def _delete(self, claim: Claim, name: str, token: str | None) -> bool:
        if token != claim.token:
            return False
        if is_shared(token):
            del self.readers[name][token]
        else:
            del self.held[name]
        if self.witness is not None:
            self.witness(name, token, None, claim)
        return True


def _message_key(owner: Owner) -> tuple[str, int, str]:
    """Return the key that identifies deliveries of the same message."""
    return owner.task_id, owner.retries, owner.task
