"""Pauses: patterns of keys whose bodies must not begin for a while, stored on the nodes.

A pause is not a lock: nothing is exclusive, and a body that is just beginning may still begin. But
it is stored on the nodes like a lock: a token under one of `PAUSE_NAMES`, set on a majority, which
expires by itself and is deleted by compare-and-delete. The token contains the pattern, the operator
and the reason.

A pause counts as soon as one node has it, unless a quorum of nodes does not have it. That has three
consequences. A pause stays in force while nodes are away, because every quorum that answers has a
node in common with the quorum that took it. A pause that was undone or resumed does not come back
with a node that missed this. Without a majority no body begins anyway.

An operator's limit for a while is a pause with a number in its token: so many bodies at a time
instead of none. It changes limits that tasks declare, and never makes an exclusive key a shared
one.

Readers fetch all pause names in one request: a worker's main process every second
(`worker/pauses.py`), and processes that run bodies only while the main process has seen a pause.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config.checks import DAY
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, QuorumUnavailable, RedlockError
from ..protocol.names import (
    MAX_NAME_CHARS,
    MAX_SLOTS,
    PAUSE_NAMES,
    Limit,
    Limits,
    checked_glob,
    matching,
    of_each,
    plain,
)
from ..protocol.texts import printable
from ..protocol.values import Owner, Query
from ..runtime.blocking import blocking
from ..runtime.clock import monotonic

if TYPE_CHECKING:
    from .redlock import Redlock

__all__ = [
    "MAX_PAUSE_S",
    "MAX_TEXT_CHARS",
    "Pause",
    "begin",
    "believed",
    "check",
    "counted",
    "covering",
    "in_force",
    "limited",
    "paused",
]
__all__ += ["resume"]

MAX_PAUSE_S = 7 * DAY
"""Maximum seconds of a pause, so that a forgotten pause ends. An operator can pause again."""
MAX_TEXT_CHARS = 200
"""Maximum characters of a reason, and of an operator's name: all nodes and logs have them."""
CACHE_S = 0.5
"""Seconds for which a process that runs bodies uses the nodes' last answer while keys are
paused."""


@dataclass(frozen=True)
class Pause:
    """One pause, as the nodes have it.

    Attributes:
        name: Its name on the nodes, one of `PAUSE_NAMES`.
        token: Its token there, for compare-and-delete.
        pattern: Pattern of the paused keys: a glob over whole names.
        who: The operator who paused them.
        reason: The operator's reason; may be empty.
        limit: Number of bodies per key that may run all the same; 0 for none.
        since: Its begin, by the operator's clock; seconds since 1970.
        left: Seconds until its end, at the time `read`.
        read: The time at which it was read; seconds.
    """

    name: str
    token: str = field(repr=False)
    pattern: str
    who: str
    reason: str
    limit: int
    since: float
    left: float
    read: float

    @classmethod
    def of(cls, name: str, token: str, left: float) -> Pause | None:
        """Return the pause that a token describes; None if no pause has such a token."""
        owner = Owner.of(token)
        if owner is None or not 0 < len(owner.task_id) <= MAX_NAME_CHARS:
            return None
        if len(owner.stamp) > MAX_TEXT_CHARS or len(owner.task) > MAX_TEXT_CHARS:
            return None
        left = min(left, MAX_PAUSE_S)  # without a ttl it was not made here
        limit = min(owner.retries, MAX_SLOTS)
        said = (owner.task_id, owner.stamp, owner.task, limit, owner.since)
        return cls(name, token, *said, left, monotonic())

    @functools.cached_property
    def fits(self) -> Callable[[str], object]:
        """Function that returns true if a name matches its pattern."""
        return matching(self.pattern)

    @property
    def ends_in(self) -> float:
        """Seconds until it ends."""
        return max(0.0, self.left - (monotonic() - self.read))

    def data(self) -> dict[str, Any]:
        """Return it as data for JSON, without its token."""
        said = {"pattern": self.pattern, "by": self.who, "reason": self.reason, "limit": self.limit}
        return {**said, "since": self.since, "left": self.ends_in}

    def __str__(self) -> str:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() + self.ends_in))
        why = f": {self.reason}" if self.reason else ""
        is_what = f"limited to {self.limit} at a time" if self.limit else "paused"
        return printable(f"{self.pattern} is {is_what} by {self.who} until {until} UTC{why}")


