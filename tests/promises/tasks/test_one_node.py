"""One node of five with wrong answers for each key that is read besides locks: a liar, one that
has forgotten everything, and a key that somebody has written there by hand.

Over fake nodes; the table is in docs/hostile.md. What the scripts of a server do with a key of the
wrong type, and waiters in real threads, are in tests/nodes/test_one_key.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import Ignore

from celery_redlock import ResourceHeld, SingletonTask
from celery_redlock.locking import pauses
from celery_redlock.locking.held import HeldLease
from celery_redlock.locking.start import Start
from celery_redlock.messages.headers import RESERVATION
from celery_redlock.messages.reservation import (
    BEGUN,
    REPLACED,
    Reservation,
    claim_of,
    free,
)
from celery_redlock.messages.reservation import mark_of as mark_of_message
from celery_redlock.protocol import outcome
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import PAUSE_NAMES, mark_of
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.rate import rate_of
from celery_redlock.protocol.replies import DONE
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import REFUSED, RENEWED, Round, Verb
from celery_redlock.protocol.values import SHARED, Owner, token_digest
from celery_redlock.runtime.blocking import blocking
from celery_redlock.testing.fakes import FakeNode
from tests.promises.beat.beat_moments import entry, gaps, minutely
from tests.promises.beat.beat_world import World, Worlds
from tests.support.delivering import RESERVED, Box, deliver, take
from tests.support.fake_lock import FakeDriver, FakeRedlock

acquire = HeldLease.acquire
AGAIN = {"delivery_info": {"redelivered": True}}
EVER = 10 * 365 * 86_400.0
STRANGER = Owner("there", 1, task_id="stranger", stamp="x", task="other").token("0" * 32)

PRESENT = pytest.mark.parametrize("how", ["liar", "forged"])
"""One node has a key that no other has: it reports every key, or the key was written there."""
ABSENT = pytest.mark.parametrize("how", ["liar", "forgetful"])
"""One node lacks a key that all others have: it reports no key, or has forgotten it."""


def plant(node: FakeNode, now: float, how: str, name: str, value: str = STRANGER) -> None:
    """Have one node hold a value under a name; or, as a liar, under any name that it is asked."""
    if how == "forged":
        node.held[name] = value, now + EVER
        return

    def execute(verb: Verb, claims: Sequence[Any], _now: float) -> Any:
        if verb.extends:
            return REFUSED * len(claims)
        if verb is Verb.PEEK:
            return [(value, EVER)] * len(claims) if len(claims) > 1 else (value, EVER)
        return value if verb is Verb.ACQUIRE else False

    node.execute = execute  # type: ignore[method-assign]


def deny(node: FakeNode, how: str) -> None:
    """Have one node forget all that it holds; or, as a liar, say that everything is free."""
    if how == "forgetful":
        node.forget()
        return

    def execute(verb: Verb, claims: Sequence[Any], _now: float) -> Any:
        if verb.extends:
            return RENEWED * len(claims)
        if verb is Verb.PEEK:
            return [None] * len(claims) if len(claims) > 1 else None
        return None if verb is Verb.ACQUIRE else True

    node.execute = execute  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _liar_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the liar answer first; a decided round waits for no other answer."""

    def carry(self: FakeDriver, round_: Round) -> None:
        round_.begin()
        self.rounds.append(round_.verb.word)
        late = []
        for index in sorted(round_.targets, key=lambda node: (node + 1) % 5):
            if index in self.dead:
                round_.silence(index, "dead")
                continue
            for claim in round_.claims if round_.verb in (Verb.ACQUIRE, Verb.EXTEND) else ():
                claim.written |= 1 << index
            reply = self.nodes[index].execute(round_.verb, round_.claims, self.clock())
            if round_.decided:
                late.append((index, reply))
            else:
                round_.answer(index, reply, self.clock())
        round_.close("no answer")
        for index, reply in late:
            round_.answer(index, reply, self.clock())

    monkeypatch.setattr(FakeDriver, "_carry", carry)


@pytest.fixture
def has(redlock: FakeRedlock) -> Callable[..., None]:
    """Have the last node hold a key that no other holds: see `plant`."""
    return lambda *given: plant(redlock.fakes[4], redlock.clock(), *given)


@pytest.fixture
def lacks(redlock: FakeRedlock) -> Callable[[str], None]:
    """Have the last node lack what it holds: see `deny`."""
    return lambda how: deny(redlock.fakes[4], how)


# -- The marks of messages ------------------------------------------------------------------------


MARK = mark_of(Owner("here", 1, "the-id", task="t"), ["k"])


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(base=SingletonTask, name="t", lock_key="k", lock_on_conflict="skip", acks_late=True)
    def task() -> str:
        return "ran"

    return task


