"""Edges of rules, each of them once moved by a mutation that no other test noticed."""

from __future__ import annotations

import math
import pickle
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Reject

from celery_redlock import ConfigurationError, LeaseLost, QuorumUnavailable, Redlock, SingletonTask
from celery_redlock.locking import acquisition
from celery_redlock.locking.acquisition import Acquisition
from celery_redlock.locking.pubsub import ReleaseSubscriber
from celery_redlock.locking.wait_queue import Waiter
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.policy import is_split
from celery_redlock.messages.reservation import Reservation, claim_for, look, start
from celery_redlock.protocol import quorum, replies
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import NodeError, ResourceHeld
from celery_redlock.protocol.lease import Lease, drift
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import RestartGuard, Trust
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import Holder, Owner, Vote
from celery_redlock.stores.driver import Driver
from celery_redlock.stores.etcd.questions import conversation
from celery_redlock.stores.etcd.wire import Keys, text
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.redis.requests import encode
from celery_redlock.stores.reports import Reports
from tests.support.clock import FakeClock
from tests.support.delivering import Box, Ran, deliver, header, take, token_of
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch
from tests.support.wire import Wire

NOW = 1000.0
PREFIX = "redlock:"
ADDRESS = parse_nodes(["redis://127.0.0.1:1"])[0]


@pytest.fixture
def wire() -> Any:
    wire = Wire()
    yield wire
    wire.disconnect()


@pytest.fixture
def node(wire: Wire) -> RedisNode:
    node = RedisNode(
        *(0, ADDRESS, PREFIX, RestartGuard(False, 30.0, print), []),
        clock=lambda: 1.2,
        later=lambda call: call(),
    )
    node.opened(wire, NodeInfo(), 1.0, 1.0)
    return node


# -- the nodes -----------------------------------------------------------------------------------


def test_arrived_answer_is_read_before_a_newer_extension_is_asked(
    node: RedisNode, wire: Wire
) -> None:
    """Read later, an older answer would count for a younger request."""
    mine = Claim("r", "mine", 10.0, 1)
    first, second = (next(quorum.extend([mine], at, 0.5)) for at in (1.0, 1.1))
    node.ask(first, encode(first, PREFIX), 1.0)
    assert wire.peer.recv(65536)
    wire.peer.sendall(b"$1\r\n1\r\n")
    assert first.votes == [None]
    node.ask(second, encode(second, PREFIX), 1.1)
    assert first.votes == [Vote.YES]
    assert second.votes == [None]


@pytest.mark.parametrize("interrupted", [True, False])
def test_old_server_is_not_asked_again_for_an_attempt_that_is_over(
    node: RedisNode, wire: Wire, interrupted: bool
) -> None:
    """Redis 6.2 rejects SET .. NX GET; the attempt may be over by the time that answer arrives.

    The round of an interrupted attempt is never closed: it has ended, and is not looked at again.
    """
    mine = Claim("r", "mine", 10.0, 1)
    asked = next(attempt := quorum.acquire(mine, 1.0, 0.5))
    node.ask(asked, encode(asked, PREFIX), 1.0)
    assert b"SET" in wire.peer.recv(65536)
    if interrupted:
        mine.ended = True
    else:
        asked.close("no answer")
        undoing = attempt.send(1.1)
        node.ask(undoing, encode(undoing, PREFIX), 1.1)
        assert b"DEL" in wire.peer.recv(65536)
    wire.peer.sendall(b"-ERR syntax error\r\n")
    node.receive()
    with pytest.raises(BlockingIOError):
        wire.peer.recv(65536)  # it would be set, and nobody would free it


def test_write_proves_a_master_only_at_the_time_of_its_request(wire: Wire) -> None:
    """It may be a replica by the time of the answer: the next vote needs another look."""
    guard = RestartGuard(True, 30.0, print)
    node = RedisNode(*(0, ADDRESS, PREFIX, guard, []), clock=lambda: 1.2, later=lambda call: call())
    node.opened(wire, NodeInfo(run_id="one", uptime=1e6, role="master"), 1.0, 1.0)
    asked = next(quorum.extend([Claim("r", "mine", 10.0, 1)], 1.1, 0.5))
    node.ask(asked, encode(asked, PREFIX), 1.1)
    wire.peer.sendall(b"$1\r\n1\r\n")
    node.receive()  # at 1.2
    assert asked.votes == [Vote.YES]
    assert not node._trust.to_ask_again(1.1)
    assert node._trust.to_ask_again(1.2)


