"""Reservations: a resource belongs to a message from its publication on.

A reservation has its own key on the nodes, beside that of the lock, and its own token, which names
the task. The token travels in a header of the message, so every process that sees the message's end
can release it, by compare-and-delete. To lose one is not dangerous, because the lock still decides
which body runs.

A reservation is a claim like any other (`claim.py`), made by the rounds of `quorum.py`. It may end
before its message, but never the other way round: in doubt a duplicate in the queue is better than
a key that is reserved for nothing. So it is taken for seconds, and prolonged when its message is
out. From then on every process that has the message prolongs it. But only the process that runs the
body sets it again: anywhere else the message may already be over, and the reservation would stay.
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

from ..config.checks import DAY, DUPLICATE_POLICIES, MIN_TTL, SCOPES, allows_several
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
    "abandon",
    "adopt",
    "belongs_to_other_task",
    "claim_for",
    "claim_of",
    "free",
    "free_by_id",
    "free_in",
    "free_soon",
    "look",
    "mark_of",
    "pause",
    "prolong",
    "start",
    "take",
    "unsent_ttl",
]

RESERVING = tuple(scope for scope in SCOPES if scope != "while_executing")
_SCOPE_RANK = {
    "while_executing": 0,
    "until_executing": 1,
    "until_and_while_executing": 1,
    "until_executed": 2,
    "until_succeeded": 3,
    "until_expired": 4,
}
"""Ranks of the scopes by how long they keep others from publishing: not at all; until the body
begins; until it ends; after a success, for `reserve_ttl` more; in any case, until expiry."""
WHILE_RUNNING = ("until_executed", "until_succeeded")
"""Scopes whose reservation is extended while the body runs."""
HOUR = 3600.0
"""The ttl of a reservation in seconds, if neither `reserve_ttl` nor `expires` is given."""
UNSENT_TTL_S = 10.0
"""The largest ttl of a reservation whose message is not out, in seconds: if the producer is killed
in between, its key stays blocked for so long."""
MONTH = 31 * DAY
"""Maximum seconds from now for which one call can reserve its key, by its ETA, `expires` or
`reserve_ttl`. Workers publish the callbacks of a message with the times given there, and anybody
may have written it: it could block the key for centuries. A longer time must be declared with the
task. A worker that holds the message prolongs its reservation; elsewhere there may be a duplicate
in the queue after this time."""
MAX_TOKEN_CHARS = 1000
"""Maximum number of characters of a token in a header; ours have at most about 600, mostly the
names of task and host."""
MAX_PAUSE_S = 0.02
"""Maximum seconds between two looks at a reservation that is about to be released: a round takes a
tenth of it."""
REPLACED, BEGUN = "replaced", "begun"
"""The marks on the nodes for the message that a token was made for."""


@dataclass(frozen=True)
class Reservation:
    """The description of a message's reservation, in its header.

    Attributes:
        resources: The names that its task locks.
        scope: From when to when the key is taken.
        on_duplicate: The treatment of a duplicate.
        ttl: How long it lasts after its message may start; seconds.
        token: Proof that it is this message's; empty if the message has none.
        begun: True if its body had begun before: then there is nothing left to reserve.
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
        """The names that its task locks as one text, for people."""
        return shown(self.resources)

    def header(self) -> dict[str, Any]:
        """Return the header's value."""
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
        """Return the reservation of a header, with its claims limited; None if it is malformed.

        Anybody may have written the header. So its scope and ttl count only as far as they take no
        lock from a body, and keep no key for longer than its task would. A scope that reserves more
        than the task's counts if the nodes hold the token: only a process with access to the nodes
        can have set it there.

        Args:
            given: The header's value.
            task_id: The id of the message; a token with another id does not count.
            options: The options of its task; None if it is only needed to release the reservation.
            confirmed: True if the nodes hold its token, or the caller will ask them before acting.
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
            token = ""  # the headers may have been copied to another message
        # Only these scopes release it when the body begins; with others `begun` means nothing.
        begun = given.get("begun") is True and _SCOPE_RANK[scope] == 1
        longest = HOUR
        if options is not None:
            longest = options.reserve_ttl or HOUR
            if scope == "until_executing" != options.scope:
                scope = "until_and_while_executing"
            if not confirmed and _SCOPE_RANK[scope] > _SCOPE_RANK[options.scope]:
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
    """Return a claim on the reservation of a resource, for `ttl` seconds.

    It has the token of an existing message; or a new one, for a task with this id and name.
    """
    if not token:
        us = redlock.client.owner
        owner = Owner(us.host, us.pid, short_id(task_id), task=short_id(task))
        token = owner.token(os.urandom(16).hex(), time.time())
    names = [name + RESERVED_SUFFIX for name in names_of(resource)]
    return Claim(names, token, ttl, len(redlock.client.addresses))


def claim_of(redlock: Redlock, note: Reservation) -> Claim:
    """Return a claim on the reservation of a message, with the message's token."""
    return claim_for(redlock, note.resources, note.ttl, token=note.token)


