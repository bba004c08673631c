"""A limit: so many may hold a resource at a time, each a slot of its own, and never one more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_redlock import ConfigurationError, Lease, ResourceHeld
from celery_redlock.locking import acquisition, leases
from celery_redlock.locking.request import request_of
from celery_redlock.protocol.names import Limits, base_of, slots, takeable
from celery_redlock.protocol.round import Round
from celery_redlock.runtime.blocking import blocking
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


def test_acquire_with_room_in_a_limit_costs_one_round(
    redlock: FakeRedlock, first: Callable[[int], None]
) -> None:
    for slot in range(3):
        first(slot)
        redlock.acquire("r", limit=3)
    assert redlock.driver.rounds == ["acquire"] * 3


def test_acquire_finds_the_free_slot_with_one_look_if_its_first_is_taken(
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


def test_loser_of_the_last_free_slot_learns_the_holder(
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


def test_holders_of_all_slots_are_returned(redlock: FakeRedlock) -> None:
    assert redlock.holders("r", limit=3) == []
    leases = [redlock.acquire("r", limit=3, ttl=ttl) for ttl in (3.0, 5.0)]
    holders = redlock.holders("r", limit=3)
    assert [holder.resource for holder in holders] == ["r", "r"]
    assert {holder.expires_in for holder in holders} == {3.0, 5.0}
    for lease in leases:
        redlock.release(lease)
    assert redlock.holders("r", limit=3) == []


@pytest.mark.parametrize("limit", [0, -1, 101, 2.0, True, "3", None])
def test_limit_must_be_a_number_from_1_to_100(redlock: FakeRedlock, limit: object) -> None:
    for ask in (redlock.lock, redlock.acquire, redlock.try_acquire, redlock.holders):
        with pytest.raises(ConfigurationError, match="whole number from 1 to 100"):
            ask("r", limit=limit)  # type: ignore[operator]


def test_limit_with_fencing_is_refused(redlock: FakeRedlock) -> None:
    with pytest.raises(ConfigurationError, match="fencing=False"):
        redlock.acquire("r", limit=2, fencing=True)
    with redlock.lock(["a", "a"], limit=2), redlock.lock("r", limit=1, fencing=True):
        pass


@pytest.mark.parametrize("name", ["r#slot2", "r#slot07", "#slot1", "r#fence"])
def test_resource_name_of_a_slot_is_refused(redlock: FakeRedlock, name: str) -> None:
    for ask in (redlock.lock, redlock.acquire, redlock.holder):
        with pytest.raises(ConfigurationError, match="may not be named"):
            ask(name)  # type: ignore[operator]


@pytest.mark.parametrize(
    "name", ["r#slot", "r#slot2x", "slot2", "2", "r#slot²", "r#slot٣", "r#slot2\n"]
)
def test_resource_name_that_only_resembles_a_slot_is_accepted(
    redlock: FakeRedlock, name: str
) -> None:
    lease: Lease = redlock.acquire(name)
    assert base_of(name) == name
    assert {base_of(slot) for slot in slots(name, 100)} == {name}
    assert redlock.release(lease)


# -- Several names, each with its limit

PAIR: Any = {"resource": ["tenant", "all"], "limit": [2, 3]}


def test_each_of_several_keys_has_its_own_limit(redlock: FakeRedlock) -> None:
    leases = [redlock.acquire(**PAIR) for _ in range(2)]
    assert {lease.resource for lease in leases} == {"all + tenant"}
    with pytest.raises(
        ResourceHeld, match=r"^all \+ tenant: tenant has all of its 2 holders; one is"
    ) as refusal:
        redlock.acquire(**PAIR)
    assert refusal.value.conflicting == ("tenant",)
    other = redlock.acquire(["other", "all"], limit=[2, 3])
    with pytest.raises(ResourceHeld, match=r"^all \+ other: all has all of its 3 holders") as no:
        redlock.acquire(["other", "all"], limit=[2, 3])
    assert no.value.conflicting == ("all",)
    redlock.release(other)
    redlock.release(leases[0])
    assert redlock.try_acquire(**PAIR) is not None


def test_several_keys_with_limits_are_acquired_all_or_none_in_one_request(
    redlock: FakeRedlock, first: Callable[[int], None]
) -> None:
    first(0)
    redlock.acquire(**PAIR)
    assert redlock.driver.rounds == ["acquire"]
    full = [redlock.acquire("all", limit=3) for _ in range(2)]
    redlock.driver.rounds.clear()
    first(1)
    assert redlock.try_acquire(**PAIR) is None
    assert redlock.driver.rounds == ["acquire", "peek"]
    assert redlock.free("tenant#slot2")
    redlock.release(full[0])
    redlock.driver.rounds.clear()
    first(0)  # of both: taken
    assert redlock.try_acquire(**PAIR) is not None
    assert redlock.driver.rounds == ["release", "acquire", "peek", "acquire"][1:]


def test_slot_taken_meanwhile_costs_no_other_key_its_free_slot(
    redlock: FakeRedlock, first: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the free slots of `all` are taken between the look and the request."""
    first(0)
    redlock.acquire("tenant", limit=2)
    peek, taken = redlock.client.peek, ("all", "all#slot2")

    async def look(*args: object) -> Round:
        ballot = await peek(*args)  # type: ignore[arg-type]
        for node in redlock.fakes:
            node.held |= dict.fromkeys(taken, ("|other|7||0||0|x", redlock.clock() + 3.0))
        return ballot

    monkeypatch.setattr(redlock.client, "peek", look)
    for _ in range(6):
        lease = redlock.acquire(**PAIR)
        assert lease.resources == ("all#slot3", "tenant#slot2")
        redlock.release(lease)
        for node in redlock.fakes:
            for name in taken:
                node.held.pop(name)


