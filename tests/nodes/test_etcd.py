"""etcd with three members: a lock outlives each of them, and nothing is held without a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule

from celery_redlock import (
    AsyncRedlock,
    ConfigurationError,
    QuorumUnavailable,
    Redlock,
    ResourceHeld,
)
from celery_redlock.beat.claims import TickClaims
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import QueueEntry
from celery_redlock.runtime.blocking import blocking
from celery_redlock.stores.etcd.address import parse
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.testing.etcd import LocalEtcd, Member
from tests.support.certificates import Authority
from tests.support.etcd import as_new, ask, require, start_etcd
from tests.support.names import Locks, Patch, Request
from tests.support.subjects import Etcd, claim
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def three() -> Iterator[LocalEtcd]:
    with start_etcd(3) as started:
        yield started


@pytest.fixture(autouse=True)
def _as_new(request: Request) -> None:
    if "three" in request.fixturenames:
        as_new(request.getfixturevalue("three"))


@pytest.fixture
def make(three: LocalEtcd, lock_over: Locks) -> Locks:
    return lambda **options: lock_over([three.url], **{"ttl": 6.0, "node_timeout": 1.0, **options})


def leader(three: LocalEtcd) -> Member:
    """Return the leader, by the status that the members report."""
    for member in three.members:
        connection = parse(f"etcd://127.0.0.1:{member.port}", "").connect(timeout=10.0)
        said = connection.ask("maintenance/status", {})
        connection.disconnect()
        if said["leader"] == said["header"]["member_id"]:
            return member
    raise AssertionError("none of them leads")


def asked(redlock: Redlock) -> int:
    """The port of the member that a lock's connection goes to."""
    redlock.connect()
    (node,) = redlock.client.driver.nodes
    assert node.connection is not None
    return int(node.connection._sock.getpeername()[1])


def taken(lock: Redlock, resource: str = "r") -> bool:
    """Return True if the lock can take a resource now; the resource is released."""
    try:
        return lock.release(lock.acquire(resource))
    except (QuorumUnavailable, ResourceHeld, ConfigurationError):
        return False


@pytest.mark.parametrize("fault", ["kill", "pause"])
@pytest.mark.parametrize("whom", ["leader", "the one that is asked"])
def test_held_lock_outlives_any_etcd_member(
    three: LocalEtcd, make: Locks, fault: str, whom: str
) -> None:
    holder, other = make(), make()
    with holder.lock("r", wait=10.0) as held:
        port = asked(holder)
        (there,) = [member for member in three.members if member.port == port]
        struck = leader(three) if whom == "leader" else there
        getattr(struck, fault)()
        until = time.monotonic() + held.remaining() + 4.0

        def extended() -> bool:
            assert not taken(other)
            return time.monotonic() + held.remaining() > until

        def told_who_has_it() -> bool:
            try:
                other.acquire("r")
            except ResourceHeld:
                return True
            except QuorumUnavailable:
                return False
            raise AssertionError("two holders")

        wait_until(extended, 20.0, "it was extended")
        wait_until(told_who_has_it, 20.0, "the other is told who has it")
        assert not held.lost
        assert held.remaining() > 0
    wait_until(lambda: taken(other), 10.0, "the other has it once it is free")


def test_request_to_a_hanging_etcd_member_is_answered_by_another(
    three: LocalEtcd, make: Locks
) -> None:
    """A minority costs only the second in which it is found; no client has to try again."""
    held = make(ttl=60.0).acquire("held", wait=10.0)
    for _ in range(8):
        redlock = make(ttl=30.0, node_timeout=0.25)
        port = asked(redlock)
        (there,) = [member for member in three.members if member.port == port]
        if there is leader(three):
            continue  # without one nothing is granted for a second or two
        there.pause()
        try:
            redlock.release(redlock.acquire("r", wait=0.0))
            with pytest.raises(ResourceHeld):
                redlock.acquire(held.resource, wait=0.0)
            return
        except QuorumUnavailable:
            pass  # on a busy machine they elect another now and then; in a row they do not
        finally:
            there.resume()
    pytest.fail("whoever asked a member that hung was answered by none")