@pytest.mark.parametrize("uptime", [50.0, 99.0], ids=["restarted", "restarted right after it"])
def test_unread_answer_does_not_turn_a_later_restart_into_a_swap(uptime: float) -> None:
    """An idle process reads the answer to a release only with its next request."""
    trust = idle_node_meets(uptime)
    assert (trust.memory.what, trust.memory.began) == ("started", 101.0 - uptime)


def test_server_that_ran_when_the_previous_one_answered_is_another_server() -> None:
    trust = idle_node_meets(100.0)
    assert trust.memory.began == 100.0
    assert trust.doubt(100.0).startswith("is another server than before, met 0 s ago")


def idle_node_meets(uptime: float) -> Trust:
    """Have a server answer a release of 1.1; at 100.0, read that and meet one with this uptime."""
    guard, clock, wires = RestartGuard(True, 30.0, print), FakeClock(1.2), (Wire(), Wire())
    node = RedisNode(*(0, ADDRESS, PREFIX, guard, []), clock=clock, later=lambda call: call())
    node.opened(wires[0], NodeInfo(run_id="one", uptime=1e6, role="master"), 1.0, 1.0)
    release = next(quorum.release(Claim("r", "mine", 10.0, 1), 1.1, 0.5))
    node.ask(release, encode(release, PREFIX), 1.1)
    wires[0].peer.sendall(b":1\r\n")
    wires[0].peer.close()
    clock.advance(98.8)
    node.receive()
    node.receive()
    assert release.votes == [Vote.YES] and node.connection is None
    node.opened(wires[1], NodeInfo(run_id="two", uptime=uptime, role="master"), 100.0, 100.0)
    for wire in wires:
        wire.disconnect()
    return node._trust