def covering(pauses: Sequence[Pause], names: Sequence[str]) -> Pause | None:
    """Return a pause whose pattern one of these names matches; None if there is none."""
    ends = [pause for pause in pauses if not pause.limit]
    return next((pause for pause in ends if any(map(pause.fits, map(plain, names)))), None)


def limited(pauses: Sequence[Pause], names: Sequence[str], limit: Limit) -> Limit:
    """Return the number of holders allowed for each name while these limits are in force.

    The lowest of several limits applies. Bodies that began earlier count in whichever slot they
    are, also if a larger limit was in force then: the next body waits until fewer are left than the
    limit allows.
    """
    said = [pause for pause in pauses if pause.limit]
    if not said or limit == 1:
        return limit
    now, wide = [], []
    for name, many in zip(names, of_each(names, limit), strict=True):
        of = [pause.limit for pause in said if pause.fits(name)] if many > 1 else []
        now.append(min(of, default=many))  # an exclusive key stays exclusive
        wide.append(MAX_SLOTS if of else many)
    return limit if wide == now else Limits(tuple(now), tuple(wide))


def in_force(redlock: Redlock, patience: float | None = None) -> tuple[tuple[Pause, ...], bool]:
    """Ask the nodes for the pauses.

    Returns:
        The pauses that count; and True if a quorum has answered. If not, there may be more pauses.
    """
    patience = redlock.node_timeout if patience is None else patience
    asked = [Query((name,), len(redlock.nodes)) for name in PAUSE_NAMES]
    ballot = redlock.client.driver.run(lambda now: quorum.peek(asked, now, patience))
    answers = {name: outcome.seen(ballot, number) for number, name in enumerate(PAUSE_NAMES)}
    return counted(answers, ballot.quorum), ballot.yes >= ballot.quorum


def counted(
    answers: Mapping[str, Sequence[tuple[str, float] | None]], quorum: int
) -> tuple[Pause, ...]:
    """Return the pauses that count.

    Args:
        answers: By name, the token and the seconds left on each node that has answered.
        quorum: The number of nodes without it from which it does not count.
    """
    found = []
    for name, nodes in answers.items():
        there = [one for one in nodes if one is not None]
        for token, count in Counter(token for token, _left in there).items():
            pause = Pause.of(name, token, max(left for other, left in there if other == token))
            if pause is not None and len(nodes) - count < quorum:
                found.append(pause)
    return tuple(found)


def check(pattern: str, seconds: float, who: str, reason: str) -> None:
    """Check the arguments of `begin`.

    Raises:
        ConfigurationError: The pattern, the time or a text is not allowed.
    """
    checked_glob(pattern)
    if not 1.0 <= seconds <= MAX_PAUSE_S:
        raise ConfigurationError(
            f"it lasts 1 second to {MAX_PAUSE_S / DAY:g} days, so that a forgotten one ends;"
            f" it is {seconds:g} s"
        )
    for what, text in (("reason", reason), ("who", who)):
        if len(text) > MAX_TEXT_CHARS:
            raise ConfigurationError(
                f"{what} has at most {MAX_TEXT_CHARS} characters; it has {len(text)}"
            )