def unsent_ttl(ttl: float) -> float:
    """Return the ttl of a reservation while its message is not out; seconds.

    It is shorter than the ttl of the body's lock, `ttl`, so that the two can be distinguished.
    """
    return max(MIN_TTL, min(UNSENT_TTL_S, ttl / 2))


def take(redlock: Redlock, claim: Claim) -> NotAcquired | None:
    """Take a reservation, in one round; return the refusal, or None if it is taken."""
    patience = redlock.client.patience(claim.ttl)
    ballot = redlock.client.driver.run(lambda now: quorum.acquire(claim, now, patience))
    if claim.granted_at is None:
        return outcome.refusal(claim.resource, ballot, redlock.nodes, claim.ttl)
    return None


def pause(until: float) -> bool:
    """Wait a short random time and return True, unless `until` (`time.monotonic`) is over.

    The time is random, so that several processes that asked at once do not collide again.
    """
    if time.monotonic() >= until:
        return False
    time.sleep(random.uniform(0.001, MAX_PAUSE_S))
    return True


def adopt(redlock: Redlock, claim: Claim) -> bool | None:
    """Extend a reservation to its ttl from now; where it has expired, it is taken again.

    Return True if it is ours, and no later call has released it to replace it; None if too few
    nodes answered.
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
    """Release a reservation because its body begins; return True if it was ours."""
    ballot = redlock.client.driver.run(lambda now: quorum.free(claim, now, redlock.node_timeout))
    return not ballot.denied


class Look(NamedTuple):
    """The state of a reservation on the nodes.

    Attributes:
        token: The token that a quorum of nodes holds; None if no token is known to have a quorum.
        left: Seconds for which a quorum of nodes will hold it; 0.0 without a token.
        replaced: True if a quorum of nodes has the mark that a later call took the place of the
            message in question.
    """

    token: str | None
    left: float
    replaced: bool

    @property
    def owner(self) -> Owner | None:
        """The owner that made the token; None without a token, or if another program did."""
        return Owner.of(self.token) if self.token else None


def look(redlock: Redlock, claim: Claim) -> Look:
    """Ask the nodes who has a reservation, and if the message of `claim` was replaced."""
    asked: list[Claim | Query] = [claim, Query((mark_of(claim, REPLACED),), claim.nodes)]
    ballot = redlock.client.driver.run(lambda now: quorum.peek(asked, now, redlock.node_timeout))
    tokens = outcome.tokens(ballot)
    token = next((one for one in tokens if tokens.count(one) >= ballot.quorum), None)
    lasts = sorted(held[1] for held in outcome.seen(ballot, 0) if held and held[0] == token)
    left = lasts[-ballot.quorum] if token is not None else 0.0
    # A quorum is required, because no single node may keep a message from being run.
    replaced = outcome.tokens(ballot, 1).count(DONE) >= ballot.quorum
    return Look(token, left, replaced)


def mark_of(claim: Claim, what: str) -> str:
    """Return the name of the mark `what` (`REPLACED`, `BEGUN`) for a claim's message.

    It contains a digest of the token, because an id may be used again.
    """
    owner = Owner.of(claim.token)
    task_id = owner.task_id if owner is not None else ""
    return f"{task_id}:{what}:{token_digest(claim.token)}{MARK_SUFFIX}"


def free_in(redlock: Redlock, resource: str) -> float | None:
    """Return the seconds until a reservation expires; None if too few nodes answered."""
    redlock.client.prolonging.now()  # this process may have taken it a moment ago
    claim = claim_for(redlock, resource, MIN_TTL)
    ballot = redlock.client.driver.run(lambda now: quorum.peek([claim], now, redlock.node_timeout))
    return outcome.free_in(ballot) if ballot.yes >= ballot.quorum else None


def belongs_to_other_task(owner: Owner, task: Any) -> bool:
    """Return True if a task of another name has the reservation: then `task` is no duplicate."""
    return owner.task not in ("", short_id(task.name))


def prolong(redlock: Redlock, claims: Sequence[Claim], patience: float = 0.0) -> list[Round]:
    """Extend reservations to their ttl from now where they still exist; return the rounds.

    The messages are held by other processes; a missing key may have been released deliberately.
    The claims are new ones, with the messages' tokens. `patience` is as in `free`.
    """
    return redlock.client.driver.extend(claims, patience, Verb.RENEW)


def free(redlock: Redlock, claim: Claim, patience: float = 0.0) -> Round:
    """Release a reservation; return the round. Nodes that are down get it when they are back.

    `patience` is how long to wait for the nodes, in seconds; 0 only writes to them.
    """
    return redlock.client.driver.run(lambda now: quorum.free(claim, now, patience))


def free_by_id(
    redlock: Redlock, names: tuple[str, ...], task_id: str, limit: Any, running: bool = False
) -> Claim | bool | None:
    """Release the reservation of another message that will not be run.

    `task_id` is the id in its token, and `limit` is the option of its task. If a body with that id
    is running, nothing is released, unless `running` is set.

    Returns:
        A claim on the released key, whose ttl is the time it had left, in seconds; None if the
        other message no longer has it; False if its body is running, or that is not known.
    """
    try:
        if not running and _may_be_running(redlock, names, task_id, limit):
            return False
    except QuorumUnavailable:
        return False
    seen = look(redlock, claim_for(redlock, names, MIN_TTL))
    if seen.token and seen.owner is not None and seen.owner.task_id == task_id:
        freed = claim_for(redlock, names, max(MIN_TTL, seen.left), token=seen.token)
        # If that is denied, its body has begun meanwhile.
        return None if free(redlock, freed, redlock.node_timeout).denied else freed
    return None


def _may_be_running(redlock: Redlock, names: tuple[str, ...], task_id: str, limit: Any) -> bool:
    """Return True if a body of a task may hold one of some names. One node alone is not enough.

    Raises:
        QuorumUnavailable: Too few nodes answered.
    """
    slots = MAX_SLOTS if allows_several(limit) else 1
    ballot = blocking(redlock.client.peek(names, slots))
    found = [t for number in range(len(ballot.claims)) for t in outcome.may_hold(ballot, number)]
    return task_id in [owner.task_id for owner in map(Owner.of, found) if owner is not None]


def abandon(redlock: Redlock, claim: Claim) -> None:
    """Release whatever was written of a claim, because its message was not sent."""
    if claim.written:
        free(redlock, claim)


def free_soon(redlock: Redlock, note: Reservation) -> None:
    """Release the reservation of a message that is over, without waiting (for the main process).

    A thread waits for the answers. That is needed because the process may not have asked the nodes
    for hours, and only a read shows that a node or a firewall has closed the connection meanwhile.
    """
    free_it = partial(free, redlock, claim_of(redlock, note), redlock.node_timeout)
    name = f"celery_redlock free {printable(note.resource)}"
    threading.Thread(target=free_it, name=name, daemon=True).start()
