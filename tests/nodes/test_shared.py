"""Readers beside writers: what a node promises, the same for the fake and for real servers."""

from __future__ import annotations

import pytest

from celery_redlock.protocol import replies
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import SHARED, Owner, Query, QueueEntry
from tests.support.subjects import LONG, PREFIX, Fake, Subject, claim


def reader(name: str = "one", ttl: float = LONG, resource: str = "r") -> Claim:
    return claim(name + SHARED, resource, ttl)


def waits(node: Subject, name: str, since: int) -> None:
    """Let a waiter of the process `p1` join the queue."""
    entry = QueueEntry(("r",), 1, f"{PREFIX}p1:{name}", since)
    assert node.ask(Verb.ENQUEUE, entry) is True


def test_any_number_of_readers_acquire(redis_node: Subject) -> None:
    for name in ("one", "two", "three"):
        assert redis_node.ask(Verb.ACQUIRE, reader(name)) is None
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) == "two" + SHARED  # an answer was lost
    assert redis_node.ask(Verb.PEEK, claim())[0].endswith(SHARED)


def test_writer_is_refused_while_a_reader_lives_and_no_longer(redis_node: Subject) -> None:
    one, two = reader("one"), reader("two")
    redis_node.ask(Verb.ACQUIRE, one)
    redis_node.ask(Verb.ACQUIRE, two)
    for freed in (one, two):
        assert redis_node.ask(Verb.ACQUIRE, claim()) in (
            replies.FOREIGN,
            "one~shared",
            "two~shared",
        )
        assert redis_node.ask(Verb.EXTEND, claim()) == "0"
        assert redis_node.ask(Verb.RENEW, claim()) == "0"
        assert redis_node.ask(Verb.RELEASE, claim()) is False
        assert redis_node.ask(Verb.RELEASE, freed) is True
        assert redis_node.ask(Verb.RELEASE, freed) is False
    assert redis_node.ask(Verb.PEEK, claim()) is None
    assert redis_node.ask(Verb.ACQUIRE, claim()) is None


def test_reader_refused_by_a_writer_changes_nothing(redis_node: Subject) -> None:
    redis_node.ask(Verb.ACQUIRE, claim(ttl=5.0))
    assert redis_node.ask(Verb.ACQUIRE, reader()) == "mine"
    for verb in (Verb.EXTEND, Verb.RENEW):
        assert redis_node.ask(verb, reader()) == "0"
    for verb in (Verb.UNDO, Verb.RELEASE):
        assert redis_node.ask(verb, reader()) is False
    token, left = redis_node.ask(Verb.PEEK, claim())
    assert (token, left <= 5.0) == ("mine", True)


def test_each_reader_expires_by_itself_and_the_last_one_frees(redis_node: Subject) -> None:
    redis_node.ask(Verb.ACQUIRE, reader("long", 5.0))
    redis_node.ask(Verb.ACQUIRE, reader("short", 0.05))
    redis_node.ask(Verb.ACQUIRE, reader("short", 0.05, "other"))  # ends behind it
    redis_node.wait_for_expiry("other", 0.05)
    assert redis_node.ask(Verb.RENEW, reader("short")) == "0"
    assert redis_node.ask(Verb.RELEASE, reader("short")) is False
    token, left = redis_node.ask(Verb.PEEK, claim())
    assert token == "long" + SHARED
    assert 4.0 < left <= 5.0
    redis_node.ask(Verb.ACQUIRE, reader("last", 0.05, "other"))
    redis_node.wait_for_expiry("other", 0.05)
    assert redis_node.ask(Verb.ACQUIRE, claim(resource="other")) is None


@pytest.mark.parametrize("verb", [Verb.EXTEND, Verb.RENEW])
def test_reader_is_renewed_without_the_others(redis_node: Subject, verb: Verb) -> None:
    redis_node.ask(Verb.ACQUIRE, reader("one", 5.0))
    redis_node.ask(Verb.ACQUIRE, reader("two", 6.0))
    assert redis_node.ask(verb, reader("one", 50.0), claim("mine", "another")) == (
        "12" if verb is Verb.EXTEND else "10"
    )
    assert 49.0 < redis_node.ask(Verb.PEEK, claim())[1] <= 50.0
    redis_node.ask(Verb.RELEASE, reader("one"))
    assert 5.0 < redis_node.ask(Verb.PEEK, claim())[1] <= 6.0


