"""Requests to etcd that no server can be brought to: over a cluster in memory.

What each verb does is in tests/nodes/test_verbs.py, over a real etcd.
"""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import QUEUE_LIFE_S
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import Query
from celery_redlock.stores.etcd.questions import (
    MAX_OPS,
    TTL_SHIFT,
    conversation,
    granted_for,
    lease_id,
    seconds_left,
    shared_for,
)
from celery_redlock.stores.etcd.wire import Keys
from tests.support.etcd_peer import MemoryEtcd

KEYS = Keys("redlock:")
NOW = 1000.0
MAX_STEPS = 20


class Cluster(MemoryEtcd):
    """A cluster that is asked without a network."""

    def __init__(self) -> None:
        super().__init__()
        self._granted = 0

    def run(self, verb: Verb, *claims: Any, after: Any = None) -> Any:
        """Ask for one round to its end; return the reply. `after`: called before each step."""
        round_ = Round(verb, claims, NOW, 1.0)
        steps = conversation(round_, KEYS, self.lease)
        asked = next(steps)
        try:
            for _ in range(MAX_STEPS):
                answers = [self.ask(*one) for one in asked]
                assert not [said for said in answers if "code" in said], answers
                if after is not None:
                    after(round_)
                asked = steps.send(answers)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("it asks without an end")

    def lease(self, ttl: float) -> str:
        self._granted += 1
        granted = self.ask(
            "lease/grant", {"ID": str(lease_id(ttl, self._granted)), "TTL": str(granted_for(ttl))}
        )
        return str(granted["ID"])

    def token(self, name: str) -> str | None:
        value = self.get(b"redlock:lock/" + name.encode())
        return None if value is None else value.decode()

    @property
    def steps(self) -> list[str]:
        """Return the paths that were asked, without the grants."""
        return [path for path, _ in self.asked if path != "lease/grant"]


@pytest.fixture
def memory() -> Cluster:
    return Cluster()


def claim(token: str = "mine", *names: str, ttl: float = 60.0) -> Claim:
    return Claim(names or ("r",), token, ttl, 1)


# -- Acquire


def test_etcd_attempt_whose_answer_was_lost_is_granted_again(memory: Cluster) -> None:
    """It has a new lease, which lasts as long as the second answer counts."""
    mine = claim("mine", "a", "b")
    memory.run(Verb.ACQUIRE, mine)
    before = memory.lease_of(b"redlock:lock/a")
    assert memory.run(Verb.ACQUIRE, mine) is None
    assert memory.lease_of(b"redlock:lock/a") != before


@pytest.mark.parametrize("how", ["ended", "closed"])
def test_etcd_attempt_that_is_over_is_not_put_again(memory: Cluster, how: str) -> None:
    """If put again, the key would be set after its own removal, and nothing would free it."""
    mine = claim()
    memory.run(Verb.ACQUIRE, mine)

    def over(round_: Round) -> None:
        mine.ended = how == "ended"
        if how == "closed":
            round_.close()
        memory.run(Verb.UNDO, claim())

    assert memory.run(Verb.ACQUIRE, mine, after=over) == b""
    assert memory.token("r") is None


# -- Extend


def test_etcd_extensions_are_split_into_transactions_that_a_server_takes(memory: Cluster) -> None:
    """The cluster in memory refuses larger ones, as a server does."""
    wide = [claim("mine", *(f"{n}:{m}" for m in range(100))) for n in range(3)]
    many = [claim("mine", str(n)) for n in range(MAX_OPS * 2)]
    for one in (*wide, *many):
        memory.run(Verb.ACQUIRE, one)
    assert memory.run(Verb.EXTEND, *wide, *many) == b"1" * (len(wide) + len(many))


def test_two_claims_of_one_key_are_not_extended_in_one_etcd_transaction(memory: Cluster) -> None:
    """A transaction may not put a key twice."""
    memory.run(Verb.ACQUIRE, claim("mine"))
    memory.asked.clear()
    assert memory.run(Verb.EXTEND, claim("mine"), claim("other")) == b"10"
    assert memory.steps == ["kv/txn"] * 2