def begin(
    redlock: Redlock, pattern: str, seconds: float, who: str, reason: str = "", limit: int = 0
) -> Pause:
    """Pause the keys that match a pattern, in place of an earlier pause of the same pattern.

    With a limit, let so many of their bodies run, in place of an earlier limit.

    Raises:
        ConfigurationError: The pattern, the time or a text is not allowed.
        QuorumUnavailable: Fewer than a quorum of nodes have stored it; it is undone on these.
        RedlockError: The maximum number of pauses is in force.
    """
    check(pattern, seconds, who, reason)
    client, nodes = redlock.client, len(redlock.nodes)
    client.require("an operator's limit" if limit else "a pause", "ttl_per_key")
    before, _ = in_force(redlock)
    owner = Owner(
        *(client.owner.host, client.owner.pid, pattern, limit),
        stamp=who.replace("|", "/"),
        task=reason,
    )
    for name in PAUSE_NAMES:
        token = owner.token(os.urandom(16).hex(), time.time())
        claim = Claim(name, token, seconds, nodes)
        ballot = client.driver.run(
            functools.partial(quorum.acquire, claim, patience=redlock.node_timeout)
        )
        if claim.granted_at is not None:
            # The new one is set before the old one ends, so that there is no moment without.
            same = [one for one in before if one.pattern == pattern]
            replaced = [one for one in same if bool(one.limit) == bool(limit)]
            _end(redlock, replaced, "it is in force, and what it replaces may be as well")
            pause = Pause.of(name, token, seconds)
            assert pause is not None
            return pause
        if isinstance(
            error := outcome.refusal(name, ballot, redlock.nodes, seconds), QuorumUnavailable
        ):
            raise _of(pattern, "nothing has changed", error)
    raise RedlockError(
        f"{len(PAUSE_NAMES)} pauses are in force, and there can be no more: resume one of them, or"
        " pause a pattern that covers several"
    )


def resume(redlock: Redlock, pattern: str) -> tuple[list[Pause], list[str]]:
    """End the pauses and limits that have exactly this pattern.

    Returns:
        The ended pauses; and the nodes that did not answer, which may have them until they expire.

    Raises:
        QuorumUnavailable: Fewer than a quorum of nodes have answered, or ended it; it may go on.
    """
    found, sure = in_force(redlock)
    ended = [one for one in found if one.pattern == pattern]
    try:
        if not sure:
            blocking(redlock.client.peek(PAUSE_NAMES[:1]))  # its error names the silent nodes
    except QuorumUnavailable as error:
        raise _of(pattern, "it may go on", error) from None
    return ended, _end(redlock, ended, "it may go on")


def _of(pattern: str, so: str, error: QuorumUnavailable) -> QuorumUnavailable:
    """Return an error that names the pattern, and not the name under which nodes store it."""
    said = str(error).removeprefix(f"{error.resource}: ")
    return QuorumUnavailable(f"{pattern}: {so}: {said}", resource=pattern, votes=error.votes)


def _end(redlock: Redlock, pauses: Sequence[Pause], so: str) -> list[str]:
    """End pauses; return the nodes that did not answer."""
    driver, nodes, patience = redlock.client.driver, redlock.nodes, redlock.node_timeout
    for pause in pauses:
        claim = Claim(pause.name, pause.token, MAX_PAUSE_S, len(nodes))
        ballot = driver.run(functools.partial(quorum.free, claim, patience=patience))
        if not ballot.quorum_answered:
            raise _of(pause.pattern, so, outcome.unavailable(pause.name, ballot, nodes))
    if not pauses:
        return []
    asked = [Query(PAUSE_NAMES[:1], len(nodes))]  # waits for all, not for a quorum only
    ballot = driver.run(functools.partial(quorum.peek, asked, patience=patience))
    return [nodes[number] for number in sorted(outcome.silent(ballot))]


_believed: tuple[float, Redlock | None, tuple[Pause, ...]] = (0.0, None, ())


def paused(redlock: Redlock, names: Sequence[str]) -> Pause | None:
    """Return the pause that keeps a body of these names from beginning; None if none does.

    For processes that run bodies.
    """
    return covering(believed(redlock), names)


def believed(redlock: Redlock) -> Sequence[Pause]:
    """Return the pauses, at most `CACHE_S` old, for processes that run bodies.

    The nodes are asked only while the worker's main process has seen a pause.
    """
    global _believed
    if not redlock.client.registry.paused:
        return ()
    at, whose, pauses = _believed
    if whose is not redlock or not at <= monotonic() < at + CACHE_S:
        pauses, _ = in_force(redlock)
        _believed = (monotonic(), redlock, pauses)
    return pauses
