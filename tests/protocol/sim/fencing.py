"""A small world for fencing tokens alone: no time, but far more orders of events.

The world of `celery_redlock.testing` has clocks, and most of its messages travel in the order in
which they were sent. Some ways to hand out a smaller token need rare orders: a vote from before
another's grant that is counted after it, a connection that breaks between two rounds. Here every
step is drawn: which message is carried on, which connection breaks, who stops waiting. The code
that decides is production's: the generators of `quorum.py`, rounds, claims, channels.

Keys do not expire, nothing dies and no node forgets. With a liar, clocks go on, and one node
answers any number from its own on; whatever it says, the others' numbers stay near the clocks.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any
from unittest import mock

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.pipeline import Pipeline
from celery_redlock.protocol.round import Round, Steps, Verb
from celery_redlock.testing.fakes import FakeNode

NODES = 3
CLIENTS = 3
STEPS = 300
FAR = 1e9
AHEAD = 1000
"""Distance by which a token may exceed a clock where a node lies: `quorum.FENCE_AHEAD`."""
REFUSAL = "it is too far ahead"
"""Stands for the error reply of a server."""


class Overtaken(AssertionError):
    """A token is not larger than an earlier one, or two hold the lock."""


class Node(FakeNode):
    """A node that goes no further than it may, as the script of a real one does.

    Attributes:
        lies: Draws how much larger than its own number the one is that it answers; or None.
    """

    lies: Random | None = None

    def _acquire_fenced(self, claim: Claim, token: str | None, now: float) -> Any:
        if self.fences.get("r", 0) >= claim.ceiling:
            return REFUSAL
        fence = super()._acquire_fenced(claim, token, now)
        return fence + (self.lies.choice((0, 1, AHEAD // 2, AHEAD, 10**6)) if self.lies else 0)


class Client:
    """Wants the lock, again and again, with a wall clock that stands anywhere."""

    def __init__(self, number: int, nodes: list[FakeNode], rng: Random) -> None:
        self.number = number
        self.nodes = nodes
        self.wall = rng.randrange(1, 9)
        self.last = self.attempts = 0
        self.channels = [Pipeline(index) for index in range(NODES)]
        self.requests: list[deque[Round]] = [deque() for _ in range(NODES)]
        self.replies: list[deque[tuple[Round, Any]]] = [deque() for _ in range(NODES)]
        self.claim: Claim | None = None
        self.steps: Steps[Any] | None = None
        self.round: Round | None = None
        for channel in self.channels:
            channel.connected(0.0)

    @property
    def holds(self) -> bool:
        """Return True if the client has the lock."""
        return self.claim is not None and self.claim.held(0.0)

    def proposal(self) -> int:
        """Return the proposal, as `Redlock._proposal` does."""
        return max(self.last + 1, self.wall)

    def act(self) -> Claim | None:
        """Acquire, go on or release, as the client's state demands; return the grant."""
        if self.steps is not None:
            assert self.round is not None
            self.round.close("no answer")
            return self._resume(lambda: self.steps.send(0.0))  # type: ignore[union-attr]
        if self.holds:
            assert self.claim is not None
            self.steps = quorum.release(self.claim, 0.0, 1.0)
        else:
            self.attempts += 1
            self.claim = Claim("r", f"{self.number}.{self.attempts}", FAR, NODES)
            self.steps = quorum.acquire(self.claim, 0.0, 1.0, self.proposal(), self.wall)
        return self._resume(lambda: next(self.steps))  # type: ignore[arg-type]

    def _resume(self, step: Any) -> Claim | None:
        asked = self.holds
        try:
            self.round = round_ = step()
        except StopIteration:
            self.steps = None
            if asked or not self.holds:
                return None
            assert self.claim is not None
            self.last = self.claim.fencing_token or 0
            return self.claim
        for index in round_.targets:
            if self.channels[index].ask(round_, 0.0):
                self.requests[index].append(round_)
        return None

    def execute(self, index: int) -> None:
        """The oldest request reaches its node."""
        round_ = self.requests[index].popleft()
        reply = self.nodes[index].execute(round_.verb, round_.claims, 0.0)
        self.replies[index].append((round_, reply))

    def read(self, index: int) -> None:
        """The oldest answer reaches the client."""
        round_, reply = self.replies[index].popleft()
        assert self.channels[index].unanswered.popleft() is round_
        number = type(reply) is int and round_.verb is Verb.ACQUIRE
        if reply == REFUSAL or (number and reply > round_.claims[0].ceiling):
            round_.silence(index, REFUSAL)  # as `replies.decode` has it
        else:
            round_.answer(index, reply, 0.0)

    def break_(self, index: int) -> None:
        """A connection is reset, and made anew at once."""
        self.requests[index].clear()
        self.replies[index].clear()
        self.channels[index].dropped()
        self.requests[index].extend(self.channels[index].connected(0.0))


def lied_to(seed: int) -> int:
    """Run one schedule with a liar; how many grants there were. Raises as `run` does."""
    with mock.patch.object(quorum, "FENCE_AHEAD", AHEAD):
        return run(seed, liar=True)


def run(seed: int, *, liar: bool = False) -> int:
    """Run one schedule; how many grants there were.

    Raises:
        Overtaken: A token came that was not larger than an earlier one, or was far ahead.
    """
    rng = Random(seed)
    nodes = [Node() for _ in range(NODES)]
    for node in nodes:
        node.fences["r"] = rng.randrange(9)  # as failed attempts leave them behind
    nodes[0].lies = rng if liar else None
    clients = [Client(number, nodes, rng) for number in range(CLIENTS)]
    breaks = rng.choice((0.0, 0.02, 0.1))
    hasty = rng.choice((0.0, 0.02))
    slow = {(c, n) for c in range(CLIENTS) for n in range(NODES) if rng.random() < 0.2}
    last = grants = 0
    for _ in range(STEPS):
        for one in clients if liar else ():
            one.wall += 1
        client, index = rng.choice(clients), rng.randrange(NODES)
        if rng.random() < breaks:
            client.break_(index)
        elif client.replies[index] and rng.random() < 0.6:
            client.read(index)
        elif client.requests[index]:
            if (client.number, index) not in slow or rng.random() < 0.1:
                client.execute(index)
        elif client.round is None or client.round.decided or rng.random() < hasty:
            claim = client.act()
            if claim is None:
                continue
            grants += 1
            token = claim.fencing_token or 0
            if token <= last:
                raise Overtaken(f"seed {seed}: {claim.token} got {token} after {last}")
            last = token
            most = max(one.wall for one in clients) + AHEAD
            if liar and max(token, *(node.fences["r"] for node in nodes)) > most:
                raise Overtaken(f"seed {seed}: {token} is more than {AHEAD} ahead of all clocks")
            if sum(other.holds for other in clients) > 1:
                raise Overtaken(f"seed {seed}: two hold the lock")
    return grants
