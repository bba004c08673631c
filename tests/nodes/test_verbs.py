"""One contract for every node: the fake one, and each server we can start.

What the simulated world proves holds in production because the fake node answers as a real one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_redlock.keepalive import supervisor
from celery_redlock.protocol import quorum, replies
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import MAX_DEAD_WAITERS
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.round import VERBS, Verb
from celery_redlock.protocol.values import SHARED, QueueEntry
from celery_redlock.stores import connections
from celery_redlock.stores.node import SETTLED_S
from celery_redlock.stores.redis import address
from celery_redlock.stores.redis.requests import encode
from celery_redlock.testing import fakes
from tests.protocol.sim.world import keeper as mirror
from tests.protocol.sim.world import process
from tests.support.subjects import (
    LONG,
    PREFIX,
    Fake,
    Postgres,
    Real,
    Resource,
    Subject,
    a_node,
    claim,
)
from tests.support.wire import Wire

EXTENDING = [verb for verb in VERBS if verb.extends]


def fenced(token: str = "mine", fence: int = 1, resource: str = "r", ttl: float = LONG) -> Claim:
    """Return a claim that proposes this number when it acquires, and sends it when it fences."""
    new = claim(token, resource, ttl)
    new.proposal = new.fencing_token = fence
    return new


# -- Every verb, every outcome


BOTH = ("a", "b")
ONE_OR_SEVERAL = pytest.mark.parametrize("resource", ["r", BOTH], ids=str)


@ONE_OR_SEVERAL
def test_free_key_is_acquired(node: Subject, resource: Resource) -> None:
    assert node.ask(Verb.ACQUIRE, claim("mine", resource, ttl=5.0)) is None
    for name in claim("x", resource).resources:
        token, left = node.ask(Verb.PEEK, claim("x", name))
        assert token == "mine"
        assert 4.0 < left <= 5.0


def test_held_key_returns_its_holder_and_is_not_touched(node: Subject) -> None:
    node.ask(Verb.ACQUIRE, claim("theirs", ttl=5.0))
    assert node.ask(Verb.ACQUIRE, claim()) == "theirs"
    token, left = node.ask(Verb.PEEK, claim("x"))
    assert token == "theirs"
    assert 4.0 < left <= 5.0


def test_expired_key_is_free(node: Subject) -> None:
    short = claim("theirs", ttl=0.05)
    assert node.ask(Verb.ACQUIRE, short) is None
    node.wait_for_expiry("r", 0.05)
    assert node.ask(Verb.PEEK, claim()) is None
    assert node.ask(Verb.ACQUIRE, claim()) is None


def test_key_lives_for_its_ttl_by_the_clock_of_the_server(node: Subject) -> None:
    for ttl in (0.9995, 1.0, 7.25):
        node.ask(Verb.ACQUIRE, claim(str(ttl), f"r{ttl}", ttl))
        _token, left = node.ask(Verb.PEEK, claim(resource=f"r{ttl}"))
        assert ttl - 0.5 < left <= ttl + 0.001


@pytest.mark.parametrize("verb", [Verb.UNDO, Verb.RELEASE])
def test_key_is_freed_only_by_its_token(node: Subject, verb: Verb) -> None:
    assert node.ask(verb, claim()) is False  # nothing there
    node.ask(Verb.ACQUIRE, claim("theirs"))
    assert node.ask(verb, claim()) is False
    assert node.ask(Verb.PEEK, claim())[0] == "theirs"
    assert node.ask(verb, claim("theirs")) is True
    assert node.ask(Verb.PEEK, claim()) is None
    assert node.ask(verb, claim("theirs")) is False


@ONE_OR_SEVERAL
@pytest.mark.parametrize("verb", EXTENDING)
def test_held_key_is_renewed(node: Subject, verb: Verb, resource: Resource) -> None:
    node.ask(Verb.ACQUIRE, claim("mine", resource, ttl=5.0))
    assert node.ask(verb, claim("mine", resource, ttl=50.0)) == "1"
    for name in claim("x", resource).resources:
        assert 49.0 < node.ask(Verb.PEEK, claim("x", name))[1] <= 50.0


@pytest.mark.parametrize("verb", EXTENDING)
def test_key_of_another_is_neither_renewed_nor_overwritten(node: Subject, verb: Verb) -> None:
    node.ask(Verb.ACQUIRE, claim("theirs", ttl=5.0))
    assert node.ask(verb, claim(ttl=50.0)) == "0"
    token, left = node.ask(Verb.PEEK, claim())
    assert (token, left <= 5.0) == ("theirs", True)


def test_many_claims_are_extended_at_once_each_by_itself(node: Subject) -> None:
    node.ask(Verb.ACQUIRE, claim("mine", "renewed"))
    node.ask(Verb.ACQUIRE, claim("theirs", "refused"))
    node.occupy("foreign")
    outcomes = node.ask(
        Verb.EXTEND, *(claim("mine", r) for r in ("renewed", "missing", "refused", "foreign"))
    )
    assert outcomes == ("1200" if node.sets_again else "1000")
    two_hundred = [claim("mine", f"many {i}") for i in range(200)]
    if node.sets_again:
        assert node.ask(Verb.EXTEND, *two_hundred) == "2" * 200
    for one in two_hundred:
        node.ask(Verb.ACQUIRE, one)
    assert node.ask(Verb.EXTEND, *two_hundred) == "1" * 200
    assert node.ask(Verb.RENEW, *two_hundred, claim("mine", "missing too")) == "1" * 200 + "0"


def test_key_of_another_type_is_held_and_never_touched(redis_node: Subject) -> None:
    redis_node.occupy("r")
    assert redis_node.ask(Verb.ACQUIRE, claim()) == replies.FOREIGN
    assert redis_node.ask(Verb.PEEK, claim()) == (replies.FOREIGN, math.inf)
    assert redis_node.ask(Verb.EXTEND, claim()) == "0"
    assert redis_node.ask(Verb.UNDO, claim()) is False
    assert redis_node.ask(Verb.RELEASE, claim()) is False
    assert redis_node.ask(Verb.ACQUIRE, claim()) == replies.FOREIGN


# -- Those who wait stand in line


def place(who: str, since: int, resource: str = "r") -> Any:
    return QueueEntry((resource,), 1, PREFIX + who, since)


def test_release_notifies_the_first_waiter_and_no_other(node: Subject) -> None:
    node.listen("p1")
    for who, since in (("p1:second", 2 * 10**15), ("p1:first", 2 * 10**15 - 1)):
        assert node.ask(Verb.ENQUEUE, place(who, since)) is True
        assert node.ask(Verb.ENQUEUE, place(who, since)) is True  # once more is nothing more
    node.ask(Verb.ACQUIRE, claim())
    assert node.ask(Verb.RELEASE, claim()) == 3
    assert node.calls(1) == ["p1:first"]
    assert node.ask(Verb.RELEASE, claim()) == 2  # freed nothing, but the holder is unknown
    assert node.calls(1) == ["p1:second"]
    assert node.ask(Verb.RELEASE, claim()) is False
    assert node.calls(0) == []


def test_release_passes_over_dead_waiters(node: Subject) -> None:
    node.listen("p1")
    for since, who in enumerate(("dead:1", "dead:2", "p1:3", "p1:4")):
        node.ask(Verb.ENQUEUE, place(who, since))
    node.ask(Verb.ACQUIRE, claim())
    assert node.ask(Verb.RELEASE, claim()) == 3
    assert node.calls(1) == ["p1:3"]


def test_release_passes_over_a_limited_number_of_dead_waiters(node: Subject) -> None:
    node.listen("p1")
    for since in range(MAX_DEAD_WAITERS):
        node.ask(Verb.ENQUEUE, place(f"dead:{since}", since))
    node.ask(Verb.ENQUEUE, place("p1:1", MAX_DEAD_WAITERS))
    node.ask(Verb.ACQUIRE, claim())
    assert node.ask(Verb.RELEASE, claim()) is True
    assert node.calls(0) == []
    assert node.ask(Verb.RELEASE, claim()) == 2
    assert node.calls(1) == ["p1:1"]


def test_queue_of_any_length_costs_a_request_no_more_than_a_short_one(valkey: Real) -> None:
    valkey.flush()
    line, many = PREFIX + "r#line", 50_000
    valkey.admin.zadd(line, {f"{PREFIX}dead:{number}": number for number in range(many)})
    valkey.ask(Verb.ACQUIRE, claim())
    assert valkey.ask(Verb.RELEASE, claim()) is True
    assert valkey.admin.zcard(line) == many - MAX_DEAD_WAITERS
    for who in ("one", "another"):
        valkey.ask(Verb.ACQUIRE, claim(who + SHARED))
    calls = valkey.admin.info("commandstats")["cmdstat_pubsub|numsub"]["calls"]
    assert calls <= 2 * MAX_DEAD_WAITERS


def test_waiter_that_left_the_queue_is_not_notified(node: Subject) -> None:
    node.listen("p1")
    node.ask(Verb.ACQUIRE, claim())
    for since, who in enumerate(("p1:1", "p1:2", "p1:3")):
        node.ask(Verb.ENQUEUE, place(who, since))
    assert node.ask(Verb.DEQUEUE, place("p1:1", 0)) is True
    assert node.ask(Verb.DEQUEUE, place("p1:1", 0)) is False
    assert node.ask(Verb.HAND_ON, place("p1:2", 0)) is True
    assert node.calls(0) == []
    node.ask(Verb.RELEASE, claim())
    assert node.calls(1) == ["p1:3"]


@pytest.mark.parametrize("taken", [False, True])
def test_notified_waiter_that_gives_up_notifies_the_next(node: Subject, taken: bool) -> None:
    """Another may have the lock meanwhile, but only by an attempt that will be undone."""
    node.listen("p1")
    for since, who in enumerate(("p1:1", "p1:2")):
        node.ask(Verb.ENQUEUE, place(who, since))
    node.ask(Verb.RELEASE, claim())
    if taken:
        node.ask(Verb.ACQUIRE, claim())
    assert node.ask(Verb.HAND_ON, place("p1:1", 0)) is False
    assert node.calls(2) == ["p1:1", "p1:2"]


def test_waiter_that_leaves_a_free_key_notifies_the_next(node: Subject) -> None:
    """It may have been notified, and have joined the queue again for another name that it lacks."""
    node.listen("p1")
    for since, who in enumerate(("p1:1", "p1:2")):
        node.ask(Verb.ENQUEUE, place(who, since))
    assert node.ask(Verb.HAND_ON, place("p1:1", 0)) is True
    assert node.calls(1) == ["p1:2"]


def test_undo_notifies_no_waiter(node: Subject) -> None:
    node.listen("p1")
    node.ask(Verb.ENQUEUE, place("p1:1", 0))
    node.ask(Verb.ACQUIRE, claim())
    assert node.ask(Verb.UNDO, claim()) is True
    assert node.calls(0) == []


@pytest.mark.parametrize("mark", [None, ("the-id#done", 60.0)])
def test_release_of_a_slot_notifies_the_queue_of_its_resource(node: Subject, mark: Any) -> None:
    node.listen("p1")
    node.ask(Verb.ENQUEUE, place("p1:1", 0))
    slot = claim(resource="r#slot2")
    slot.mark = mark
    node.ask(Verb.ACQUIRE, slot)
    assert node.ask(Verb.RELEASE, slot) == 3
    assert node.calls(1) == ["p1:1"]


# -- Several keys in one claim: all of them or none


def holders(node: Subject, *names: str) -> list[str | None]:
    seen = [node.ask(Verb.PEEK, claim("x", name)) for name in names]
    return [None if held is None else held[0] for held in seen]


@pytest.mark.parametrize("held", BOTH)
def test_several_keys_are_not_acquired_if_one_is_held(node: Subject, held: str) -> None:
    node.ask(Verb.ACQUIRE, claim("theirs", held, ttl=5.0))
    assert node.ask(Verb.ACQUIRE, claim("mine", BOTH)) == "theirs"
    other = "b" if held == "a" else "a"
    assert holders(node, held, other) == ["theirs", None]
    assert node.ask(Verb.PEEK, claim("x", held))[1] <= 5.0


def test_several_keys_are_refused_if_one_is_of_another_type(redis_node: Subject) -> None:
    redis_node.occupy("b")
    assert redis_node.ask(Verb.ACQUIRE, claim("mine", BOTH)) == replies.FOREIGN
    assert holders(redis_node, "a") == [None]
    assert redis_node.ask(Verb.PEEK, claim("x", BOTH)) == (replies.FOREIGN, math.inf)
    for verb in EXTENDING:
        assert redis_node.ask(verb, claim("mine", BOTH)) == "0"
    assert holders(redis_node, "a") == [None]


def test_retry_with_the_own_token_completes_several_keys(node: Subject) -> None:
    node.ask(Verb.ACQUIRE, claim())
    assert node.ask(Verb.ACQUIRE, claim()) in ("mine", None)
    node.ask(Verb.ACQUIRE, claim("mine", "b"))
    assert node.ask(Verb.ACQUIRE, claim("mine", BOTH)) is None
    assert holders(node, *BOTH) == ["mine", "mine"]


@pytest.mark.parametrize(
    ("resource", "missing"), [("r", ("r",)), (BOTH, ("a",)), (BOTH, ("b",)), (BOTH, BOTH)], ids=str
)
def test_missing_key_is_set_again_by_its_holder_and_not_by_a_renewal(
    node: Subject, resource: Resource, missing: tuple[str, ...]
) -> None:
    mine = claim("mine", resource, ttl=50.0)
    node.ask(Verb.ACQUIRE, claim("mine", resource, ttl=5.0))
    for name in missing:
        node.drop(name)
    assert node.ask(Verb.RENEW, mine) == "0"
    assert holders(node, *missing) == [None] * len(missing)
    assert node.ask(Verb.EXTEND, mine) == ("2" if node.sets_again else "0")
    for name in mine.resources if node.sets_again else ():
        token, left = node.ask(Verb.PEEK, claim("x", name))
        assert token == "mine"
        assert 49.0 < left <= 50.0


@pytest.mark.parametrize("verb", EXTENDING)
@pytest.mark.parametrize("taken", BOTH)
@pytest.mark.parametrize("other_is", ["ours", "missing"])
def test_several_keys_are_not_extended_if_one_is_held_by_another(
    node: Subject, verb: Verb, taken: str, other_is: str
) -> None:
    other = "b" if taken == "a" else "a"
    if other_is == "ours":
        node.ask(Verb.ACQUIRE, claim("mine", other, ttl=5.0))
    node.ask(Verb.ACQUIRE, claim("theirs", taken, ttl=5.0))
    assert node.ask(verb, claim("mine", BOTH, ttl=50.0)) == "0"
    assert holders(node, taken, other) == ["theirs", "mine" if other_is == "ours" else None]
    assert node.ask(Verb.PEEK, claim("x", BOTH))[1] <= 5.0


def test_claims_of_one_and_of_several_keys_are_extended_at_once(
    node: Subject,
) -> None:
    node.ask(Verb.ACQUIRE, claim("mine", ("a", "b")))
    node.ask(Verb.ACQUIRE, claim("mine", "d"))
    node.ask(Verb.ACQUIRE, claim("theirs", "f"))
    claims = [claim("mine", r) for r in (("a", "b"), "c", "d", ("d", "e"), ("e", "f"), "f", "g")]
    assert node.ask(Verb.RENEW, *claims) == "1010000"
    assert node.ask(Verb.EXTEND, *claims) == ("1212002" if node.sets_again else "1010000")


def test_first_of_two_claims_that_miss_one_key_gets_it(node: Subject) -> None:
    rivals = [claim("one", "a"), claim("other", "a"), claim("other", "b")]
    if node.sets_again:
        assert node.ask(Verb.EXTEND, *rivals) == "202"
    else:
        node.ask(Verb.ACQUIRE, rivals[0])
        node.ask(Verb.ACQUIRE, rivals[2])
    assert node.ask(Verb.EXTEND, *rivals) == "101"


@pytest.mark.parametrize("verb", [Verb.UNDO, Verb.RELEASE])
def test_release_of_several_keys_frees_only_its_own(node: Subject, verb: Verb) -> None:
    node.ask(Verb.ACQUIRE, claim("mine", BOTH))
    assert node.ask(verb, claim("other", BOTH)) is False
    assert holders(node, *BOTH) == ["mine", "mine"]
    node.drop("a")
    node.ask(Verb.ACQUIRE, claim("theirs", "a"))
    assert node.ask(verb, claim("mine", BOTH)) is False  # it was not ours to the end
    assert holders(node, *BOTH) == ["theirs", None]
    node.ask(verb, claim("theirs", "a"))
    node.ask(Verb.ACQUIRE, claim("mine", BOTH))
    assert node.ask(verb, claim("mine", BOTH)) is True
    assert holders(node, *BOTH) == [None, None]


def test_peek_of_several_keys_returns_the_first_holder_and_the_longest_ttl(node: Subject) -> None:
    assert node.ask(Verb.PEEK, claim("x", ("a", "b", "c"))) is None
    node.ask(Verb.ACQUIRE, claim("one", "b", ttl=5.0))
    node.ask(Verb.ACQUIRE, claim("other", "c", ttl=50.0))
    token, left = node.ask(Verb.PEEK, claim("x", ("a", "b", "c")))
    assert token == "one"
    assert 45.0 < left <= 50.0  # etcd reports up to a sixteenth less


def test_peek_returns_the_holders_of_many_claims_at_once(node: Subject) -> None:
    node.ask(Verb.ACQUIRE, claim("one", "b", ttl=5.0))
    seen = node.ask(Verb.PEEK, *(claim("x", name) for name in ("a", "b", ("a", "b"))))
    assert [None if held is None else held[0] for held in seen] == [None, "one", "one"]


def test_release_of_slots_of_several_keys_notifies_the_first_of_each_queue(node: Subject) -> None:
    node.listen("p1")
    for name, who in zip(BOTH, ("p1:1", "p1:2"), strict=True):
        node.ask(Verb.ENQUEUE, place(who, 1, name))
    held = claim("mine", [BOTH[0], f"{BOTH[1]}#slot12"])
    node.ask(Verb.ACQUIRE, held)
    assert node.ask(Verb.RELEASE, held) == 3
    assert node.calls(2) == ["p1:1", "p1:2"]


def test_full_node_sets_none_of_several_keys(valkey: Real, debian: Real) -> None:
    for real in (valkey, debian):
        real.flush()
        real.ask(Verb.ACQUIRE, claim("mine", "a"))
        try:
            real.admin.config_set("maxmemory", 1)
            assert real.ask(Verb.ACQUIRE, claim("mine", BOTH)).startswith("silent: OOM")
            assert real.ask(Verb.EXTEND, claim("mine", BOTH)) == "0"
            assert real.ask(Verb.EXTEND, claim("mine", "a")) == "1"
        finally:
            real.admin.config_set("maxmemory", 0)
        assert set(real.admin.keys()) == {real.key("a")}


# -- Fencing tokens

MICROSECONDS = 1_800_000_000_123_457
"""A proposal of the year 2027: too long for Lua's own way of writing numbers."""


