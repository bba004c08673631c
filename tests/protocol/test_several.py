"""Several resources in one lock: all of them or none, and shared by nested blocks."""

from __future__ import annotations

import pytest

from celery_redlock import ConfigurationError, LeaseLost, ResourceHeld, current_lease
from tests.support.fake_lock import FakeRedlock

NAMES = ["account:1", "account:2"]


def test_several_keys_are_held_by_one_token_in_one_round(redlock: FakeRedlock) -> None:
    with redlock.lock(NAMES) as held:
        assert redlock.driver.rounds == ["acquire"]
        assert redlock.tokens("account:1") == redlock.tokens("account:2") == {held.token}
        assert held.resources == ("account:1", "account:2")
        assert held.lease.resources == held.resources
        assert str(held.resource) == "account:1 + account:2"
    assert redlock.driver.rounds == ["acquire", "release"]
    assert redlock.free("account:1") and redlock.free("account:2")


def test_order_and_repetition_of_keys_make_no_other_lock(redlock: FakeRedlock) -> None:
    for names in (["b", "a", "b"], ("a", "b"), {"a", "b"}):
        lease = redlock.acquire(names)
        assert lease.resources == ("a", "b")
        redlock.release(lease)
    assert redlock.acquire(["a", "a"]).resources == ("a",)
    assert redlock.tokens("a") != {None}


def test_several_keys_are_all_extended_or_the_lease_is_lost(redlock: FakeRedlock) -> None:
    lease = redlock.acquire(NAMES)
    redlock.clock.advance(5.0)
    assert redlock.extend(lease).deadline > lease.deadline
    for node in redlock.fakes:
        del node.held["account:2"]
    redlock.extend(lease)
    assert redlock.tokens("account:2") == {lease.token}
    for node in redlock.fakes[:3]:
        del node.held["account:2"]
        node.occupy("account:2")
    with pytest.raises(LeaseLost, match=r"account:1 \+ account:2: a quorum"):
        redlock.extend(lease)


def test_invalid_list_of_resource_names_is_refused(redlock: FakeRedlock) -> None:
    for wrong in ([], ["a", ""], ["a", 3], 3, None, {"a": "b"}, b"ab"):
        with pytest.raises(ConfigurationError, match="a resource is a name"):
            redlock.lock(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at most 100 resources, not 101"):
        redlock.lock([str(number) for number in range(101)])
    with pytest.raises(ConfigurationError, match="reserved for fencing tokens"):
        redlock.lock(["a", "b#fence"])
    with pytest.raises(ConfigurationError, match="at most 512 characters"):
        redlock.lock(["a", "b" * 513])


def test_fencing_token_for_several_keys_is_refused(redlock: FakeRedlock) -> None:
    with pytest.raises(ConfigurationError, match="a fencing token is of one resource"):
        redlock.lock(NAMES, fencing=True)
    with pytest.raises(ConfigurationError, match="a fencing token is of one resource"):
        redlock.acquire(NAMES, fencing=True)
    redlock.client.fencing = True
    with pytest.raises(ConfigurationError, match="fencing=False"):
        redlock.lock(NAMES)
    with redlock.lock(NAMES, fencing=False) as held:
        assert held.fencing_token is None
    assert redlock.acquire(["a", "a"]).fencing_token  # they are one


# -- Nested


def test_nested_block_on_several_keys_shares_the_held_and_takes_the_rest(
    redlock: FakeRedlock,
) -> None:
    with redlock.lock("account:1") as outer:
        with redlock.lock(NAMES) as inner:
            assert inner is not outer
            assert inner.resources == ("account:1", "account:2")
            assert redlock.tokens("account:1") == {outer.token}
            assert redlock.tokens("account:2") == {inner.token}
            assert current_lease() is inner
            with redlock.lock(NAMES) as innermost:
                assert innermost is inner
        assert current_lease() is outer
        assert redlock.free("account:2")
        assert redlock.tokens("account:1") == {outer.token}
    assert redlock.free("account:1")


def test_nested_block_on_several_held_keys_takes_none(redlock: FakeRedlock) -> None:
    with redlock.lock("account:1") as one, redlock.lock("account:2") as other:
        with redlock.lock(NAMES) as both:
            assert redlock.driver.rounds == ["acquire"] * 2
            assert both.remaining() == min(one.remaining(), other.remaining())
            assert both.lease.resources == both.resources == ("account:1", "account:2")
            assert not both.lost
            both.ensure()
        assert redlock.driver.rounds == ["acquire"] * 2
        assert not one.lost and not other.lost


def test_lock_that_shares_an_outer_one_ends_with_it(redlock: FakeRedlock) -> None:
    with redlock.lock("account:1", ttl=5.0) as outer, redlock.lock(NAMES) as inner:
        assert inner.remaining() == outer.remaining() < 5.0
        assert inner.lease.remaining() == outer.lease.remaining()
        redlock.clock.advance(5.0)
        assert inner.lost and inner.lease.lost
        with pytest.raises(LeaseLost, match="account:1: the lease is over") as loss:
            inner.ensure()
        assert loss.value.resource == "account:1"
        assert redlock.release(inner.lease)  # what it has taken itself is held


def test_nested_block_that_cannot_have_the_rest_leaves_the_outer_one_alone(
    redlock: FakeRedlock,
) -> None:
    theirs = redlock.acquire("account:2")
    lock = redlock.lock(NAMES)
    with redlock.lock("account:1") as outer:
        with pytest.raises(ResourceHeld, match=r"^account:2 is held"), lock:
            pass
        assert redlock.tokens("account:1") == {outer.token}
        assert current_lease() is outer
    redlock.release(theirs)
    with lock as held:  # and now all of them
        assert redlock.tokens("account:1") == redlock.tokens("account:2") == {held.token}