def test_renewal_never_shortens_the_lease_of_a_reader(redis_node: Subject) -> None:
    redis_node.ask(Verb.ACQUIRE, reader("one", 50.0))
    assert redis_node.ask(Verb.RENEW, reader("one", 5.0)) == "1"
    assert redis_node.ask(Verb.PEEK, claim())[1] > 49.0


def test_extension_sets_a_reader_again_beside_others_but_not_beside_a_writer(
    redis_node: Subject,
) -> None:
    assert redis_node.ask(Verb.EXTEND, reader("one")) == "2"
    assert redis_node.ask(Verb.EXTEND, reader("two")) == "2"
    assert redis_node.ask(Verb.RENEW, reader("three")) == "0"
    redis_node.flush()
    redis_node.ask(Verb.ACQUIRE, claim())
    assert redis_node.ask(Verb.EXTEND, reader("one")) == "0"


def test_sorted_set_of_another_program_is_held_and_never_touched(redis_node: Subject) -> None:
    if isinstance(redis_node, Fake):
        pytest.skip("the fake has no other types")
    redis_node.admin.zadd(redis_node.key("r"), {"a job": 1})  # type: ignore[union-attr]
    for one in (claim(), reader()):
        assert redis_node.ask(Verb.ACQUIRE, one) == replies.FOREIGN
        assert redis_node.ask(Verb.EXTEND, one) == "0"
        assert redis_node.ask(Verb.RELEASE, one) is False
    assert redis_node.ask(Verb.PEEK, claim())[0] == replies.FOREIGN
    assert redis_node.admin.zrange(redis_node.key("r"), 0, -1) == [b"a job"]  # type: ignore[union-attr]


@pytest.mark.parametrize("verb", [Verb.EXTEND, Verb.RENEW])
def test_full_node_does_not_confirm_the_renewal_of_a_reader(
    redis_node: Subject, verb: Verb
) -> None:
    redis_node.ask(Verb.ACQUIRE, reader("one", 5.0))
    redis_node.ask(Verb.ACQUIRE, claim("mine", "another", 5.0))
    redis_node.fill()  # type: ignore[union-attr]
    both = reader("one", 50.0), claim("mine", "another", 50.0)
    assert redis_node.ask(verb, *both) == "01"
    assert redis_node.ask(Verb.PEEK, claim())[1] <= 5.0
    assert redis_node.ask(Verb.PEEK, claim(resource="another"))[1] > 49.0
    assert redis_node.ask(Verb.RELEASE, reader("one")) is True
    redis_node.fill(full=False)  # type: ignore[union-attr]


# -- Who goes next


def test_new_reader_is_refused_while_a_writer_waits_for_readers(redis_node: Subject) -> None:
    redis_node.ask(Verb.ACQUIRE, reader("one"))
    waits(redis_node, "dead", 1)
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) is None  # nobody listens there
    redis_node.listen("p1")
    assert redis_node.ask(Verb.ACQUIRE, reader("three")) == "one~shared"
    assert redis_node.ask(Verb.EXTEND, reader("two")) == "1"  # its holder goes on


def test_waiting_reader_keeps_no_reader_out(redis_node: Subject) -> None:
    redis_node.listen("p1")
    redis_node.ask(Verb.ACQUIRE, reader("one"))
    waits(redis_node, "1" + SHARED, 1)
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) is None


def test_last_reader_notifies_the_writer_and_no_other_reader_does(redis_node: Subject) -> None:
    redis_node.listen("p1")
    for name in ("one", "two"):
        redis_node.ask(Verb.ACQUIRE, reader(name))
    waits(redis_node, "writer", 1)
    assert redis_node.ask(Verb.RELEASE, reader("one")) is True
    assert redis_node.calls(0) == []
    assert redis_node.ask(Verb.RELEASE, reader("two")) == 3
    assert redis_node.calls(1) == ["p1:writer"]


