"""Requests to etcd that no server can be brought to: over a cluster in memory.

What each verb does is in tests/nodes/test_verbs.py, over a real etcd.
"""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import QUEUE_LIFE_S
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.stores.etcd.questions import (
    TTL_SHIFT,
    conversation,
    granted_for,
    lease_id,
    seconds_left,
    shared_for,
)
from celery_redlock.stores.etcd.wire import Keys
from tests.support.etcd_peer import MemoryEtcd

NOW = 1000.0


def run(etcd: MemoryEtcd, verb: Verb, claim: Claim, after: Any = lambda _round: None) -> Any:
    """Ask for one round to its end; return the reply. `after`: called behind each answer."""

    def lease(ttl: float) -> str:
        number = str(lease_id(ttl, len(etcd.leases)))
        return str(etcd.ask("lease/grant", {"ID": number, "TTL": str(granted_for(ttl))})["ID"])

    round_ = Round(verb, [claim], NOW, 1.0)
    steps = conversation(round_, Keys("redlock:"), lease)
    asked = next(steps)
    with pytest.raises(StopIteration) as end:
        while True:
            answers = [etcd.ask(*one) for one in asked]
            after(round_)
            asked = steps.send(answers)
    return end.value.value


@pytest.mark.parametrize("how", ["ended", "closed"])
def test_etcd_attempt_that_is_over_is_not_put_again(how: str) -> None:
    """If put again, the key would be set after its own removal, and nothing would free it."""
    etcd, mine = MemoryEtcd(), Claim("r", "mine", 60.0, 1)
    run(etcd, Verb.ACQUIRE, mine)

    def over(round_: Round) -> None:
        mine.ended = how == "ended"
        if how == "closed":
            round_.close()
        run(etcd, Verb.UNDO, Claim("r", "mine", 60.0, 1))

    assert run(etcd, Verb.ACQUIRE, mine, after=over) == b""
    assert etcd.get(b"redlock:lock/r") is None


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