@PRESENT
def test_done_mark_of_one_node_takes_no_work(has: Any, task: Any, how: str) -> None:
    has(how, MARK, DONE)
    assert deliver(task, **AGAIN)[0] == "ran"


@ABSENT
def test_done_mark_that_one_node_lacks_ends_a_second_delivery(
    lacks: Any, task: Any, how: str
) -> None:
    assert deliver(task)[0] == "ran"
    lacks(how)
    result, info = deliver(task, **AGAIN)
    assert isinstance(result, Ignore) and info.state == states.IGNORED


@PRESENT
@pytest.mark.parametrize("slot", ["k", "k#slot2"])
def test_first_delivery_that_one_node_names_keeps_no_second_one_waiting(
    app: Celery, redlock: FakeRedlock, has: Any, how: str, slot: str
) -> None:
    @app.task(base=SingletonTask, name="t", lock_key="k", lock_limit=2, acks_late=True)
    def task() -> str:
        return "ran"

    has(how, slot, Owner("there", 1, task_id="the-id", task="t").token("0" * 32))
    for _ in range(5):  # it takes any of the slots
        for node in redlock.fakes[:4]:
            node.held.clear()
        assert deliver(task, **AGAIN)[0] == "ran"


class Queued:
    """A task whose calls replace each other, and its first call, in the queue.

    Attributes:
        task: The task.
        claim: The reservation of that call.
        ran: The texts of the bodies that ran.
    """

    def __init__(self, app: Celery, box: Box, redlock: FakeRedlock, scope: str) -> None:
        self.ran: list[str] = []
        self._box = box

        @app.task(
            base=SingletonTask,
            name="notify",
            lock_key="order:{order_id}",
            lock_scope=scope,
            lock_on_duplicate="replace",
        )
        def notify(order_id: int, text: str) -> str:
            self.ran.append(text)
            return text

        self.task = notify
        notify.apply_async((1, "first"), countdown=10)
        self._message = box.message()
        note = Reservation.of(self._message.headers[RESERVATION], self.id)
        assert note is not None
        self.claim = claim_of(redlock, note)

    @property
    def id(self) -> str:
        return str(self._message.headers["id"])

    def run(self) -> None:
        """Deliver the first call."""
        given = {"id": self.id, RESERVATION: self._message.headers[RESERVATION]}
        deliver(self.task, 1, "first", **given)


@pytest.fixture
def queue(
    app: Celery, box: Box, redlock: FakeRedlock, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Queued]:
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: None)
    return lambda scope="until_executing": Queued(app, box, redlock, scope)


@PRESENT
def test_replaced_mark_of_one_node_takes_no_work(
    redlock: FakeRedlock, has: Any, queue: Any, how: str
) -> None:
    queued = queue()
    free(redlock, queued.claim)  # else nobody asks for the mark
    has(how, mark_of_message(queued.claim, REPLACED), DONE)
    queued.run()
    assert queued.ran == ["first"]


@ABSENT
def test_replaced_mark_that_one_node_lacks_skips_the_replaced_call(
    lacks: Any, queue: Any, box: Box, how: str
) -> None:
    queued = queue()
    queued.task.apply_async((1, "second"), countdown=10)
    assert len(box.messages()) == 1
    lacks(how)
    queued.run()
    assert queued.ran == []