def test_single_limit_applies_to_each_key_and_the_smaller_of_two_to_one_key(
    redlock: FakeRedlock,
) -> None:
    leases = [redlock.acquire(["a", "b"], limit=2) for _ in range(2)]
    assert redlock.try_acquire("a", limit=2) is redlock.try_acquire("b", limit=2) is None
    for lease in leases:
        redlock.release(lease)
    assert request_of(redlock.client, ["a", "b", "a"], limit=[3, 5, 2]).limits == {"a": 2, "b": 5}
    assert request_of(redlock.client, ["a", "b"], limit=[1, 1]).limit == 1
    assert request_of(redlock.client, "a", limit=[3]).limit == 3


@pytest.mark.parametrize(
    ("resource", "limit", "wrong"),
    [
        (
            ["a", "b"],
            [2],
            r"^the 2 keys a \+ b have 1 limit, \[2\]: give one for",
        ),
        ({"a", "b"}, [2, 3], r"the keys a \+ b are given in a set, which has no order"),
        (["a", "b"], [2, 0], "whole number from 1 to 100"),
        (["a", "b"], [], "a list of such, one for each key"),
        (["a", "b"], lambda: 3, "limit must be a number, or one for each name"),
    ],
)
def test_limits_that_do_not_fit_the_keys_are_refused(
    redlock: FakeRedlock, resource: Any, limit: Any, wrong: str
) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        redlock.acquire(resource, limit=limit)


def test_holders_can_be_asked_for_one_resource_at_a_time(redlock: FakeRedlock) -> None:
    with pytest.raises(ConfigurationError, match=r"one resource.*holders\('a', limit=2\)"):
        redlock.holders(["a", "b"], limit=(2, 3))  # type: ignore[arg-type]


# -- Several limits of one name


def ask(redlock: FakeRedlock, name: str, limit: int, wide: int) -> Lease | None:
    """Acquire as a task does whose limit was lowered by an operator."""
    request = replace(request_of(redlock.client, name), limit=Limits((limit,), (wide,)))
    try:
        return blocking(leases.acquire(redlock.client, request))
    except ResourceHeld as refusal:
        assert f"has all of its {limit} holders" in str(refusal)
        return None


def test_lowered_limit_admits_the_next_only_when_fewer_hold_the_key(
    redlock: FakeRedlock,
) -> None:
    """Whatever slots they have."""
    five = sorted([redlock.acquire("r", limit=5) for _ in range(5)], key=lambda one: one.resources)
    for lease in five[:2]:  # slots that one with a limit of three could take
        redlock.release(lease)
        assert ask(redlock, "r", 3, 5) is None
    redlock.release(five[2])
    assert ask(redlock, "r", 3, 5) is not None
    assert ask(redlock, "r", 3, 5) is None and ask(redlock, "r", 4, 5) is not None


@pytest.mark.parametrize(
    ("limit", "held", "slots_left"),
    [
        (3, {}, ["r", "r#slot2", "r#slot3"]),
        (Limits((3,), (6,)), {4, 5}, ["r"]),
        (Limits((3,), (6,)), {1, 5}, ["r#slot2"]),
        (Limits((3,), (6,)), {4, 5, 6}, []),
        (Limits((1,), (6,)), {6}, []),
        (2, {1, 2}, []),
    ],
)
def test_takeable_slots_follow_from_limit_and_held_slots(
    limit: Any, held: set[int], slots_left: list[str]
) -> None:
    count = 6 if isinstance(limit, Limits) else limit
    free = [number not in held for number in range(1, count + 1)]
    assert takeable(["r"], limit, free) == [slots_left]


# -- Nested


def test_nested_block_with_the_same_limit_shares_its_slot(redlock: FakeRedlock) -> None:
    with redlock.lock("r", limit=2) as outer:
        with redlock.lock("r", limit=2) as inner, redlock.lock("r", limit=3) as laxer:
            assert inner is outer and laxer is outer
        assert redlock.driver.rounds == ["acquire"]


def test_stricter_block_nested_in_a_laxer_one_is_refused(redlock: FakeRedlock) -> None:
    """The inner block would keep others out for whom the outer one has made room."""
    with redlock.lock("r", limit=2) as outer:
        for lock in (redlock.lock("r"), redlock.lock(["q", "r"])):
            with (
                pytest.raises(
                    ConfigurationError,
                    match=r"limit=1 is asked for inside a lock .*, r, with limit=2",
                ),
                lock,
            ):
                pass
        assert not outer.lost and redlock.free("q")