def test_fenced_acquire_of_a_free_key_returns_the_proposed_number(
    proposing: Subject,
) -> None:
    assert proposing.ask(Verb.ACQUIRE, fenced(fence=MICROSECONDS)) == MICROSECONDS
    assert proposing.fence("r") == MICROSECONDS
    token, left = proposing.ask(Verb.PEEK, claim("x"))
    assert token == "mine"
    assert LONG - 1.0 < left <= LONG


@pytest.mark.parametrize("proposal", [1, MICROSECONDS - 1, MICROSECONDS, MICROSECONDS + 1])
def test_each_grant_gets_a_larger_fencing_number_than_the_last(
    proposing: Subject, proposal: int
) -> None:
    proposing.ask(Verb.ACQUIRE, fenced("first", MICROSECONDS))
    proposing.ask(Verb.RELEASE, claim("first"))
    assert proposing.fence("r") == MICROSECONDS  # it outlives the lock
    assert proposing.ask(Verb.ACQUIRE, fenced("second", proposal)) == MICROSECONDS + 1
    proposing.drop("r")
    far = MICROSECONDS + 1000
    assert proposing.ask(Verb.ACQUIRE, fenced("third", far)) == proposing.fence("r") == far


def test_refused_acquire_raises_no_fencing_number(proposing: Subject) -> None:
    proposing.ask(Verb.ACQUIRE, fenced("theirs", 5))
    assert proposing.ask(Verb.ACQUIRE, fenced("mine", 9)) == "theirs"
    assert proposing.fence("r") == 5


