"""The requests to etcd: for each verb a generator of requests, which returns a reply.

Each step is one transaction, or a few if one would have too many operations; most verbs take one.
A reply takes the form that a Redis node would give it, for the checks of `protocol/replies.py`.

A key lives as long as the lease that it was put with. An extension puts it again with a new lease,
through consensus. `lease/keepalive` is not used, because the leader alone answers it: also one that
was paused and has not noticed that there is another, where the key ends earlier (etcd before
3.4.31).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ...protocol.names import MAX_DEAD_WAITERS, QUEUE_LIFE_S, base_of
from ...protocol.replies import DONE, MAX_TTL_S
from ...protocol.round import REFUSED, RENEWED, Round, Verb
from .wire import Keys, Request, above, number, text, value_of

__all__ = ["MAX_OPS", "TTL_SHIFT", "Conversation", "conversation", "granted_for", "lease_id"]
__all__ += ["seconds_left", "shared_for"]

Conversation = Generator[Sequence[Request], Sequence[dict[str, Any]], Any]
Lease = Callable[[float], str]
"""Function that returns, for a ttl in seconds, the id of a lease that lasts for it from now on."""

MAX_OPS = 120
"""Operations of one transaction, including nested ones: a server accepts 128."""
UNIT_S, TTL_SHIFT = 0.125, 31
"""The upper bits of a lease's id are the time that it is to last, in these units."""
SHARED_S = 6.0
"""Seconds for which all places of a waiter in queues share one lease."""
LEASES, MIN_SHARED_TTL_S = 16, 8.0
"""Most leases of one ttl that a connection keeps alive, as each lasts until its end; and the ttl in
seconds from which leases are shared. For a shorter ttl the whole second that sharing costs would be
more than a sixteenth."""
ROUNDING_S = 0.6
"""Seconds to add to the time left, which etcd reports in whole seconds. More than half of one, but
less than one: a key that was just put must not be reported to last longer than its ttl, because a
beat would take it for a tick that was sent."""


def shared_for(ttl: float) -> float:
    """Return the seconds during which requests with one ttl share a lease, which lasts longer."""
    if ttl == QUEUE_LIFE_S:
        return SHARED_S
    return ttl / LEASES if ttl >= MIN_SHARED_TTL_S else 0.0


def granted_for(ttl: float) -> int:
    """Return the whole seconds for which a lease is granted, so that it lasts for a ttl."""
    return math.ceil(ttl)


def lease_id(ttl: float, number: int = 0) -> int:
    """Return the id of a lease for a ttl; ids for longer ttls are larger."""
    return math.ceil(ttl / UNIT_S) << TTL_SHIFT | number


def seconds_left(said: dict[str, Any]) -> float:
    """Return the seconds that are left of a lease's ttl, from etcd's answer about the lease.

    Negative if it is over; the lease itself may last for a second or two longer.
    """
    left, granted = number(said.get("TTL", 0)), number(said.get("grantedTTL", 0))
    asked = (number(said.get("ID", 0)) >> TTL_SHIFT) * UNIT_S
    if left >= 0 and 0 < asked <= granted:
        return max(0.0, left - (granted - asked) + ROUNDING_S)
    return min(left, MAX_TTL_S)


def conversation(round_: Round, keys: Keys, lease: Lease) -> Conversation:
    """Return the generator of the requests for a round, and of its reply."""
    return _VERBS[round_.verb](round_, keys, lease)


# -- The operations of a transaction


def _txn(success: list[Any], failure: Sequence[Any] = (), compare: Sequence[Any] = ()) -> Request:
    return Request("kv/txn", {"compare": compare, "success": success, "failure": failure})


def _within(success: list[Any], failure: Sequence[Any] = (), compare: Sequence[Any] = ()) -> Any:
    return {"requestTxn": _txn(success, failure, compare).body}


def _is(key: str, token: str) -> Any:
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": token}


def _there(key: str, result: str = "GREATER") -> Any:
    return {"key": key, "target": "CREATE", "result": result, "create_revision": "0"}


def _get(key: str) -> Any:
    return {"requestRange": {"key": key}}


def _first(start: bytes) -> Any:
    """Return the operation that gets the waiter that has waited longest."""
    of = {"limit": "1", "sort_order": "ASCEND", "sort_target": "VALUE"}
    return {"requestRange": {"key": text(start), "range_end": above(start), **of}}


