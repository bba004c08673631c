"""A limit: so many may hold a resource at a time, each a slot of its own, and never one more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from celery_redlock import ConfigurationError, Lease, QuorumUnavailable, ResourceHeld
from celery_redlock.locking import acquisition
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import base_of, slots
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.stores.redis.requests import encode
from tests.support.fake_lock import FakeRedlock

SLOTS = ["r", "r#slot2", "r#slot3"]


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says which slot is tried first."""

    class Loaded(random.Random):
        slot = 0

        def choice(self, names: list[str]) -> str:  # type: ignore[override]
            return names[self.slot]

    loaded = Loaded(7)
    monkeypatch.setattr(acquisition, "JITTER", loaded)
    return lambda slot: setattr(loaded, "slot", slot)


def test_so_many_may_hold_it_and_no_more(redlock: FakeRedlock) -> None:
    leases = [redlock.acquire("r", limit=3) for _ in range(3)]
    assert {lease.resource for lease in leases} == {"r"}
    assert {lease.resources for lease in leases} == {(slot,) for slot in SLOTS}
    with pytest.raises(
        ResourceHeld, match=r"^r is held by as many as may, 3 at a time; one is pid "
    ):
        redlock.acquire("r", limit=3)
    assert redlock.try_acquire("r", limit=3) is None
    redlock.release(leases[1])
    assert redlock.acquire("r", limit=3).resources == leases[1].resources
    assert redlock.try_acquire("r", limit=3) is None


def test_what_has_room_costs_one_round(redlock: FakeRedlock, first: Callable[[int], None]) -> None:
    for slot in range(3):
        first(slot)
        redlock.acquire("r", limit=3)
    assert redlock.driver.rounds == ["acquire"] * 3


def test_where_the_first_is_taken_one_look_finds_the_free_one(
    redlock: FakeRedlock, first: Callable[[int], None]
) -> None:
    redlock.acquire("r", limit=3)
    redlock.driver.rounds.clear()
    assert redlock.acquire("r", limit=3).resources[0] in SLOTS[1:]
    assert redlock.driver.rounds == ["acquire", "peek", "acquire"]
    redlock.acquire("r", limit=3)
    redlock.driver.rounds.clear()
    assert redlock.try_acquire("r", limit=3) is None
    assert redlock.driver.rounds == ["acquire", "peek"]


def test_a_lock_without_a_limit_takes_one_of_the_slots(redlock: FakeRedlock) -> None:
    """So that never more than the largest limit hold it, while a limit is being changed."""
    alone = redlock.acquire("r")
    leases = [redlock.acquire("r", limit=2)]
    leases += [redlock.acquire("r", limit=3)]
    assert redlock.try_acquire("r", limit=3) is redlock.try_acquire("r") is None
    redlock.release(alone)
    assert redlock.acquire("r", limit=2).resources == ("r",)


def test_a_slot_that_is_split_is_nobodys_and_is_not_taken_for_free(redlock: FakeRedlock) -> None:
    redlock.acquire("r", limit=2)
    (other,) = {"r", "r#slot2"} - {name for name in SLOTS if not redlock.free(name)}
    for index in (0, 1, 2):
        redlock.fakes[index].held[other] = (f"|host|{index}||0||0|x", redlock.clock() + 3.0)
    with pytest.raises(ResourceHeld) as refusal:
        redlock.acquire("r", limit=2)
    assert refusal.value.holder is not None
    assert refusal.value.holder.nodes == 1  # who waits tries again soon