def test_repeated_fenced_acquire_returns_a_number_again(proposing: Subject) -> None:
    proposing.ask(Verb.ACQUIRE, fenced(fence=5))
    raised = 0 if isinstance(proposing, Postgres) else 1  # there it is raised with the holder only
    assert proposing.ask(Verb.ACQUIRE, fenced(fence=5)) == proposing.fence("r") == 5 + raised
    assert proposing.ask(Verb.PEEK, claim("x"))[0] == "mine"


def test_lock_without_fencing_raises_no_number(proposing: Subject) -> None:
    proposing.ask(Verb.ACQUIRE, claim())
    proposing.ask(Verb.RELEASE, claim())
    assert proposing.fence("r") is None
    proposing.ask(Verb.ACQUIRE, fenced(fence=5))
    proposing.ask(Verb.EXTEND, claim())
    proposing.ask(Verb.RELEASE, claim())
    proposing.ask(Verb.ACQUIRE, claim())
    assert proposing.fence("r") == 5


def test_fencing_number_is_raised_where_our_token_holds_the_key(redis_node: Subject) -> None:
    redis_node.ask(Verb.ACQUIRE, fenced(fence=5))
    assert redis_node.ask(Verb.FENCE, fenced(fence=MICROSECONDS)) is True
    assert redis_node.fence("r") == MICROSECONDS
    assert redis_node.ask(Verb.FENCE, fenced(fence=7)) is True  # it is known, and more
    assert redis_node.fence("r") == MICROSECONDS


