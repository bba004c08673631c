"""A reservation: a resource that is a message's from its publication on.

It has its own key on the nodes, beside that of the lock, and its own token, which names the task.
The token travels in a header of the message, so every process that sees the message's end can free
it, by compare-and-delete. To lose one is no danger: the lock still decides which body runs.

A reservation is a claim like any other (`claim.py`), by the rounds of `quorum.py`. It may end
before its message, never the other way round: in doubt there is a duplicate in the queue, and no
key that is reserved for nothing. So it is taken for seconds, and made to last when its message is
out; from then on whoever sees the message prolongs it, but only the process that runs the body sets
it again: the message may have come to its end, and would leave it behind.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.checks import DAY, DUPLICATE_POLICIES, MIN_TTL, SCOPES, lets_several
from ..config.options import TaskOptions
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, NotAcquired, QuorumUnavailable
from ..protocol.names import MARK_SUFFIX, MAX_SLOTS, RESERVED_SUFFIX, Resources, checked_names
from ..protocol.replies import DONE
from ..protocol.round import RENEWED, Round, Verb
from ..protocol.texts import names_of, printable, shown
from ..protocol.values import Owner, Query, token_digest
from ..runtime.blocking import blocking
from ..runtime.clock import monotonic
from .headers import short_id

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = [
    "BEGUN",
    "HOUR",
    "MONTH",
    "REPLACED",
    "RESERVING",
    "UNSENT_TTL_S",
    "WHILE_RUNNING",
    "Reservation",
    "adopt",
    "claim_for",
    "claim_of",
    "free",
    "free_in",
    "free_of",
    "free_soon",
    "give_up",
    "is_anothers",
    "look",
    "mark_of",
    "pause",
    "prolong",
    "start",
    "take",
    "unsent_ttl",
]

RESERVING = tuple(scope for scope in SCOPES if scope != "while_executing")
_RESERVES = {
    "while_executing": 0,
    "until_executing": 1,
    "until_and_while_executing": 1,
    "until_executed": 2,
    "until_succeeded": 3,
    "until_expired": 4,
}
"""How long a scope keeps others from publishing: not at all, until the body begins, ends, ever."""
WHILE_RUNNING = ("until_executed", "until_succeeded")
"""Scopes under which it is extended while the body runs."""
HOUR = 3600.0
"""Seconds that it is kept if neither `reserve_ttl` nor `expires` says otherwise."""
UNSENT_TTL_S = 10.0
"""For which it is taken at most while its message is not out: a producer that is killed in between
blocks its key for so long."""
MONTH = 31 * DAY
"""Seconds from now for which one call can reserve its key, by its ETA, `expires` or `reserve_ttl`:
workers publish the callbacks that a message brings, as it says, and anybody may have written it. It
would block the key for centuries. Who means it declares it. A worker that holds the message
prolongs its reservation; elsewhere there may be a duplicate in the queue after this time."""
MAX_TOKEN_CHARS = 1000
"""Of a token in a header; ours have at most some 600, most of them the names of task and host."""
MAX_PAUSE_S = 0.02
"""Between two looks at a reservation that is about to be freed: a round takes a tenth of it."""
REPLACED, BEGUN = "replaced", "begun"
"""What a mark on the nodes says of the message that a token was made for."""


@dataclass(frozen=True)
class Reservation:
    """What a message says of its reservation.

    Attributes:
        resources: What its task locks, by its names.
        scope: From when to when it is taken.
        on_duplicate: What a duplicate gets.
        ttl: How long it lasts from when its message may start; seconds.
        token: Proof that it is this message's; empty if the message has none.
        begun: Whether its body had begun before: then there is nothing left to reserve.
        unreserved: True if its call replaces queued ones, and had to be sent without a reservation.
            It may be newer than the message that has one, so it runs in any case.
    """

    resources: tuple[str, ...]
    scope: str
    on_duplicate: str
    ttl: float
    token: str = field(default="", repr=False)
    begun: bool = False
    unreserved: bool = False

    @property
    def resource(self) -> str:
        """What its task locks, for people."""
        return shown(self.resources)

    def header(self) -> dict[str, Any]:
        """As it stands in a message."""
        every = {**vars(self), "resources": list(self.resources)}
        return {name: value for name, value in every.items() if value}

    @classmethod
    def of(
        cls,
        given: Any,
        task_id: Any,
        options: TaskOptions | None = None,
        *,
        confirmed: bool = False,
    ) -> Reservation | None:
        """Return what counts of a message's header; None if that is nothing, or nonsense.

        Anybody may have written it. So it tells what its message has been through, and what its
        call asked for, as far as that takes no lock from a body, and keeps no key for longer than
        its task would. What reserves more than the task does counts where the nodes hold the token:
        only a process that may ask them can have put it there.

        Args:
            given: The header's value.
            task_id: The message's: a token that names another is none of its.
            options: Those of its task; None to free what it has, and for nothing else.
            confirmed: Whether the nodes hold its token, or whoever acts on this will ask them.
        """
        if not isinstance(given, Mapping):
            return None
        names, scope = given.get("resources"), given.get("scope")
        policy, ttl, token = given.get("on_duplicate"), given.get("ttl"), given.get("token", "")
        if scope not in SCOPES or policy not in DUPLICATE_POLICIES:
            return None
        if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not abs(ttl) < math.inf:
            return None
        if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARS:
            return None
        try:
            names = checked_names(list(names) if isinstance(names, (list, tuple)) else ())
        except ConfigurationError:
            return None
        owner = Owner.of(token) if token else None
        if token and (owner is None or owner.task_id != short_id(task_id)):
            token = ""  # such as of headers that were handed on to another message
        # Only these scopes free it when the body begins: of another's body this tells nothing.
        begun = given.get("begun") is True and _RESERVES[scope] == 1
        longest = HOUR
        if options is not None:
            longest = options.reserve_ttl or HOUR
            if scope == "until_executing" != options.scope:
                scope = "until_and_while_executing"
            if not confirmed and _RESERVES[scope] > _RESERVES[options.scope]:
                scope = options.scope
        ttl = float(min(max(ttl, MIN_TTL), longest))
        unreserved = given.get("unreserved") is True and policy == "replace" and not token
        return cls(names, scope, policy, ttl, token, begun, unreserved)


def claim_for(
    redlock: Redlock,
    resource: Resources,
    ttl: float,
    task_id: str = "",
    task: str = "",
    *,
    token: str = "",
) -> Claim:
    """A claim on the reservation of what a task locks, for `ttl` seconds.

    Of the message with that token; or of one that is to be sent, of a task with that id and name.
    """
    if not token:
        us = redlock.client.owner
        owner = Owner(us.host, us.pid, short_id(task_id), task=short_id(task))
        token = owner.token(os.urandom(16).hex(), time.time())
    names = [name + RESERVED_SUFFIX for name in names_of(resource)]
    return Claim(names, token, ttl, len(redlock.client.addresses))


def claim_of(redlock: Redlock, note: Reservation) -> Claim:
    """A claim on what a message has reserved, by the token that it brings along."""
    return claim_for(redlock, note.resources, note.ttl, token=note.token)


def unsent_ttl(ttl: float) -> float:
    """Return for how long a key is reserved while its message is not out; seconds.

    It is shorter than the ttl that a body asks for, `ttl`, so that one can be told from the other.
    """
    return max(MIN_TTL, min(UNSENT_TTL_S, ttl / 2))


def take(redlock: Redlock, claim: Claim) -> NotAcquired | None:
    """Take it, in one round; return the refusal, and None if it is taken."""
    patience = redlock.client.patience(claim.ttl)
    ballot = redlock.client.driver.run(lambda now: quorum.acquire(claim, now, patience))
    if claim.granted_at is None:
        return outcome.refusal(claim.resource, ballot, redlock.nodes, claim.ttl)
    return None


def pause(until: float) -> bool:
    """Wait a moment, if there is one left until then (`time.monotonic`); return whether there was.

    At random, so that several who ask at once do not meet again.
    """
    if time.monotonic() >= until:
        return False
    time.sleep(random.uniform(0.001, MAX_PAUSE_S))
    return True


def adopt(redlock: Redlock, claim: Claim) -> bool | None:
    """Confirm it, for its ttl from now; where it has expired it is taken again.

    Return whether it is ours, and was not replaced by a call that has freed it since; None if too
    few nodes answered to tell.
    """
    patience = redlock.client.patience(claim.ttl)
    ballot = redlock.client.driver.run(lambda now: quorum.extend([claim], now, patience))
    if ballot.confirmed() and claim.grant(monotonic()):
        if ballot.details.count(RENEWED) >= ballot.quorum or not look(redlock, claim).replaced:
            return True
    elif not ballot.denied:
        return None
    redlock.client.driver.run(lambda now: quorum.undo(claim, now))
    return False


def start(redlock: Redlock, claim: Claim) -> bool:
    """Free it as its body begins; return whether it was ours."""
    ballot = redlock.client.driver.run(lambda now: quorum.free(claim, now, redlock.node_timeout))
    return not ballot.denied


class Look(NamedTuple):
    """What the nodes say of a reservation.

    Attributes:
        token: The token that a quorum of nodes holds; None if there is none, or none can be told.
        left: Seconds for which a quorum of nodes will hold it; 0.0 if there is none.
        replaced: True if a quorum of nodes has the mark that a later call took the place of the
            message that was asked about.
    """

    token: str | None
    left: float
    replaced: bool

    @property
    def owner(self) -> Owner | None:
        """Return who made the token; None if there is none, or another program did."""
        return Owner.of(self.token) if self.token else None


def look(redlock: Redlock, claim: Claim) -> Look:
    """Ask the nodes who has a reservation, and whether the message of `claim` was replaced."""
    asked: list[Claim | Query] = [claim, Query((mark_of(claim, REPLACED),), claim.nodes)]
    ballot = redlock.client.driver.run(lambda now: quorum.peek(asked, now, redlock.node_timeout))
    tokens = outcome.tokens(ballot)
    token = next((one for one in tokens if tokens.count(one) >= ballot.quorum), None)
    lasts = sorted(held[1] for held in outcome.seen(ballot, 0) if held and held[0] == token)
    left = lasts[-ballot.quorum] if token is not None else 0.0
    # No single node may keep a message from being run.
    replaced = outcome.tokens(ballot, 1).count(DONE) >= ballot.quorum
    return Look(token, left, replaced)


def mark_of(claim: Claim, what: str) -> str:
    """Return the name of the mark that says this of a claim's message (`REPLACED`, `BEGUN`).

    It is the token's, as an id may be used again.
    """
    owner = Owner.of(claim.token)
    task_id = owner.task_id if owner is not None else ""
    return f"{task_id}:{what}:{token_digest(claim.token)}{MARK_SUFFIX}"


def free_in(redlock: Redlock, resource: str) -> float | None:
    """Seconds until a reservation ends by itself; None if too few nodes answered to tell."""
    redlock.client.prolonging.now()  # it may be one that this process took a moment ago
    claim = claim_for(redlock, resource, MIN_TTL)
    ballot = redlock.client.driver.run(lambda now: quorum.peek([claim], now, redlock.node_timeout))
    return outcome.free_in(ballot) if ballot.yes >= ballot.quorum else None


def is_anothers(owner: Owner, task: Any) -> bool:
    """Whether a task of another name has reserved a key that both have: it is no duplicate."""
    return owner.task not in ("", short_id(task.name))


def prolong(redlock: Redlock, claims: Sequence[Claim], patience: float = 0.0) -> list[Round]:
    """Let reservations last for their ttl from now at least, where they have not ended.

    Their messages are elsewhere: what is gone may have been freed at their end. The claims are
    fresh ones, with the messages' tokens. `patience` is as in `free`. Return the rounds.
    """
    return redlock.client.driver.extend(claims, patience, Verb.RENEW)


def free(redlock: Redlock, claim: Claim, patience: float = 0.0) -> Round:
    """Free it; return what the nodes said. Those that are away are told when they are back.

    `patience` is how long to wait for the nodes, in seconds; 0 only writes to them.
    """
    return redlock.client.driver.run(lambda now: quorum.free(claim, now, patience))


def free_of(
    redlock: Redlock, names: tuple[str, ...], task_id: str, limit: Any, running: bool = False
) -> Claim | bool | None:
    """Free what another message has reserved, which will not be run.

    Its task's id is as in its token, and `limit` is its task's option. If a body of that task's id
    is at work it is left alone, unless `running` is set.

    Returns:
        A claim on what is freed, whose ttl is what was left of it, in seconds; None if the other
        has it no more; False if its body is at work, or nobody can tell.
    """
    try:
        if not running and _is_at_work(redlock, names, task_id, limit):
            return False
    except QuorumUnavailable:
        return False
    seen = look(redlock, claim_for(redlock, names, MIN_TTL))
    if seen.token and seen.owner is not None and seen.owner.task_id == task_id:
        freed = claim_for(redlock, names, max(MIN_TTL, seen.left), token=seen.token)
        # Else its body has begun meanwhile.
        return None if free(redlock, freed, redlock.node_timeout).denied else freed
    return None


def _is_at_work(redlock: Redlock, names: tuple[str, ...], task_id: str, limit: Any) -> bool:
    """Return True if a body of a task may hold one of some names. No node alone can say so.

    Raises:
        QuorumUnavailable: Too few nodes answered to tell.
    """
    slots = MAX_SLOTS if lets_several(limit) else 1
    ballot = blocking(redlock.client.peek(names, slots))
    found = [t for number in range(len(ballot.claims)) for t in outcome.may_hold(ballot, number)]
    return task_id in [owner.task_id for owner in map(Owner.of, found) if owner is not None]


def give_up(redlock: Redlock, claim: Claim) -> None:
    """Its message was not sent: free what has been written of it."""
    if claim.written:
        free(redlock, claim)


def free_soon(redlock: Redlock, note: Reservation) -> None:
    """Free what a message had that is over. For a worker's main process: never waits.

    A thread waits for the answers: that process may not have asked the nodes for hours, and that a
    node or a firewall has hung up meanwhile is only found out by reading.
    """
    free_it = partial(free, redlock, claim_of(redlock, note), redlock.node_timeout)
    name = f"celery_redlock free {printable(note.resource)}"
    threading.Thread(target=free_it, name=name, daemon=True).start()