def _put(key: str, value: str, lease: str) -> Any:
    return {"requestPut": {"key": key, "value": value, "lease": lease}}


def _delete(key: str) -> Any:
    return {"requestDeleteRange": {"key": key}}


def _token(claim: Any) -> str:
    return text(claim.token.encode("utf-8", "surrogatepass"))


# -- Their answers


def _parts(said: dict[str, Any]) -> list[Any]:
    """Return the answers to the operations of a transaction."""
    return [one for part in said.get("responses", ()) for one in part.values()]


def _found(part: Any) -> Any:
    """Return the first key of a range, or None."""
    return next(iter(part.get("kvs", ())), None)


def _deleted(part: Any) -> bool:
    return number(part.get("deleted", 0)) > 0


# -- The verbs


def _acquire(round_: Round, keys: Keys, lease: Lease) -> Conversation:
    (claim,) = round_.claims
    fenced = claim.proposal is not None
    names, token = [keys.lock(name) for name in claim.resources], _token(claim)
    compare = [_there(name, "EQUAL") for name in names]
    while True:
        puts = [_put(name, token, lease(claim.ttl)) for name in names]
        (said,) = yield [_txn([*puts, _get(names[0])], [_get(name) for name in names], compare)]
        found = [_found(part) for part in _parts(said)]
        if said.get("succeeded"):
            # It grows with every change in the cluster, whatever the holder proposes.
            return number(found[-1]["create_revision"]) if fenced else None
        ours = [kv and kv.get("value") == token for kv in found]
        for place, kv in enumerate(found):
            if kv and not ours[place]:
                holder = value_of(kv.get("value", ""))
                return [holder, place] if len(names) > 1 else holder
        # The keys, or some of them, are ours: an earlier answer was lost. Put them again with the
        # full ttl.
        if claim.ended or round_.closed:
            return b""  # but not after an undo of this claim
        compare = [
            _is(name, token) if mine else _there(name, "EQUAL")
            for name, mine in zip(names, ours, strict=True)
        ]


def _extend(round_: Round, keys: Keys, lease: Lease) -> Conversation:
    again = round_.verb is Verb.EXTEND
    batches = list(_batches(round_.claims))
    asked = []
    for batch in batches:
        each = []
        for claim in batch:
            names, token = [keys.lock(name) for name in claim.resources], _token(claim)
            compare = [_is(name, token) for name in names]
            if not again:
                # Skip keys whose remaining ttl is longer than requested or above `below`.
                most = str(lease_id(min(claim.ttl, claim.below) + UNIT_S))
                older = {"target": "LEASE", "result": "LESS", "lease": most}
                compare.append({"key": names[0], **older})
            puts = [_put(name, token, lease(claim.ttl)) for name in names]
            each.append(_within(puts, [_get(name) for name in names], compare))
        asked.append(_txn(each))
    votes = ""
    for batch, said in zip(batches, (yield asked), strict=True):
        for claim, part in zip(batch, _parts(said), strict=True):
            kept, token = bool(part.get("succeeded")), _token(claim)
            if not (kept or again):
                there = [_found(one) for one in _parts(part)]
                kept = all(kv and kv.get("value") == token for kv in there)
            votes += RENEWED if kept else REFUSED
    return votes.encode()