def test_fencing_number_is_not_raised_where_our_token_does_not_hold_the_key(
    redis_node: Subject,
) -> None:
    assert redis_node.ask(Verb.FENCE, fenced(fence=9)) is False  # nothing there
    assert redis_node.fence("r") is None
    redis_node.ask(Verb.ACQUIRE, fenced("theirs", 5))
    assert redis_node.ask(Verb.FENCE, fenced(fence=9)) is False
    assert redis_node.fence("r") == 5
    redis_node.occupy("r")
    assert redis_node.ask(Verb.FENCE, fenced(fence=9)) is False
    assert redis_node.ask(Verb.ACQUIRE, fenced(fence=9)) == replies.FOREIGN
    assert redis_node.fence("r") == 5


def test_server_keeps_a_fencing_number_for_a_week(valkey: Real, debian: Real) -> None:
    for real in (valkey, debian):
        real.flush()
        real.ask(Verb.ACQUIRE, fenced(fence=5))
        for verb, number in ((Verb.FENCE, 9), (Verb.ACQUIRE, 5)):
            real.admin.persist(real.key("r") + b"#fence")
            real.ask(verb, fenced(fence=number))
            left = real.admin.pttl(real.key("r") + b"#fence")
            assert 7 * 86_400_000 - 10_000 < left <= 7 * 86_400_000