def test_etcd_renewal_puts_a_key_of_the_same_ttl_again(memory: Cluster) -> None:
    memory.run(Verb.ACQUIRE, claim(ttl=60.0))
    before = memory.lease_of(b"redlock:lock/r")
    assert memory.run(Verb.RENEW, claim(ttl=60.0)) == b"1"
    assert memory.lease_of(b"redlock:lock/r") != before


def test_etcd_renewal_skips_a_key_with_more_time_left_than_its_threshold(memory: Cluster) -> None:
    memory.run(Verb.ACQUIRE, claim(ttl=60.0))
    before, renewing = memory.lease_of(b"redlock:lock/r"), claim(ttl=60.0)
    renewing.below = 30.0
    assert memory.run(Verb.RENEW, renewing) == b"1"
    assert memory.lease_of(b"redlock:lock/r") == before


# -- Peek


def test_etcd_look_returns_each_holder_and_its_time_left(memory: Cluster) -> None:
    memory.run(Verb.ACQUIRE, claim("mine", "a", ttl=60.0))
    memory.put(b"redlock:lock/for ever", b"another program's")
    memory.elapsed = 20
    queries = [Query((name,), 1) for name in ("a", "free", "for ever")]
    seen = memory.run(Verb.PEEK, *queries)
    assert seen[0] == b"mine"
    assert 39_000 <= seen[1] <= 41_000
    assert seen[2:] == [None, -2, b"another program's", -1]


def test_etcd_key_whose_lease_is_over_is_free(memory: Cluster) -> None:
    memory.run(Verb.ACQUIRE, claim(ttl=10.0))
    memory.elapsed = 11
    assert memory.run(Verb.PEEK, Query(("r",), 1)) == [None, -2]


def test_etcd_look_at_many_keys_is_split_into_transactions(memory: Cluster) -> None:
    names = tuple(str(n) for n in range(2 * MAX_OPS + 1))
    memory.put(b"redlock:lock/" + names[-1].encode(), b"theirs")
    seen = memory.run(Verb.PEEK, Query(names, 1))
    assert len(seen) == 2 * len(names)
    assert seen[-2:] == [b"theirs", -1]


# -- Leases


@pytest.mark.parametrize("ttl", [0.05, 0.124, 0.125, 1.0, 7.3, 60.0, 86_400.0])
def test_id_of_an_etcd_lease_is_above_those_of_shorter_ones(ttl: float) -> None:
    assert lease_id(ttl) < lease_id(ttl, 2**TTL_SHIFT - 1) < lease_id(ttl + 0.125)
    assert lease_id(ttl) < 2**63
    assert ttl <= granted_for(ttl) < ttl + 1.0


@pytest.mark.parametrize(
    ("ttl", "shared"), [(1.0, 0.0), (7.9, 0.0), (8.0, 0.5), (60.0, 6.0), (16.0, 1.0)]
)
def test_etcd_lease_is_shared_for_a_part_of_its_ttl(ttl: float, shared: float) -> None:
    assert shared_for(ttl) == shared
    assert 0.0 < shared_for(QUEUE_LIFE_S) < QUEUE_LIFE_S / 2


@pytest.mark.parametrize(
    ("left", "granted", "ttl", "seconds"),
    [
        ("-1", "0", 10.0, -1),  # it is over
        ("9", "10", 10.0, 9.6),
        ("10", "11", 10.0, 9.6),  # granted for longer, because others share it
        ("1", "11", 10.0, 0.6),
        ("0", "11", 10.0, 0.0),
        ("5", "9", 10.0, 5),  # not one of ours
    ],
)
def test_time_left_of_an_etcd_key_is_counted_from_its_own_ttl(
    left: str, granted: str, ttl: float, seconds: float
) -> None:
    said = {"TTL": left, "grantedTTL": granted, "ID": str(lease_id(ttl, 7))}
    assert seconds_left(said) == pytest.approx(seconds)