def _batches(claims: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield batches of claims that fit into one transaction, which may not put a key twice."""
    batch: list[Any] = []
    names: set[str] = set()
    most = 0
    for claim in claims:
        size = max(most, 1 + len(claim.resources))
        if batch and (len(batch) + size >= MAX_OPS or not names.isdisjoint(claim.resources)):
            yield batch
            batch, names, size = [], set(), 1 + len(claim.resources)
        batch.append(claim)
        names.update(claim.resources)
        most = size
    yield batch


def _release(round_: Round, keys: Keys, lease: Lease) -> Conversation:
    (claim,) = round_.claims
    token, calls = _token(claim), round_.verb is Verb.RELEASE
    each, lines = [], []
    for name in claim.resources:
        key = keys.lock(name)
        lines.append(keys.line(base_of(name)))
        first = [_first(lines[-1])] if calls else []
        each.append(_within([_delete(key), *first], first, [_is(key, token)]))
    if calls and claim.mark is not None:
        name, life = claim.mark
        each.insert(0, _put(keys.lock(name), text(DONE.encode()), lease(life)))
    (said,) = yield [_txn(each)]
    parts = _parts(said)[-len(claim.resources) :]
    held = all(part.get("succeeded") for part in parts)
    if not calls:
        return int(held)
    called = yield from _call([(ln, _parts(p)[-1]) for ln, p in zip(lines, parts, strict=True)])
    return int(held) + 2 * called


def _call(queues: Sequence[tuple[bytes, Any]]) -> Generator[Any, Any, bool]:
    """Notify the first waiter of each queue whose process listens; return True if there is any."""
    called = False
    queues = [(line, _found(part)) for line, part in queues]
    for _ in range(MAX_DEAD_WAITERS):
        asked = []
        queues = [(line, first) for line, first in queues if first]
        if not queues:
            break
        for line, first in queues:
            process, _, waiter = value_of(first["key"])[len(line) :].rpartition(b":")
            call = text(process)
            put = {"key": call, "value": text(waiter), "ignore_lease": True}
            asked.append(
                _txn(
                    [_delete(first["key"]), {"requestPut": put}],
                    [_delete(first["key"]), _first(line)],
                    [_there(first["key"]), _there(call)],
                )
            )
        answers = yield asked
        called = called or any(said.get("succeeded") for said in answers)
        queues = [
            (line, None if said.get("succeeded") else _found(_parts(said)[-1]))
            for (line, _), said in zip(queues, answers, strict=True)
        ]
    return called


def _peek(round_: Round, keys: Keys, _lease: Lease) -> Conversation:
    gets = [_get(keys.lock(name)) for claim in round_.claims for name in claim.resources]
    answers = yield [_txn(gets[at : at + MAX_OPS]) for at in range(0, len(gets), MAX_OPS)]
    found = [_found(part) for said in answers for part in _parts(said)]
    leases = list({str(number(kv["lease"])) for kv in found if kv and "lease" in kv})
    replies: Sequence[dict[str, Any]] = ()
    if leases:
        replies = yield [Request("lease/timetolive", {"ID": lease}) for lease in leases]
    left = {one: seconds_left(said) for one, said in zip(leases, replies, strict=True)}
    reply: list[Any] = []
    for kv in found:
        if kv is None or left.get(kv.get("lease", ""), 0.0) < 0:
            reply += (None, -2)  # its lease has just ended
        else:
            milliseconds = int(left[kv["lease"]] * 1000) if "lease" in kv else -1
            reply += (value_of(kv.get("value", "")), milliseconds)
    return reply


def _enqueue(round_: Round, keys: Keys, lease: Lease) -> Conversation:
    (entry,) = round_.claims
    since = text(b"%020d" % entry.since)
    waiters = [keys.waiter(name, entry.token) for name in entry.resources]
    yield [_txn([_put(waiter, since, lease(QUEUE_LIFE_S)) for waiter in waiters])]
    return 1


def _dequeue(round_: Round, keys: Keys, _lease: Lease) -> Conversation:
    (entry,) = round_.claims
    (said,) = yield [_txn([_delete(keys.waiter(name, entry.token)) for name in entry.resources])]
    return int(all(map(_deleted, _parts(said))))


def _hand_on(round_: Round, keys: Keys, _lease: Lease) -> Conversation:
    (entry,) = round_.claims
    each, lines = [], []
    for name in entry.resources:
        lines.append(keys.line(name))
        gone = _delete(keys.waiter(name, entry.token))
        each.append(_within([gone, _get(keys.lock(name)), _first(lines[-1])]))
    (said,) = yield [_txn(each)]
    parts = [_parts(part) for part in _parts(said)]
    yield from _call(
        [
            (line, first)
            for line, (gone, held, first) in zip(lines, parts, strict=True)
            if not (_deleted(gone) and _found(held))
        ]
    )
    return int(all(_deleted(gone) for gone, *_ in parts))


_VERBS: dict[Verb, Callable[[Round, Keys, Lease], Conversation]] = {
    Verb.ACQUIRE: _acquire,
    Verb.EXTEND: _extend,
    Verb.RENEW: _extend,
    Verb.RELEASE: _release,
    Verb.UNDO: _release,
    Verb.PEEK: _peek,
    Verb.ENQUEUE: _enqueue,
    Verb.DEQUEUE: _dequeue,
    Verb.HAND_ON: _hand_on,
}
"""Requests to one authority: the verbs FENCE, LOOK and MARK are for several Redis nodes."""