@pytest.mark.parametrize("value", ["garbage", "nan", "inf", str(2**53), "", "9" * 400])
def test_malformed_fencing_number_is_never_overwritten(valkey: Real, value: str) -> None:
    valkey.flush()
    valkey.admin.set(valkey.key("r") + b"#fence", value)
    assert valkey.ask(Verb.ACQUIRE, fenced(fence=5)).startswith("silent: there is something else")
    assert valkey.admin.get(valkey.key("r") + b"#fence") == value.encode()
    assert not valkey.admin.exists(valkey.key("r"))


def test_key_of_another_type_in_the_place_of_a_fence_is_silence(valkey: Real, debian: Real) -> None:
    for real in (valkey, debian):
        real.flush()
        real.admin.rpush(real.key("r") + b"#fence", "a job")
        answer = real.ask(Verb.ACQUIRE, fenced(fence=5))
        assert answer.startswith("silent: there is something else")
        assert not real.admin.exists(real.key("r"))


def test_full_node_writes_neither_key_nor_fencing_number(valkey: Real, debian: Real) -> None:
    for real in (valkey, debian):
        real.flush()
        real.ask(Verb.ACQUIRE, fenced("first", 5, "old"))
        try:
            real.admin.config_set("maxmemory", 1)
            assert real.ask(Verb.ACQUIRE, fenced(fence=9)).startswith("silent: OOM")
            assert real.ask(Verb.FENCE, fenced("first", 9, "old")).startswith("silent: OOM")
        finally:
            real.admin.config_set("maxmemory", 0)
        assert set(real.admin.keys()) == {real.key("old"), real.key("old") + b"#fence"}
        assert real.fence("old") == 5