def test_who_loses_the_last_free_slot_is_told_to_whom(
    redlock: FakeRedlock, first: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    redlock.acquire("r", limit=2)
    peek = redlock.client.peek

    async def look(*args: object) -> Round:
        ballot = await peek(*args)  # type: ignore[arg-type]
        for node in redlock.fakes:
            node.held["r#slot2"] = ("|winner|7||0||0|x", redlock.clock() + 3.0)
        return ballot

    monkeypatch.setattr(redlock.client, "peek", look)
    with pytest.raises(ResourceHeld, match="one is pid 7 on winner"):
        redlock.acquire("r", limit=2)


def test_no_quorum_is_no_matter_of_room(redlock: FakeRedlock) -> None:
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r", limit=3)
    with pytest.raises(QuorumUnavailable):
        redlock.holders("r", limit=3)


def test_who_holds_the_slots_is_told(redlock: FakeRedlock) -> None:
    assert redlock.holders("r", limit=3) == []
    leases = [redlock.acquire("r", limit=3, ttl=ttl) for ttl in (3.0, 5.0)]
    holders = redlock.holders("r", limit=3)
    assert [holder.resource for holder in holders] == ["r", "r"]
    assert {holder.expires_in for holder in holders} == {3.0, 5.0}
    for lease in leases:
        redlock.release(lease)
    assert redlock.holders("r", limit=3) == []


@pytest.mark.parametrize("limit", [0, -1, 101, 2.0, True, "3", None])
def test_a_limit_is_a_number_from_1_to_100(redlock: FakeRedlock, limit: object) -> None:
    for ask in (redlock.lock, redlock.acquire, redlock.try_acquire, redlock.holders):
        with pytest.raises(ConfigurationError, match="whole number from 1 to 100"):
            ask("r", limit=limit)  # type: ignore[operator]


def test_a_limit_is_of_one_resource_and_without_fencing(redlock: FakeRedlock) -> None:
    with pytest.raises(ConfigurationError, match="a limit is of one resource"):
        redlock.lock(["a", "b"], limit=2)
    with pytest.raises(ConfigurationError, match="fencing=False"):
        redlock.acquire("r", limit=2, fencing=True)
    assert redlock.lock(["a", "a"], limit=2)
    assert redlock.lock("r", limit=1, fencing=True)


@pytest.mark.parametrize("name", ["r#slot2", "r#slot07", "#slot1", "r#fence"])
def test_no_name_can_be_that_of_a_slot(redlock: FakeRedlock, name: str) -> None:
    for ask in (redlock.lock, redlock.acquire, redlock.holder):
        with pytest.raises(ConfigurationError, match="may not be named"):
            ask(name)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["r#slot", "r#slot2x", "slot2", "r#slot²", "r#slot٣", "r#slot2\n"])
def test_other_names_are_the_users(redlock: FakeRedlock, name: str) -> None:
    lease: Lease = redlock.acquire(name)
    assert base_of(name) == name
    assert {base_of(slot) for slot in slots(name, 100)} == {name}
    assert redlock.release(lease)


def test_the_release_of_a_slot_is_announced_under_the_name_of_the_resource() -> None:
    def request(name: str) -> bytes:
        return encode(Round(Verb.RELEASE, [Claim(name, "t", 1.0, 1)], 0.0, 0.0), "p:")

    assert b"$9\r\np:r#slot2\r\n" in request("r#slot2")
    assert request("r#slot2").endswith(b"$1\r\nt\r\n$3\r\np:r\r\n")
    assert request("r").endswith(b"$1\r\nt\r\n")


# -- Nested


def test_a_block_inside_one_with_the_same_limit_shares_its_slot(redlock: FakeRedlock) -> None:
    with redlock.lock("r", limit=2) as outer:
        with redlock.lock("r", limit=2) as inner, redlock.lock("r", limit=3) as laxer:
            assert inner is outer and laxer is outer
        assert redlock.driver.rounds == ["acquire"]


def test_a_stricter_block_inside_a_laxer_one_is_refused(redlock: FakeRedlock) -> None:
    """It would keep others out for which the outer one has made room."""
    with redlock.lock("r", limit=2) as outer:
        for lock in (redlock.lock("r"), redlock.lock(["q", "r"])):
            with pytest.raises(ConfigurationError, match="limit=1 is asked for inside"), lock:
                pass
        assert not outer.lost and redlock.free("q")