def fail_to_replace(queued: Queued, monkeypatch: pytest.MonkeyPatch, meanwhile: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        meanwhile()
        raise ConnectionError("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(queued.task.app, "send_task", fail)
        with pytest.raises(ConnectionError):
            queued.task.apply_async((1, "second"), countdown=10)


@PRESENT
def test_begun_mark_of_one_node_costs_a_reservation_and_no_work(
    redlock: FakeRedlock, has: Any, queue: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    queued = queue()
    has(how, mark_of_message(queued.claim, BEGUN), DONE)
    fail_to_replace(queued, monkeypatch, lambda: None)
    assert [node.token(RESERVED, redlock.clock()) for node in redlock.fakes[:4]] == [None] * 4
    queued.run()
    assert queued.ran == ["first"]


@ABSENT
def test_begun_mark_that_one_node_lacks_leaves_no_reservation_behind(
    redlock: FakeRedlock,
    lacks: Any,
    queue: Any,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    queued = queue()

    def meanwhile() -> None:
        queued.run()
        lacks(how)

    fail_to_replace(queued, monkeypatch, meanwhile)
    assert queued.ran == ["first"]
    assert [node.token(RESERVED, redlock.clock()) for node in redlock.fakes[:4]] == [None] * 4


# -- Reservations ---------------------------------------------------------------------------------


@PRESENT
def test_reservation_of_one_node_keeps_no_call_from_being_published(
    app: Celery, redlock: FakeRedlock, has: Any, box: Box, how: str
) -> None:
    @app.task(base=SingletonTask, lock_key="order:{order_id}", lock_scope="until_executed")
    def charge(order_id: int) -> str:
        return "charged"

    has(how, RESERVED, Owner("there", 7, "other", task=charge.name).token("0" * 32))
    charge.delay(1)
    headers = box.message().headers
    token = headers[RESERVATION]["token"]
    assert [node.token(RESERVED, redlock.clock()) for node in redlock.fakes[:4]] == [token] * 4
    given = {"id": headers["id"], RESERVATION: headers[RESERVATION]}
    assert deliver(charge, 1, **given)[0] == "charged"


@PRESENT
def test_duplicate_is_refused_though_one_node_names_a_third_call(
    redlock: FakeRedlock, has: Any, charge: Any, box: Box, how: str
) -> None:
    take(redlock, "other", task=charge.name)
    has(how, RESERVED)
    assert charge.delay(1).id == "other"
    assert box.messages() == []


@PRESENT
def test_holder_is_replaced_though_one_node_names_a_third_task(
    app: Celery, redlock: FakeRedlock, has: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict="replace", lock_wait=5.0)
    def task() -> str:
        return "ran"

    lease = redlock.acquire("k", owner=Owner("there", 1, task_id="holder", task="t"))

    def broadcast(_command: str, arguments: Any) -> None:
        revoked.append(arguments["digest"])
        redlock.release(lease)

    revoked: list[str] = []
    monkeypatch.setattr(app.control, "broadcast", broadcast)
    monkeypatch.setattr(HeldLease, "acquire", lambda self, wait=None: acquire(self, 0.0))
    has(how, "k")
    assert deliver(task)[0] == "ran"
    assert revoked == [token_digest(lease.token)]


@ABSENT
def test_reservation_that_one_node_lacks_keeps_a_duplicate_out(
    redlock: FakeRedlock, lacks: Any, charge: Any, box: Box, how: str
) -> None:
    take(redlock, "other", task=charge.name)
    lacks(how)
    assert charge.delay(1).id == "other"
    assert box.messages() == []


@PRESENT
def test_body_that_one_node_names_keeps_no_call_from_replacing_a_queued_one(
    redlock: FakeRedlock, has: Any, queue: Any, box: Box, how: str
) -> None:
    queued = queue("until_executed")
    has(how, "order:1", queued.claim.token)
    queued.task.apply_async((1, "second"), countdown=10)
    assert box.message().payload[0][1] == "second"


@ABSENT
def test_body_that_one_node_does_not_know_keeps_its_reservation(
    redlock: FakeRedlock, lacks: Any, queue: Any, box: Box, how: str
) -> None:
    queued = queue("until_executed")
    redlock.acquire("order:1", owner=Owner("there", 1, task_id=queued.id, task="notify"))
    lacks(how)
    assert queued.task.apply_async((1, "second"), countdown=10).id == queued.id
    assert box.messages() == []


# -- An operator's pauses and limits --------------------------------------------------------------


def a_pause(limit: int) -> str:
    return Owner("there", 1, "*", limit, stamp="somebody", task="a reason").token("0" * 32)


@PRESENT
@pytest.mark.parametrize("limit", [0, 1])
def test_pause_of_one_node_is_not_in_force(
    redlock: FakeRedlock, has: Any, how: str, limit: int
) -> None:
    for name in PAUSE_NAMES:
        has(how, name, a_pause(limit))
    found, sure = pauses.in_force(redlock)
    assert found == () and sure
    pauses.begin(redlock, "k", 60.0, "me")  # it takes no name from others
    assert [one.who for one in pauses.in_force(redlock)[0]] == ["me"]
    assert pauses.resume(redlock, "k")[0] != []
    assert pauses.in_force(redlock)[0] == ()


@ABSENT
@pytest.mark.parametrize("limit", [0, 1])
def test_pause_that_one_node_lacks_is_in_force_until_it_is_resumed(
    redlock: FakeRedlock, lacks: Any, how: str, limit: int
) -> None:
    pauses.begin(redlock, "k", 60.0, "me", limit=limit)
    lacks(how)
    (found,) = pauses.in_force(redlock)[0]
    assert pauses.limited([found], ["k"], 5) == 5 if limit == 0 else found.limit == 1
    assert 59.0 < found.left <= 60.0
    pauses.resume(redlock, "k")
    assert pauses.in_force(redlock)[0] == ()


# -- Slots, starts, kept locks and readers --------------------------------------------------------


@PRESENT
def test_slot_that_one_node_says_is_taken_is_granted(
    redlock: FakeRedlock, has: Any, how: str
) -> None:
    for name in ("k", "k#slot2"):
        has(how, name)
    leases = [redlock.acquire("k", limit=2) for _ in range(2)]
    assert {lease.resources for lease in leases} == {("k",), ("k#slot2",)}
    with pytest.raises(ResourceHeld) as refusal:
        redlock.acquire("k", limit=2)
    assert refusal.value.holder is not None
    assert (refusal.value.holder.expires_in or 0.0) <= 10.0  # and not for years


@ABSENT
def test_slots_that_one_node_says_are_free_are_not_granted_again(
    redlock: FakeRedlock, lacks: Any, how: str
) -> None:
    leases = [redlock.acquire("k", limit=2) for _ in range(2)]
    lacks(how)
    for _ in range(5):
        with pytest.raises(ResourceHeld):
            redlock.acquire("k", limit=2)
    redlock.release(leases[0])
    redlock.acquire("k", limit=2)


def start(redlock: FakeRedlock) -> None:
    taken = Start(redlock, "r", rate_of("2/m"), wait=0.0, owner=None)
    taken.acquire()
    taken.release()


@PRESENT
def test_start_that_one_node_says_is_taken_is_granted(
    redlock: FakeRedlock, has: Any, how: str
) -> None:
    for name in ("r#start", "r#start#slot2"):
        has(how, name)
    for _ in range(2):
        start(redlock)
    with pytest.raises(ResourceHeld, match="the next in"):
        start(redlock)
    redlock.clock.advance(62.0)
    start(redlock)


@ABSENT
def test_starts_that_one_node_says_are_free_are_not_granted_again(
    redlock: FakeRedlock, lacks: Any, how: str
) -> None:
    for _ in range(2):
        start(redlock)
    lacks(how)
    for _ in range(5):
        with pytest.raises(ResourceHeld) as refusal:
            start(redlock)
        assert refusal.value.holder is not None
        assert refusal.value.holder.expires_in == pytest.approx(60.0, abs=1.0)


@PRESENT
def test_kept_lock_of_one_node_delays_no_acquire(redlock: FakeRedlock, has: Any, how: str) -> None:
    has(how, "k")
    redlock.acquire("k")


@ABSENT
def test_kept_lock_that_one_node_lacks_keeps_others_out(
    redlock: FakeRedlock, lacks: Any, how: str
) -> None:
    lease = redlock.lock("k")
    lease.acquire()
    lease.keep(60.0)
    lacks(how)
    with pytest.raises(ResourceHeld):
        redlock.acquire("k")
    redlock.clock.advance(61.0)
    redlock.acquire("k")


@PRESENT
@pytest.mark.parametrize("shared", [True, False], ids=["reader", "writer"])
def test_holder_that_one_node_names_keeps_out_no_reader_and_no_writer(
    redlock: FakeRedlock, has: Any, how: str, *, shared: bool
) -> None:
    if how == "forged" and not shared:
        redlock.fakes[4].readers["k"] = {STRANGER + SHARED: redlock.clock() + EVER}
    else:
        has(how, "k", STRANGER if shared else STRANGER + SHARED)
    redlock.acquire("k", shared=shared)


@ABSENT
@pytest.mark.parametrize("shared", [True, False], ids=["reader", "writer"])
def test_reader_that_one_node_does_not_know_keeps_writers_out_and_a_writer_all(
    redlock: FakeRedlock, lacks: Any, how: str, *, shared: bool
) -> None:
    redlock.acquire("k", shared=shared)
    lacks(how)
    with pytest.raises(ResourceHeld):
        redlock.acquire("k")
    with pytest.raises(ResourceHeld) if not shared else contextlib.nullcontext():
        redlock.acquire("k", shared=True)


def test_writer_that_one_node_says_waits_keeps_no_reader_out(redlock: FakeRedlock) -> None:
    node = redlock.fakes[4]
    node.barriers["k"] = redlock.clock() + EVER, STRANGER
    node.lines["k"] = {"somebody:1": 0}
    node.listening.add("somebody")
    redlock.acquire("k", shared=True)
    redlock.acquire("k", shared=True)


@pytest.mark.parametrize("how", ["liar, held", "liar, free", "forgetful", "forged"])
def test_time_until_a_key_is_free_is_that_of_a_quorum(
    redlock: FakeRedlock, has: Any, lacks: Any, how: str
) -> None:
    """Waiters, and workers with parked deliveries, look again when it is over."""
    if how == "forged":
        has(how, "k")
    redlock.acquire("k", ttl=10.0)
    if how == "liar, held":
        has("liar", "k")
    elif how != "forged":
        lacks(how.removesuffix(", free"))
    ballot = blocking(redlock.client.peek(("k",)))
    assert outcome.room_in(ballot, [["k"]]) == pytest.approx(10.0, abs=0.01)


# -- Fencing tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["liar", "forgetful", "forged"])
def test_fencing_tokens_grow_whatever_one_node_says(
    redlock: FakeRedlock, has: Any, lacks: Any, how: str
) -> None:
    tokens: list[int] = []
    for round_ in range(6):
        lease = redlock.acquire("k", fencing=True)
        assert lease.fencing_token is not None
        tokens.append(lease.fencing_token)
        redlock.release(lease)
        if how == "forged":
            redlock.fakes[4].fences["k"] = tokens[0] + round_ * 10**9
        elif how == "forgetful":
            lacks(how)
        else:
            has(how, "k")
    assert tokens == sorted(set(tokens))


# -- Who may vote after a restart -----------------------------------------------------------------


PROMOTED = NodeInfo(run_id="a", uptime=1e6, role="master", history="f" * 40, replication="b" * 40)


@pytest.mark.parametrize("mark", ["", f"9999.000 other {'b' * 40} {'f' * 40}", "9999.000 a  "])
def test_trusted_mark_that_is_missing_or_names_another_server_gives_no_vote(mark: str) -> None:
    guard = RestartGuard(True, 30.0, lambda line: None)
    memory = guard.meet(4, replace(PROMOTED, mark=mark), 1000.0, 1000.0)
    assert guard.doubt(memory, 1000.0)
    assert not guard.doubt(memory, 1031.0)  # and no longer than any other


def test_trusted_mark_written_by_hand_gives_a_vote_to_its_own_node_alone() -> None:
    guard = RestartGuard(True, 30.0, lambda line: None)
    forged = replace(PROMOTED, mark=f"999999999999.000 {PROMOTED.memory}")
    other = replace(forged, run_id="c")  # with the same key, which is not of this server
    assert not guard.doubt(guard.meet(4, forged, 1000.0, 1000.0), 1000.0)
    assert guard.doubt(guard.meet(3, other, 1000.0, 1000.0), 1000.0)


def test_node_that_says_it_has_just_started_puts_no_try_off(redlock: FakeRedlock) -> None:
    """The liar claims it each time: it has no vote, and four are left."""
    guard = RestartGuard(True, 30.0, lambda line: None)
    started = NodeInfo(run_id="new", uptime=0.0, role="master")
    doubt = guard.doubt(guard.meet(4, started, 1000.0, 1000.0), 1000.0)
    ballot = Round(Verb.ACQUIRE, [Claim("k", STRANGER, 10.0, 5)], 1000.0, 1.0)
    ballot.answer(4, None, 1000.0, doubt or "")
    ballot.answer(0, None, 1000.0)
    ballot.close("no answer")
    assert outcome.unavailable("k", ballot, redlock.nodes).retry_after is None


# -- Ticks of beats -------------------------------------------------------------------------------


def of_both(world: World) -> None:
    """Check that each tick of both entries was sent once, and in time."""
    assert [round(at / 60, 1) for at in world.times("cron")] == [1.0, 2.0]
    assert min(gaps(world.times("every"))) >= 9.0
    assert max(gaps(world.times("every"))) < 10.6


def every_10_s_and_minutely() -> Any:
    return {**minutely(), **entry("every", 10.0)}


@PRESENT
def test_tick_that_one_node_says_is_sent_is_sent(any_kind: Worlds, how: str) -> None:
    world = any_kind(every_10_s_and_minutely)
    node, honest = world.nodes[4], world.nodes[4].execute
    if how == "liar":
        plant(node, 0.0, how, "", STRANGER)
    else:

        def execute(verb: Verb, claims: Sequence[Any], now: float) -> Any:
            if verb is Verb.ACQUIRE:
                node.held.setdefault(claims[0].resources[0], (STRANGER, now + EVER))
            return honest(verb, claims, now)

        node.execute = execute  # type: ignore[method-assign]
    world.run(125.0)
    of_both(world)


@ABSENT
def test_tick_that_one_node_does_not_know_is_not_sent_again(any_kind: Worlds, how: str) -> None:
    world = any_kind(every_10_s_and_minutely)
    world.run(1.0)
    deny(world.nodes[4], how)
    forget = world.nodes[4].forget if how == "forgetful" else None
    world.run(124.0, every=forget)
    of_both(world)
