"""Prolong short reservations, once their messages have been sent.

A reservation is first taken for some seconds only. Another process releases it, over its own
connections. On a node that is slow for this process, that release may overtake the request that
sets the token. So a token is prolonged at once only on nodes that had acknowledged it before its
message was sent, because nobody can have released it before that. On the other nodes it is
prolonged after they have acknowledged it, and only if a quorum still has it after that. If it has
been released by then, it is deleted on those nodes as well.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..keepalive.watchdog import READ_AFTER_S
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.lease import NEVER
from ..protocol.round import Round, Steps, Verb
from ..runtime.clock import monotonic
from ..stores.driver import BATCH

if TYPE_CHECKING:
    from .client import LockClient

__all__ = ["Prolonging", "acknowledging"]

MAX_LOOKS = 8
"""Number of looks for the answers of late nodes, which takes two seconds. On a node that takes
longer a reservation ends early. Without this limit, thousands of reservations would wait for a node
that hangs."""


@dataclass(frozen=True, slots=True)
class _Short:
    """A reservation that was taken for a short time.

    Attributes:
        taken: The claim by which it was taken.
        longer: The claim with the ttl that it should have.
        sure: The nodes that had acknowledged it before its message was sent, or on which it is
            prolonged by now.
        looks: The number of looks for the answers of the other nodes.
    """

    taken: Claim
    longer: Claim
    sure: tuple[int, ...]
    looks: int = 0

    def late(self) -> list[int]:
        """Return the nodes that were asked for it and are not in `sure`."""
        nodes = range(self.taken.nodes)
        return [n for n in nodes if self.taken.written >> n & 1 and n not in self.sure]


class Prolonging:
    """The reservations of one process that must still be prolonged."""

    def __init__(self, client: LockClient) -> None:
        self._client = client
        self._short: deque[_Short] = deque()
        self._late: deque[_Short] = deque()
        self._written = -math.inf

    def soon(self, taken: Claim, seconds: float, sure: Iterable[int], below: float) -> None:
        """Prolong a claim to `seconds` from now: a single claim at once, many of them together.

        Args:
            taken: The claim, as it was granted.
            seconds: The new time that it lasts.
            sure: The nodes that had acknowledged it before another process could release it.
            below: Nodes on which more than this is left of it do not change it; seconds.
        """
        longer = Claim(taken.resources, taken.token, seconds, taken.nodes)
        longer.below = below
        self._short.append(_Short(taken, longer, tuple(sure)))
        if monotonic() >= self._written + READ_AFTER_S:
            self.now()
        else:
            self._client.watchdog.retry_soon(READ_AFTER_S)

    def now(self, patience: float = 0.0) -> None:
        """Prolong the postponed claims; wait at most `patience` seconds for the nodes' answers."""
        entries: list[_Short] = []
        try:
            _move(self._short, entries)
            if entries:
                self._written = monotonic()
                self._renew([(one.sure, one.longer) for one in entries], patience)
        except BaseException:
            self._short.extend(entries)
            raise
        late = [one for one in entries if one.late()]
        self._late.extend(late)
        if patience:
            _ = self.finish(patience, everywhere=True) or self.finish(patience)
        elif late:
            self._client.watchdog.retry_soon(READ_AFTER_S)

    def finish(self, patience: float, *, everywhere: bool = False) -> bool:
        """Prolong reservations on late nodes, or delete them there; return True if none is left.

        Args:
            patience: How long to wait for each answer; seconds.
            everywhere: True to wait for the late nodes as well.
        """
        entries: list[_Short] = []
        _move(self._late, entries)
        renewing: list[tuple[tuple[int, ...], Claim]] = []
        for batch in (entries[i : i + BATCH] for i in range(0, len(entries), BATCH)):
            # Noted before a quorum is asked, so that the quorum's answers are newer.
            there = [acknowledging(one.taken) for one in batch]
            asked = [one.taken for one in batch]
            targets = None if everywhere else {node for nodes in there for node in nodes}
            look = partial(quorum.peek, asked, patience=patience, nodes=targets)
            ballot = self._client.driver.run(look)
            for number, (one, nodes) in enumerate(zip(batch, there, strict=True)):
                count = outcome.tokens(ballot, number).count(one.taken.token)
                late = [node for node in one.late() if node not in nodes]
                if count >= ballot.quorum:
                    renewing.append((tuple(set(nodes) - set(one.sure)), one.longer))
                    one = replace(one, sure=nodes)
                elif ballot.yes - count >= ballot.quorum:
                    self._client.driver.run(partial(quorum.free, one.taken, patience=0.0))
                    continue
                if late and one.looks < MAX_LOOKS:
                    self._late.append(replace(one, looks=one.looks + 1))
        self._renew(renewing, 0.0)
        return not self._late

    def _renew(self, each: Sequence[tuple[tuple[int, ...], Claim]], patience: float) -> None:
        """Prolong each claim on its own nodes: one request to each node for `BATCH` of them."""
        rounds: list[Callable[[float], Steps[Round]]] = []
        for batch in (each[i : i + BATCH] for i in range(0, len(each), BATCH)):
            alike: dict[tuple[int, ...], list[int]] = defaultdict(list)  # nodes, by what they get
            for node in range(len(self._client.addresses)):
                alike[tuple(n for n, (nodes, _) in enumerate(batch) if node in nodes)].append(node)
            for numbers, nodes in alike.items():
                claims = [batch[number][1] for number in numbers]
                if claims:
                    rounds.append(
                        partial(
                            quorum.extend,
                            claims,
                            patience=patience,
                            verb=Verb.RENEW,
                            nodes=nodes,
                        )
                    )
        if rounds:
            self._client.driver.run_all(rounds)


def acknowledging(claim: Claim) -> tuple[int, ...]:
    """Return the nodes that have acknowledged a claim by now."""
    return tuple(node for node, expiry in enumerate(claim.expiries) if expiry != NEVER)


def _move(source: deque[_Short], to: list[_Short]) -> None:
    while source:
        to.append(source.popleft())