@pytest.mark.parametrize("then", ["it hangs", "it dies", "in a loop"])
def test_release_lost_by_an_etcd_member_goes_to_another_by_itself(
    three: LocalEtcd, make: Locks, then: str
) -> None:
    """The release is the last request of this process, and the key would be locked for a ttl."""
    freed = partial(taken, make(ttl=60.0))

    def hang(port: int) -> Member:
        (there,) = [member for member in three.members if member.port == port]
        there.pause()
        return there

    if then == "in a loop":

        async def main() -> None:
            async with AsyncRedlock([three.url], ttl=60.0, node_timeout=0.5) as redlock:
                async with redlock.lock("r"):
                    (node,) = redlock.client.driver.nodes
                    hang(node.connection._sock.getpeername()[1])  # type: ignore[union-attr]
                assert await asyncio.to_thread(wait_until, freed, 15.0, "another has it")

        asyncio.run(main())
        return
    holder = make(ttl=60.0)
    lease = holder.acquire("r")
    there = hang(asked(holder))
    holder.release(lease)
    if then == "it dies":
        there.kill()
    wait_until(freed, 15.0, "another has it")


def test_etcd_lock_without_a_majority_is_lost_at_its_deadline(
    three: LocalEtcd, make: Locks
) -> None:
    redlock = make(ttl=3.0, node_timeout=0.3)
    held = redlock.lock("r")
    held.acquire()
    for member in three.members[:2]:
        member.pause()
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("other")
    wait_until(lambda: held.lost, 10.0, "it is known to be lost")
    assert held.remaining() <= 0
    three.resume()
    other = make()

    wait_until(lambda: taken(other), 20.0, "it is free once its ttl is over there, too")
    assert not held.release()


def test_etcd_lock_released_during_an_outage_is_free_when_it_ends(
    three: LocalEtcd, make: Locks
) -> None:
    """The length of the outage does not matter: with a new leader its lease starts over."""
    holder, other = make(ttl=60.0), make(ttl=60.0)
    held = holder.lock("r")
    held.acquire()
    three.kill()
    assert held.claim is not None
    held.claim.ttl = 0.0  # as if it had taken a minute
    held.release()
    three.start()

    wait_until(lambda: taken(other), 20.0, "it is free")


def test_etcd_fencing_number_grows_with_each_grant_and_stays_for_a_retry(etcd: Etcd) -> None:
    etcd.flush()
    numbers = []
    for token in ("one", "other", "third"):
        mine = fenced(token)
        numbers.append(etcd.ask(Verb.ACQUIRE, mine))
        assert etcd.ask(Verb.ACQUIRE, fenced(token)) == numbers[-1] == etcd.fence("r")
        etcd.ask(Verb.EXTEND, mine)
        assert etcd.fence("r") == numbers[-1]
        assert etcd.ask(Verb.ACQUIRE, fenced("theirs")) == token
        etcd.ask(Verb.RELEASE, mine)
    assert numbers == sorted(set(numbers))


def fenced(token: str) -> Claim:
    """Return a claim that takes any number, as that of every holder does."""
    new = claim(token)
    new.proposal = 0
    return new


@pytest.mark.parametrize(("ttl", "seconds"), [(0.3, 2), (2.5, 3), (7.0, 7), (30.0, 32)])
def test_etcd_key_lives_as_long_as_its_holder_counts_and_little_longer(
    etcd: Etcd, ttl: float, seconds: int
) -> None:
    etcd.flush()
    etcd.ask(Verb.ACQUIRE, claim("mine", "r", ttl))
    said = ask(etcd.server, "lease/timetolive", ID=etcd.get("r")["lease"])
    assert int(said["grantedTTL"]) == seconds
    # From it a beat concludes whether a tick was sent.
    assert etcd.ask(Verb.PEEK, claim("x"))[1] < ttl


def test_etcd_extension_uses_a_lease_of_its_own(etcd: Etcd) -> None:
    """A stopped leader that wakes would answer lease/keepalive from its memory."""
    etcd.flush()
    mine = claim("mine", ttl=1.0)
    etcd.ask(Verb.ACQUIRE, mine)
    before = etcd.get("r")
    assert etcd.ask(Verb.EXTEND, mine) == "1"
    after = etcd.get("r")
    assert after["lease"] != before["lease"]
    assert after["create_revision"] == before["create_revision"]


def leases(etcd: Etcd) -> int:
    return len(ask(etcd.server, "lease/leases").get("leases", ()))


def test_many_etcd_locks_share_few_leases(etcd: Etcd, lock_over: Locks, monkeypatch: Patch) -> None:
    """A lease lasts to the end of its lock, say an hour.

    Locks within a sixteenth of it share one.
    """
    etcd.flush()
    lock, other = (lock_over([etcd.server.url], ttl=3600.0) for _ in range(2))
    before = leases(etcd)
    for number in range(100):
        lease = lock.acquire(f"r{number}")
        assert other.try_acquire(f"r{number}") is None
        lock.extend(lease)
        lock.release(lease)
    assert leases(etcd) <= before + 2
    first = lock.acquire("r")
    told = ask(etcd.server, "lease/timetolive", ID=etcd.get("r")["lease"])
    assert int(told["TTL"]) >= 3600  # counted from now on, whenever it was granted
    assert lock.release(first)