NAMES = ["a\0b", "\n\r\t", "\U0001f512", "\u202eabc", "\ud800", "\udcff", "é", " ", "a" * 5000]
NAMES += ["'", '"', "''; --", "\\", "\\0041", "{}", "{a,b}", "NULL", "%s %(x)s $1", "a,b"]
# A task id is foreign text, and a host's name may be no UTF-8.
TOKENS = ["|host|1|t\ud800|0|task|0|n", "|h\udcff|1||0|task|0|n", "|é|1|\U0001f512|0|task|0|n"]
FOREIGN_TEXT = [*(("mine", name) for name in NAMES), *((token, "r") for token in TOKENS)]


@pytest.mark.parametrize(("token", "name"), FOREIGN_TEXT, ids=ascii)
def test_any_token_and_name_can_be_stored(node: Subject, token: str, name: str) -> None:
    mine = claim(token, name)
    assert node.ask(Verb.ACQUIRE, mine) is None
    assert node.ask(Verb.ACQUIRE, claim("other", name)) == token
    assert node.ask(Verb.EXTEND, mine) == "1"
    assert node.ask(Verb.PEEK, mine)[0] == token
    assert node.ask(Verb.RELEASE, mine) is True


def test_flushed_script_is_sent_again(valkey: Real) -> None:
    for _ in range(2):
        mine = claim()
        valkey.ask(Verb.ACQUIRE, mine)
        valkey.admin.script_flush()
        assert valkey.ask(Verb.RELEASE, mine) is True