def test_writer_notified_by_the_last_reader_goes_first(redis_node: Subject) -> None:
    redis_node.listen("p1")
    redis_node.ask(Verb.ACQUIRE, reader("one"))
    waits(redis_node, "writer", 1)
    waits(redis_node, "behind", 2)
    redis_node.ask(Verb.RELEASE, reader("one"))
    assert redis_node.calls(1) == ["p1:writer"]
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) == "one~shared"
    assert redis_node.ask(Verb.ACQUIRE, claim()) is None
    assert redis_node.ask(Verb.RELEASE, claim()) == 3
    assert redis_node.calls(1) == ["p1:behind"]
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) is None  # the barrier has gone with the call


def test_notified_writer_that_does_not_come_keeps_readers_out_for_a_second(
    redis_node: Subject,
) -> None:
    redis_node.listen("p1")
    redis_node.ask(Verb.ACQUIRE, reader("one"))
    waits(redis_node, "writer", 1)
    redis_node.ask(Verb.RELEASE, reader("one"))
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) == "one~shared"
    redis_node.ask(Verb.ACQUIRE, reader("clock", 1.0, "clock"))
    redis_node.wait_for_expiry("clock", 1.0)
    assert redis_node.ask(Verb.ACQUIRE, reader("two")) is None


def test_released_writer_notifies_the_readers_in_front_of_the_next_writer(
    redis_node: Subject,
) -> None:
    redis_node.listen("p1")
    redis_node.ask(Verb.ACQUIRE, claim())
    for since, name in enumerate(["1~shared", "2~shared", "writer", "3~shared"]):
        waits(redis_node, name, since)
    assert redis_node.ask(Verb.RELEASE, claim()) == 3
    assert redis_node.calls(2) == ["p1:1~shared", "p1:2~shared"]
    assert redis_node.ask(Verb.RELEASE, claim()) == 2
    assert redis_node.calls(1) == ["p1:writer"]


def test_writer_that_gives_up_notifies_the_readers_behind_it(redis_node: Subject) -> None:
    redis_node.listen("p1")
    redis_node.ask(Verb.ACQUIRE, reader("one"))
    for since, name in enumerate(["writer", "1~shared", "2~shared", "another"]):
        waits(redis_node, name, since)
    entry = QueueEntry(("r",), 1, f"{PREFIX}p1:writer", 0)
    assert redis_node.ask(Verb.HAND_ON, entry) is True
    assert redis_node.calls(2) == ["p1:1~shared", "p1:2~shared"]


def test_look_shows_a_reader_the_token_that_would_keep_it_out(redis_node: Subject) -> None:
    def look(*, shared: bool = True) -> str | None:
        seen = redis_node.ask(Verb.PEEK, Query(("r",), 1, shared=shared))
        return seen and str(seen[0])

    redis_node.listen("p1")
    assert look() is None
    redis_node.ask(Verb.ACQUIRE, reader("one"))
    assert (look(), look(shared=False)) == (None, "one~shared")
    waits(redis_node, "writer", 1)
    assert look() == "one~shared"
    redis_node.ask(Verb.RELEASE, reader("one"))
    assert (look(), look(shared=False)) == ("one~shared", None)
    _token, left = redis_node.ask(Verb.PEEK, Query(("r",), 1, shared=True))
    assert 0.0 < left <= 1.0
    redis_node.ask(Verb.ACQUIRE, claim())
    assert look() == "mine"


def test_two_deliveries_of_one_message_do_not_read_together(redis_node: Subject) -> None:
    def delivery(stamp: str, task_id: str, retries: int = 0) -> Claim:
        owner = Owner("h", 1, task_id, retries, stamp, "t")
        return claim(owner.token(f"n-{stamp}{SHARED}"))

    first = delivery("s1", "a")
    assert redis_node.ask(Verb.ACQUIRE, first) is None
    assert redis_node.ask(Verb.ACQUIRE, delivery("s2", "a")) == first.token
    assert redis_node.ask(Verb.ACQUIRE, delivery("s3", "a", retries=1)) is None
    assert redis_node.ask(Verb.ACQUIRE, delivery("s4", "b")) is None
    assert redis_node.ask(Verb.ACQUIRE, delivery("s5", "")) is None
    assert redis_node.ask(Verb.ACQUIRE, delivery("s6", "")) is None
    redis_node.ask(Verb.RELEASE, first)
    assert redis_node.ask(Verb.ACQUIRE, delivery("s2", "a")) is None