def test_shared_etcd_lease_revoked_by_hand_costs_one_attempt(etcd: Etcd, lock_over: Locks) -> None:
    etcd.flush()
    lock = lock_over([etcd.server.url], ttl=60.0)
    lock.acquire("a")
    ask(etcd.server, "lease/revoke", ID=etcd.get("a")["lease"])
    assert lock.release(lock.acquire("b", wait=5.0))


def test_etcd_lease_id_that_another_has_is_not_counted_on(
    etcd: Etcd, lock_over: Locks, monkeypatch: Patch
) -> None:
    """Ids are random, and the other's lease may be about to end."""
    etcd.flush()
    one, other = lock_over([etcd.server.url]), lock_over([etcd.server.url])
    with monkeypatch.context() as drawn:
        drawn.setattr("celery_redlock.stores.etcd.node.secrets.randbits", lambda _: 7)
        one.acquire("a")
        with pytest.raises(QuorumUnavailable):
            other.acquire("b")
    wait_until(lambda: taken(other, "b"), 10.0, "it has another, and the first attempt is undone")


def test_supervisor_renewal_does_not_shorten_a_longer_etcd_key(etcd: Etcd) -> None:
    etcd.flush()
    etcd.ask(Verb.ACQUIRE, claim("mine", ttl=5.0))
    assert etcd.ask(Verb.EXTEND, claim("mine", ttl=500.0)) == "1"
    longer = etcd.get("r")["lease"]
    assert etcd.ask(Verb.RENEW, claim("mine", ttl=5.0)) == "1"
    assert etcd.get("r")["lease"] == longer
    short = claim("mine", ttl=900.0)
    short.below = 5.0
    assert etcd.ask(Verb.RENEW, short) == "1"
    assert etcd.get("r")["lease"] == longer


def test_hundred_names_and_many_claims_fit_into_etcd_transactions(etcd: Etcd) -> None:
    etcd.flush()
    many = claim("mine", tuple(f"n{n:03}" for n in range(100)))
    assert etcd.ask(Verb.ACQUIRE, many) is None
    assert etcd.ask(Verb.ACQUIRE, claim("other", many.resources)) == "mine"
    assert etcd.ask(Verb.ACQUIRE, many) is None  # its own retry
    one = claim("mine", "one")
    etcd.ask(Verb.ACQUIRE, one)
    for verb in (Verb.EXTEND, Verb.RENEW):
        assert etcd.ask(verb, many, one, many) == "111"
    assert etcd.ask(Verb.PEEK, many)[0] == "mine"
    for verb in (Verb.ENQUEUE, Verb.HAND_ON, Verb.DEQUEUE):
        entry: Any = QueueEntry(many.resources, 1, "redlock:p:1", 1)
        assert etcd.ask(verb, entry) is (verb is not Verb.DEQUEUE)
    many.mark = ("id#done", 60.0)
    assert etcd.ask(Verb.RELEASE, many) is True
    assert etcd.get("id#done") is not None


def test_beat_over_etcd_is_not_kept_from_its_next_tick_by_its_own_last_one(
    etcd: Etcd, lock_over: Locks
) -> None:
    """The key lives on for a second or more; the beat that sent the tick releases it in time."""
    etcd.flush()
    app = Celery("ticks", set_as_current=False)
    entry = ScheduleEntry("tick", "tick", datetime.now(), schedule=schedule(1.4, app=app), app=app)
    one, other = (TickClaims(app, lock_over([etcd.server.url]), "hold") for _ in range(2))
    for _ in range(2):
        look = one.decide(entry, 0.5)
        look = look if look.send else one.decide(entry, 0.5)
        assert look.send and look.claim is not None
        sent, claim = time.monotonic(), look.claim
        claim.finish(sent=True)
        assert not one.decide(entry, 0.5).send and claim.kept > sent + 1.0
        assert not other.decide(entry, 0.5).send
        wait_until(lambda at=claim.kept: time.monotonic() >= at, 5.0, "the next is due")