def test_simulated_world_uses_the_constants_of_production() -> None:
    assert fakes.FOREIGN == replies.FOREIGN
    assert process.SETTLED == SETTLED_S
    assert (process.BACKOFF, process.BACKOFF_MAX) == (
        connections.BACKOFF_S,
        connections.BACKOFF_MAX_S,
    )
    assert process.CONNECT_TIMEOUT == address.CONNECT_TIMEOUT
    for name in ("LATE", "LOOK_EVERY", "MIN_PAUSE_S", "MAX_PAUSE_S"):
        assert getattr(supervisor, name) == getattr(mirror, name)


# -- The same commands, the same replies

NAME, TOKENS = st.sampled_from(["r", "s"]), st.sampled_from(["t", "u", "v"])
RESOURCES = st.sampled_from(["r", "s", ("r", "s"), ("s", "q")])
COMMANDS = st.one_of(
    st.tuples(
        st.sampled_from([Verb.ACQUIRE, Verb.ACQUIRE, Verb.UNDO, Verb.RELEASE, Verb.PEEK]),
        st.tuples(st.tuples(TOKENS, RESOURCES)),
    ),
    st.tuples(
        st.sampled_from(EXTENDING),
        st.lists(st.tuples(TOKENS, RESOURCES), min_size=1, max_size=4).map(tuple),
    ),
    st.tuples(
        st.sampled_from([Verb.ACQUIRE, Verb.FENCE]),
        st.tuples(st.tuples(TOKENS, NAME, st.sampled_from([1, 2, 5, MICROSECONDS]))),
    ),
    st.tuples(st.sampled_from(["drop", "occupy", "fence"]), NAME),
    st.tuples(st.just("flush"), st.none()),
)