@pytest.mark.parametrize("at", ["_put", "flush"])
def test_request_interrupted_before_it_is_written_drops_its_connection(
    node: RedisNode, wire: Wire, monkeypatch: Patch, at: str
) -> None:
    """The next answer would be taken for the one to the request that was never sent."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RedisNode, at, struck)
        asked = next(quorum.extend([Claim("r", "mine", 10.0, 1)], 1.0, 0.5))
        with pytest.raises(KeyboardInterrupt):
            node.ask(asked, encode(asked, PREFIX), 1.0)
    assert wire.closed and node.connection is None
    assert not node.channel.up and not node.channel.unanswered and not node.unsent


@pytest.mark.parametrize("over", ["ended", "closed", ""])
def test_etcd_attempt_that_was_given_up_is_not_put_again(over: str) -> None:
    """If put again, the key would be set after its own removal, and stay until its ttl is over."""
    mine = Claim(("one", "two"), "mine", 10.0, 1)
    round_ = next(quorum.acquire(mine, 1.0, 0.5))
    steps = conversation(round_, Keys(PREFIX), lambda ttl: "7")
    assert len(next(steps)) == 1
    found = {"kvs": [{"value": text(b"mine")}]}, {}  # the answer to the first put was lost
    refused = {"succeeded": False, "responses": [{"response_range": one} for one in found]}
    if over:
        setattr(mine if over == "ended" else round_, over, True)
        with pytest.raises(StopIteration):
            steps.send([refused])
    else:
        assert len(steps.send([refused])) == 1


def test_second_of_two_concurrent_connections_to_a_node_is_closed(monkeypatch: Patch) -> None:
    """Requests sent on the first would never be answered on the second."""
    wires = [Wire(), Wire()]
    made = iter(wires)
    monkeypatch.setattr(RedisNode, "connect", lambda _node: (next(made), NodeInfo()))
    driver = Driver([ADDRESS], PREFIX)
    (node,) = driver.nodes
    try:
        driver._connect(node)
        driver._connect(node)
        assert node.connection is wires[0]
        assert [wire.closed for wire in wires] == [False, True]
    finally:
        driver.close()


def test_driver_closed_while_connecting_reports_nothing_about_the_node(
    monkeypatch: Patch, caplog: Log
) -> None:
    """Listeners serve the whole process and would attribute it to another driver."""
    driver = Driver([ADDRESS], PREFIX)
    (node,) = driver.nodes

    def closed_meanwhile(_node: RedisNode) -> Any:
        driver.close()
        raise NodeError("it is away")

    told: list[str] = []
    monkeypatch.setattr(RedisNode, "connect", closed_meanwhile)
    monkeypatch.setattr(Reports, "failed", lambda _reports, kind: told.append(kind))
    driver._connect(node)
    assert told == []
    assert caplog.messages == []


# -- claims and lines ----------------------------------------------------------------------------


def test_expiry_learnt_from_the_extender_shortens_none_that_was_confirmed_here() -> None:
    """The extender knows less of a node than this process learnt itself."""
    mine = Claim("r", "mine", 10.0, 3)
    for index in range(3):
        mine.acknowledged(index, NOW, NOW)
    assert mine.grant(NOW)
    assert mine.learn([NOW + 5.0] * 3)
    assert mine.expiries == [NOW + 10.0] * 3
    assert mine.deadline == pytest.approx(NOW + 10.0 - drift(10.0))


def test_waiter_that_joined_a_queue_twice_cannot_tell_when_a_node_removed_it() -> None:
    waiter = Waiter(2, {0, 1, 2}, "process")
    waiter.forget()
    waiter.hear(0)
    assert waiter.left_by == {0}
    waiter.forget()
    waiter.hear(1)  # perhaps a late call, from before: it stands there once more
    assert waiter.left_by == set()


def test_waiter_that_a_minority_has_notified_waits_for_the_others(monkeypatch: Patch) -> None:
    monkeypatch.setattr("celery_redlock.locking.wait_queue.FEW_CALLED_S", (0.1, 0.1))
    waiter = Waiter(2, {0, 1, 2}, "process")
    waiter.hear(0)
    begun = time.monotonic()
    assert waiter.wait(60.0)
    assert 0.1 <= time.monotonic() - begun < 30.0
    waiter.hear(1)
    assert waiter.wait(60.0), "a quorum is waited for no longer"


def test_newly_connected_node_may_have_notified_the_waiter_before(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ReleaseSubscriber, "_connect_missing", lambda _: None)  # nobody is there
    wakeup = ReleaseSubscriber([ADDRESS] * 3, PREFIX)
    with wakeup.waiter() as waiter:
        wakeup.called(1, waiter.name.encode())
        assert (waiter.calls, waiter.sure, waiter.informed) == (1, True, False)
        for node in (0, 1):
            wakeup.subscribed(node)
        assert (waiter.calls, waiter.sure, waiter.informed) == (2, False, True)
        wakeup.disconnected(0)
        assert not waiter.informed
        waiter.forget()
        wakeup.close()
        assert waiter.closed and waiter.wait(60.0), "there is nothing to wait for"


@pytest.mark.parametrize(("wait", "tries"), [(5.0, 1), (0.0, 1), (5.2, 2)])
def test_acquire_does_not_wait_if_its_wait_is_shorter_than_the_restart_guard(
    redlock: FakeRedlock, monkeypatch: Patch, wait: float, tries: int
) -> None:  # fmt: skip
    asked = []

    async def attempt(*_what: object, **_how: object) -> None:
        asked.append(1)
        if len(asked) == 2:
            redlock.client.wakeup.close()  # it does not wait on
        raise QuorumUnavailable("they were just started", retry_after=5.1)

    monkeypatch.setattr(Acquisition, "_attempt", attempt)
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r", wait=wait)
    assert len(asked) == tries


def test_a_pickled_loss_shows_no_token() -> None:
    lease = Lease("r", "secret", 10.0, 109.0, NOW.__abs__)
    told = {"resource": "r", "lease": lease, "held_for": 2.0, "owner": Owner("h", 1)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        pickled = pickle.dumps(LeaseLost("r: over", **told), protocol)
        assert b"secret" not in pickled
        loss = pickle.loads(pickled)
        found = loss.lease.token, loss.lease.ttl, loss.resource, loss.held_for, str(loss)
        assert found == ("", 10.0, "r", 2.0, "r: over")
    with pytest.raises(TypeError, match="no attribute 'holder'"):
        LeaseLost("r: over", holder=None)


# -- the process ---------------------------------------------------------------------------------


def test_redlock_is_refused_where_eventlet_has_patched_python(monkeypatch: Patch) -> None:
    patcher = SimpleNamespace(is_monkey_patched=lambda module: module == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(ConfigurationError, match="Use the pool gevent, threads or prefork"):
        Redlock(["redis://127.0.0.1:1"])


# -- reservations --------------------------------------------------------------------------------


def test_quorum_that_names_another_reservation_refuses_ours(redlock: FakeRedlock) -> None:
    take(redlock, "another")
    redlock.driver.dead = {0, 1}
    claim = claim_for(redlock, "order:1", 10.0, "mine")
    assert not start(redlock, claim)
    assert {look(redlock, claim).token} == redlock.tokens("order:1#reserved")


def test_reservation_that_only_a_quorum_has_is_its_own(redlock: FakeRedlock) -> None:
    """A node that the publisher had not yet connected to may answer before one that has it."""
    take(redlock, "mine", nodes=3)
    redlock.driver.dead = {0}
    (token,) = redlock.tokens("order:1#reserved") - {None}
    claim = claim_for(redlock, "order:1", 10.0, "mine")
    claim.token = str(token)
    assert start(redlock, claim)


def test_replace_revokes_no_task_of_which_nobody_knows_if_it_runs(
    redlock: FakeRedlock, charge: Any, box: Box, monkeypatch: Patch
) -> None:
    async def peek(*_args: Any, **_options: Any) -> Any:
        raise QuorumUnavailable("order:1: too few", resource="order:1", votes=())

    revoked: list[Any] = []
    monkeypatch.setattr(charge.app.control, "broadcast", lambda *_, **given: revoked.append(given))
    take(redlock, "first")
    monkeypatch.setattr(redlock.client, "peek", peek)
    assert charge.apply_async((1,), lock={"on_duplicate": "replace"}).id == "first"
    assert revoked == []
    assert box.messages() == []


def test_retry_that_cannot_be_sent_keeps_its_reservation(
    redlock: FakeRedlock, app: Any, monkeypatch: Patch
) -> None:
    @app.task(base=SingletonTask, bind=True, lock_key="k", lock_scope="until_executed")
    def task(self: Any) -> str:
        with pytest.raises(Reject):
            self.retry(countdown=1)
        assert not redlock.free("k#reserved")
        return "ran"

    def send_task(*_args: Any, **_options: Any) -> None:
        raise ConnectionError("the broker is away")

    monkeypatch.setattr(app, "send_task", send_task)
    result, _info = deliver(task)
    assert result == "ran"
    assert redlock.free("k#reserved")


def test_pause_of_a_waiter_is_no_longer_than_the_rest_of_its_wait(
    redlock: FakeRedlock, monkeypatch: Patch
) -> None:
    pauses: list[float] = []

    async def pause(_client: object, _waiter: object, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(ReleaseSubscriber, "_connect_missing", lambda _: None)  # nobody is there
    monkeypatch.setattr(acquisition, "JITTER", SimpleNamespace(uniform=lambda _low, high: high))
    monkeypatch.setattr(type(redlock.client), "pause", pause)
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r", wait=0.1)
    assert len(pauses) > 5
    assert max(pauses) <= 0.1


def test_extension_needs_a_quorum_and_a_lease_that_is_not_over(
    redlock: FakeRedlock,
) -> None:
    lease = redlock.acquire("r")
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable, match="2 of 5 nodes confirmed the extension in time"):
        redlock.extend(lease)
    redlock.driver.dead = set()
    assert redlock.extend(lease).token == lease.token
    redlock.clock.advance(20.0)
    with pytest.raises(LeaseLost, match="to be extended is over"):
        redlock.extend(lease)
    assert not redlock.release(replace(lease, token="another"))
    with pytest.raises(LeaseLost, match=r"to be extended is over \(released\)"):
        redlock.extend(replace(lease, token="another"))


def test_extension_waits_until_the_first_lease_ends_or_the_next_is_due(
    redlock: FakeRedlock,
) -> None:
    client = redlock.client
    for name, ttl in (("short", 1.0), ("long", 2.0)):
        redlock.acquire(name, ttl=ttl)
    short, long = claims = list(client.claims.values())
    assert client.patience_of(claims) == client.patience(1.0) < client.patience(2.0)
    redlock.watchdog.next_due = redlock.clock() + 0.05
    assert client.patience_of(claims) == pytest.approx(0.05)
    redlock.watchdog.next_due = float("inf")
    redlock.clock.advance(short.deadline - redlock.clock() - 0.02)
    assert client.patience_of(claims) == pytest.approx(0.02)
    assert client.patience_of([long]) == client.patience(2.0)


def test_release_reply_of_a_node_is_read_as_a_count_from_two_on() -> None:
    assert [replies.released([], said) for said in range(4)] == [False, True, 2, 3]


@pytest.mark.parametrize("wrong", [{"scope": "x"}, {"on_duplicate": "x"}, {"ttl": True}], ids=str)
def test_invalid_reservation_header_is_ignored(wrong: dict[str, Any]) -> None:
    given = header("until_executed")
    assert Reservation.of(given, "the-id") is not None
    assert Reservation.of({**given, **wrong}, "the-id") is None


@pytest.mark.parametrize("away", [False, True])
def test_reservation_not_kept_after_success_is_logged(
    ran: Ran, redlock: FakeRedlock, caplog: Log, away: bool
) -> None:
    token = token_of()
    claim = Claim("order:1#reserved", token, 60.0, 5)
    for node in redlock.fakes:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())
    if away:
        ran.then = lambda: redlock.driver.dead.update({0, 1, 2})
    result, _ = deliver(
        ran.task("until_succeeded"), 1, **{RESERVATION: header("until_succeeded", token=token)}
    )
    assert result == "done"
    assert ("and its key is not kept" in caplog.text) is away


def test_reservation_is_extended_while_its_body_runs(ran: Ran, redlock: FakeRedlock) -> None:
    token, watched = token_of(), set[str]()
    claim = Claim("order:1#reserved", token, 60.0, 5)
    for node in redlock.fakes:
        node.execute(Verb.ACQUIRE, [claim], redlock.clock())
    ran.then = lambda: watched.update(redlock.watchdog.watched)
    given = header("until_executed", token=token)
    assert deliver(ran.task("until_executed"), 1, **{RESERVATION: given})[0] == "done"
    assert token in watched
    assert not redlock.watchdog.watched


@pytest.mark.parametrize(
    ("nodes", "expires_in", "split"), [(1, 5.0, True), (2, 5.0, False), (1, math.inf, False)]
)
def test_votes_are_split_if_no_holder_has_a_quorum_and_all_will_give_way(
    nodes: int, expires_in: float, split: bool
) -> None:
    holder = Holder("r", None, nodes, 2, expires_in)
    assert is_split(ResourceHeld("r", holder=holder)) is split


def test_ttl_of_a_kept_key_is_not_the_longest_in_use(redlock: FakeRedlock) -> None:
    held = redlock.lock("r")
    held.acquire()
    before = redlock.client.guard.longest
    assert before < 500.0
    assert held.keep(500.0)
    assert redlock.client.guard.longest == before


def test_notification_by_a_release_is_remembered_for_each_key(redlock: FakeRedlock) -> None:
    for name in ("a", "b"):
        claim = Claim(name, "t", 10.0, 5)
        redlock.client._released(claim, quorum.Released(held=True, called=True, confirmed=True))
    assert [redlock.client.has_called(name, 1.0) for name in ("a", "b", "a", "c")] == [
        *(True, True, False, False)
    ]