def test_invalid_etcd_url_is_refused_at_once() -> None:
    for nodes, why in (
        (["etcd://one:2379", "redis://two"], "mixes Redis with etcd"),
        (["etcd://one:2379", "postgresql://two"], "mixes PostgreSQL with etcd"),
        (["etcd://one:2379", "etcd://two:2379"], "names 2 etcd clusters"),
        (["etcd://one:2379,one:2379"], "names a member twice"),
        (["etcd://one:2379/db"], "etcd has no databases"),
        (["etcd://one:port"], "its members cannot be understood"),
        (["etcd://"], "its members cannot be understood"),
        (["etcd://one?ca=x"], "'ca' is no option of an etcd:// URL"),
        (["etcds://one?ca=/nowhere"], "its certificates cannot be read"),
        (["etcds://one?verify=false"], "verify is yes or no, not 'false'"),
        (["etcds://one?key=/some"], "it names a key without the cert"),
        (["etcd://one:0"], "its members cannot be understood"),
        (["etcd://one#x"], "its members cannot be understood"),
        (["etcd://u:SEC@RET@one"], "its members cannot be understood"),
        (["mongo://one"], "is none of redis.*etcd"),
    ):
        with pytest.raises(ConfigurationError, match=why) as error:
            parse_nodes(nodes)
        assert "SEC" not in str(error.value) and "RET" not in str(error.value)
    (address,) = parse_nodes(["etcd://me:s%40cret@one,two:4001"])
    assert address.name == "one:2379,two:4001"
    assert "s@cret" not in repr(address)


def test_untrusted_etcd_certificate_is_refused_over_tls(tmp_path: Path, lock_over: Locks) -> None:
    require()
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    cert, key = authority.sign("etcd", "IP:127.0.0.1")
    cluster = LocalEtcd()
    (member,) = cluster.members
    secure = f"https://127.0.0.1:{member.port}"
    member.options = [f"--listen-client-urls={secure}", f"--advertise-client-urls={secure}"]
    member.options += [f"--cert-file={cert}", f"--key-file={key}"]
    try:
        member.start()
        redlock = lock_over([f"etcds://127.0.0.1:{member.port}?ca={authority.ca}"])

        def works() -> bool:
            try:
                return redlock.release(redlock.extend(redlock.acquire("r")))
            except QuorumUnavailable:
                return False

        wait_until(works, 30.0, "it serves")
        for url in (
            f"etcds://127.0.0.1:{member.port}?ca={other.ca}",
            f"etcds://127.0.0.1:{member.port}",
            f"etcd://127.0.0.1:{member.port}",
        ):
            with pytest.raises(QuorumUnavailable):
                lock_over([url]).acquire("r")
    finally:
        cluster.stop()


@pytest.fixture
def only_when_notified(monkeypatch: Patch) -> None:
    """A waiter that is not notified does not try; and a process falls silent soon."""
    monkeypatch.setattr("celery_redlock.locking.acquisition.LOOK_AFTER_S", (60.0, 60.0))
    monkeypatch.setattr("celery_redlock.stores.etcd.subscription.LISTENS_S", 1)


def listening_without_a_break(client: Any) -> Any:
    """Return the subscription of a process; it changes if etcd has given the process up."""
    wait_until(lambda: client.wakeup._subscriptions, 10, "it is subscribed")
    return client.wakeup._subscriptions[0]


@pytest.mark.usefixtures("only_when_notified")
def test_thread_that_waits_for_long_in_etcd_goes_on_listening(make: Locks) -> None:
    holder, redlock = make(ttl=60.0), make(ttl=60.0)
    lease = holder.acquire("r")
    granted: list[float] = []

    def wait() -> None:
        redlock.release(redlock.acquire("r", wait=60.0))
        granted.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    subscription = listening_without_a_break(redlock.client)
    time.sleep(4.0)  # several times as long as etcd listens to no word
    assert redlock.client.wakeup._subscriptions.get(0) is subscription
    assert not granted
    released = time.monotonic()
    holder.release(lease)
    thread.join(20)
    assert granted[0] - released < 5.0


def test_process_that_etcd_has_given_up_listens_again_at_the_next_wait(
    make: Locks, monkeypatch: Patch
) -> None:
    """No thread says that it still listens while nobody waits."""
    monkeypatch.setattr("celery_redlock.stores.etcd.subscription.LISTENS_S", 1)
    redlock = make()
    with redlock.client.wakeup.waiter():
        first = listening_without_a_break(redlock.client)
    time.sleep(3.0)
    with redlock.client.wakeup.waiter() as waiter:

        def again() -> bool:
            waiter.forget()
            blocking(waiter.wait(0.05))
            return waiter.is_subscribed and redlock.client.wakeup._subscriptions[0] is not first

        wait_until(again, 10, "it listens again")