def simple(command: tuple[Any, Any]) -> bool:
    """Return True if a command is also for PostgreSQL.

    PostgreSQL keeps nothing else under a name, has no slots of several nodes, and receives a name
    once a request.
    """
    what, claims = command
    if not isinstance(what, Verb):
        return what != "occupy"
    if what.extends:
        names = [name for asked in claims for name in claim(*asked).resources]
        return len(names) == len(set(names))
    return all(len(asked) < 3 for asked in claims)


def play(subject: Subject, commands: list[Any]) -> list[Any]:
    subject.flush()
    replies = []
    for what, argument in commands:
        if isinstance(what, Verb):
            claims = [fenced(a[0], a[2], a[1]) if len(a) == 3 else claim(*a) for a in argument]
            reply = subject.ask(what, *claims)
            # Expiry is reported to the millisecond, by clocks that differ.
            replies.append(reply[0] if what is Verb.PEEK and reply else reply)
        elif what == "flush":
            subject.flush()
        else:
            replies.append(getattr(subject, what)(argument))
    return replies


@pytest.mark.parametrize("name", ["valkey", "debian"])
def test_fake_node_answers_as_a_real_one(name: str, request: pytest.FixtureRequest) -> None:
    real: Real = request.getfixturevalue(name)

    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(COMMANDS, max_size=15))
    def the_same(commands: list[Any]) -> None:
        assert play(Fake(), commands) == play(real, commands)

    the_same()


def test_fake_node_answers_as_postgresql(postgresql: Postgres) -> None:
    def replies(subject: Subject, commands: list[Any]) -> list[Any]:
        """Return the replies, without the token that Redis sends to a holder that tries again."""
        return [None if one in ("t", "u", "v") else one for one in play(subject, commands)]

    @settings(
        max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(COMMANDS.filter(simple), max_size=15))
    def the_same(commands: list[Any]) -> None:
        assert replies(Fake(), commands) == replies(postgresql, commands)

    the_same()


def test_connection_that_breaks_between_two_answers_of_one_read_is_dropped() -> None:
    """Two releases by digest after SCRIPT FLUSH: the node dies when the first is sent as text."""
    node, wire = a_node("redis://127.0.0.1:1"), Wire()
    node.opened(wire, NodeInfo(), 1.0, 1.0)
    for mine in (claim("one"), claim("two")):
        (freeing,) = [next(quorum.release(mine, 1.0, 0.1))]
        node.ask(freeing, encode(freeing, PREFIX), 1.0)
    wire.peer.sendall(b"-NOSCRIPT No matching script\r\n-NOSCRIPT No matching script\r\n")
    wire.peer.close()
    node.receive()
    assert node.connection is None
    assert not node.channel.unanswered
