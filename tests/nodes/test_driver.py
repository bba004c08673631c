"""The driver over scripted peers: each caller gets its own answer, in time, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.pipeline import STALLED_S
from celery_redlock.protocol.round import Round
from celery_redlock.protocol.values import QueueEntry
from celery_redlock.runtime.blocking import blocking
from celery_redlock.runtime.clock import monotonic
from celery_redlock.stores.driver import BATCH
from tests.support.names import Patch
from tests.support.peer import DEADLINE, Line, bulk, in_thread, verb_of
from tests.support.peer_world import (
    SHORT,
    PeerWorld,
    a_claim,
    acquire,
    echo,
    echoing,
    mute,
    own,
    votes,
)
from tests.support.struck import struck_at_each_call
from tests.support.wait import wait_until


@pytest.fixture
def later(monkeypatch: Patch) -> Callable[[float], None]:
    """A way to let some seconds pass at once for the library."""
    clock = time.clock_gettime
    return lambda seconds: monkeypatch.setattr(
        time, "clock_gettime", lambda which: clock(which) + seconds
    )


# -- Answers


@pytest.mark.parametrize("reply", [b"$-1\r\n", bulk(b"theirs")])
def test_answer_in_any_two_pieces_counts_once(world: PeerWorld, reply: bytes) -> None:
    """The second piece is sent once the first has been read."""
    read = threading.Semaphore(0)

    def cut(line: Line) -> None:
        for at in range(1, len(reply)):
            assert line.request() is not None
            line.send(reply[:at])
            assert read.acquire(timeout=DEADLINE)
            line.send(reply[at:])
        peer.serve(line)

    peer = world.peer(cut)
    driver = world.driver()
    for at in range(1, len(reply)):
        asked = in_thread(partial(acquire, driver, str(at)))
        peer.next()
        read.release()
        assert votes(asked()) == ["yes" if reply == b"$-1\r\n" else "no"]
        if reply != b"$-1\r\n":
            assert asked().details == ["theirs"]
    assert peer.connections == 1


def test_late_answer_is_not_taken_for_the_one_to_the_next_round(
    world: PeerWorld,
) -> None:
    """The peer answers the first attempt, its undoing and the second attempt in one piece."""

    def late(line: Line) -> None:
        answers = b""
        while (asked := line.request()) is not None:
            verb, keys, _ = verb_of(asked)
            answers += echo(asked) if verb == "acquire" else b":0\r\n"
            if keys == [b"redlock:second"]:
                break
        line.send(answers)
        peer.serve(line)

    peer = world.peer(late)
    driver = world.driver()
    first = acquire(driver, "first", SHORT)
    assert votes(first) == ["silent"]
    assert "no answer within 0.050 s" in first.details[0]
    assert own(acquire(driver, "second"))
    assert peer.connections == 1


def test_attempt_without_answers_is_undone_behind_itself(world: PeerWorld) -> None:
    peer = world.peer(mute)
    driver = world.driver()
    asked = acquire(driver, "r", SHORT)
    assert votes(asked) == ["silent"]
    verbs = [verb_of(peer.next()) for _ in range(2)]
    assert [verb for verb, _, _ in verbs] == ["acquire", "undo"]
    assert verbs[0][1] == verbs[1][1] == [b"redlock:r"]
    assert verbs[0][2][0] == verbs[1][2][0] == b"token of r"


@pytest.mark.parametrize(
    "said",
    [b"+surplus\r\n", b":1\r\n:1\r\n", b"HTTP/1.1 400\r\n\r\n", b"$3\r\nabcd\r\n", b":x\r\n"],
)
def test_peer_that_breaks_the_protocol_is_connected_to_again(world: PeerWorld, said: bytes) -> None:
    def wrong(line: Line) -> None:
        if line.number:
            peer.serve(line)
        elif line.request() is not None:
            line.send(said)
            line.gone()

    peer = world.peer(wrong)
    driver = world.driver()
    acquire(driver, "r", SHORT)
    # Nobody reads what comes after that, before the next request.
    wait_until(lambda: votes(acquire(driver, "r", SHORT)) == ["yes"], DEADLINE, "it votes")
    assert peer.connections == 2


def joins(at: float) -> Round:
    """Return a round that joins the queue of r, made at some time."""
    return quorum.queue_round(QueueEntry(("r",), 1, "process:1", 1), at)


def test_request_that_a_busy_process_writes_late_is_no_silence_of_its_node(
    world: PeerWorld, later: Callable[[float], None]
) -> None:
    """Its thread did not run for two seconds, with the request made and not written."""
    world.peer()
    driver, claim = world.driver(), a_claim("r")
    later(4 * STALLED_S)  # the connection is old

    def late(now: float) -> Round:
        return joins(now - 2 * STALLED_S)

    asked = blocking(driver.ask(lambda now: quorum.acquire(claim, now, DEADLINE), late))
    assert votes(asked) == ["yes"]


def test_request_whose_successor_was_interrupted_stalls_its_node_for_one_attempt_only(
    world: PeerWorld, later: Callable[[float], None]
) -> None:
    peer = world.peer()
    driver = world.driver()
    node, now = driver.nodes[0], monotonic()
    round_ = joins(now)
    node.ask(round_, node.encode(round_), now, more=True)
    later(2 * STALLED_S)
    asked = acquire(driver, "r", SHORT)
    assert "no answer for" in asked.details[0]
    assert verb_of(peer.seen.get(timeout=DEADLINE / 2)[1])[0] == "queue"
    wait_until(lambda: votes(acquire(driver, "r", SHORT)) == ["yes"], DEADLINE, "it votes")


def test_error_reply_of_a_node_counts_as_silence_with_its_reason(world: PeerWorld) -> None:
    def full(line: Line) -> None:
        while line.request() is not None:
            line.send(b"-OOM command not allowed\r\n")

    world.peer(full)
    asked = acquire(world.driver(), "r")
    assert votes(asked) == ["silent"]
    assert "OOM" in asked.details[0]


# -- Many at once


def test_threads_that_share_a_driver_get_their_own_answers(world: PeerWorld) -> None:
    for _ in range(3):
        world.peer(echoing)
    driver = world.driver()

    def many(thread: int) -> list[Round]:
        return [acquire(driver, f"{thread}:{number}") for number in range(15)]

    asked = [in_thread(partial(many, number)) for number in range(6)]
    rounds = [round_ for one in asked for round_ in one()]
    assert len(rounds) == 90
    assert all(map(own, rounds))


def test_many_leases_are_extended_in_requests_of_a_limited_size(world: PeerWorld) -> None:
    peer = world.peer()
    driver = world.driver()
    claims = [a_claim(str(number)) for number in range(2 * BATCH + 1)]
    ended = claims[3]
    ended.ended = True
    rounds = driver.extend(claims, DEADLINE)
    confirmed = [claim for round_ in rounds for claim in round_.confirmed()]
    assert confirmed == [claim for claim in claims if claim is not ended]
    assert [len(verb_of(peer.next())[1]) for _ in range(3)] == [BATCH - 1, BATCH, 1]
    assert b"redlock:3" not in peer.held


def test_requests_larger_than_a_socket_takes_arrive_whole_and_in_order(world: PeerWorld) -> None:
    """The peer reads nothing until the buffers of both sides are full."""
    go = threading.Event()

    def lazy(line: Line) -> None:
        line.send(peer.answer(line.request()))
        assert go.wait(DEADLINE)
        peer.serve(line)

    peer = world.peer(lazy)
    driver = world.driver()
    assert votes(acquire(driver, "before")) == ["yes"]
    big = [a_claim(f"{n}:" + "x" * 15_000, token=str(n)) for n in range(2 * BATCH)]
    asked = in_thread(lambda: driver.extend(big, DEADLINE))
    wait_until(lambda: driver.nodes[0].unsent, 5, "the buffers are full")
    behind = in_thread(lambda: acquire(driver, "behind"))
    go.set()
    assert [claim for round_ in asked() for claim in round_.confirmed()] == big
    assert votes(behind()) == ["yes"]
    assert len(peer.held) == len(big) + 2
    assert peer.connections == 1


# -- Started, and read later


def test_a_started_operation_without_answers_ends_at_its_deadline(world: PeerWorld) -> None:
    peer = world.peer(mute)
    driver = world.driver()
    claim = a_claim("r")
    claim.written = 1
    done: list[Any] = []
    driver.start(lambda now: quorum.release(claim, now, SHORT), done.append)
    peer.next()
    assert not driver.read()
    wait_until(lambda: done or driver.read(0.01), 5, "it has ended")
    assert not done[0].confirmed
    assert driver.unconfirmed() == [claim]
    assert not driver.retry_releases()


# -- Interrupted; handlers that use the driver are in tests/promises/lock/test_reentry.py


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_exception_at_any_call_of_the_driver_mixes_up_no_answers_and_blocks_nobody(
    world: PeerWorld,
) -> None:
    for _ in range(3):
        world.peer(echoing)
    driver = world.driver()
    numbers = iter(range(10**6))

    def asked(patience: float = DEADLINE) -> bool:
        return own(acquire(driver, f"key {next(numbers)}", patience))

    def check() -> None:
        wait_until(lambda: asked(0.5), 5, "the nodes answer")
        assert in_thread(asked)()

    places = struck_at_each_call("/celery_redlock/stores/", asked, before=check)
    assert places > 50
