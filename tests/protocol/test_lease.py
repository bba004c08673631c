"""The arithmetic of a lease: per node, send time plus ttl; the q-th largest, less the drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.protocol.claim import Claim, acknowledged
from celery_redlock.protocol.errors import LeaseLost
from celery_redlock.protocol.lease import Lease, drift
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import Holder, Owner, quorum_of, token_digest
from celery_redlock.testing.fakes import FakeNode
from tests.support.clock import FakeClock


def claim_of(*sent: float, granted: float | None = None) -> Claim:
    """A claim which so many nodes acknowledged, to requests of these times."""
    claim = Claim("r", "t", 10.0, 3)
    for node, at in enumerate(sent):
        claim.acknowledged(node, at, at)
    if granted is not None:
        assert claim.grant(granted)
    return claim


# -- The deadline


def test_lease_is_not_granted_without_a_quorum_or_time_left() -> None:
    alone = claim_of(100.0)
    assert not alone.grant(100.0)
    assert not alone.held(100.0)
    # Redis page: "the lock is considered acquired" only if the elapsed time is less than the ttl.
    assert not claim_of(100.0, 100.0).grant(109.898)
    assert claim_of(100.0, 100.0).grant(109.897)


def test_deadline_moves_only_by_a_quorum_of_newer_requests() -> None:
    claim = claim_of(100.0, 100.0, 100.0, granted=100.0)
    for node, sent, deadline in (
        (0, 98.0, 109.898),  # an answer to an older request moves nothing
        (1, 105.0, 109.898),  # nor does a minority
        (2, 105.0, 114.898),
        (0, 106.0, 114.898),  # a straggler
    ):
        claim.acknowledged(node, sent, 107.0)
        assert claim.deadline == pytest.approx(deadline)
    assert claim.expiries == [116.0, 115.0, 115.0]


FACTS: list[Callable[[Claim], object]] = [
    *(lambda claim: claim.expiries, lambda claim: claim.deadline, lambda claim: claim.lost),
    Claim.acknowledgements,
]
STATES = ("held", "pending", "lost", "forgotten", "kept", "locked for longer")


def claim_after(ttl: float, answers: list[tuple[int, int]], state: str) -> Claim:
    claim = Claim("r", "t", ttl, 3)
    for node in range(3):
        claim.acknowledged(node, 0.0, 0.0)
    if state != "pending":
        assert claim.grant(0.0)
    for node, at in answers:
        claim.acknowledged(node, float(at), float(at))
    if state == "lost":
        claim.lose("max_lifetime")
    if state == "forgotten":
        claim.forgotten(0, 0.0)
    if state == "kept":
        claim.kept = lambda: [20.0, 21.0, 22.0]
    if state == "locked for longer":
        claim.ttl = 3600.0
    return claim


@pytest.mark.parametrize("takes", [1.0, 5.0, 25.0])
def test_claims_acknowledged_together_equal_claims_acknowledged_alone(takes: float) -> None:
    histories = list(product((10.0, 12.0), ([], [(0, 2)], [(0, 2), (1, 3)]), STATES))
    for first, second in product(histories, repeat=2):
        together = [claim_after(*first), claim_after(*second)]
        alone = [claim_after(*first), claim_after(*second)]
        for node in (2, 0, 1):
            acknowledged(together, node, 6.0, 6.0 + takes)
            for claim in alone:
                claim.acknowledged(node, 6.0, 6.0 + takes)
            assert [list(map(of, together)) for of in FACTS] == [
                list(map(of, alone)) for of in FACTS
            ]


# -- Its end


def test_lease_is_over_at_its_deadline_itself() -> None:
    claim = claim_of(100.0, 100.0, granted=100.0)
    assert claim.held(math.nextafter(claim.deadline, 0.0))
    assert not claim.held(claim.deadline)
    assert claim.lost == "expired"


@pytest.mark.parametrize(("node", "now"), [(0, 110.5), (2, 106.0)])
def test_missing_token_on_a_node_that_need_not_have_it_is_no_amnesia(node: int, now: float) -> None:
    """The key had expired there, or was never set."""
    claim = claim_of(100.0, 105.0, granted=105.0) if node else claim_of(100.0, 105.0, 105.0)
    assert claim.granted_at is not None or claim.grant(105.0)
    assert not claim.forgotten(node, now)
    assert claim.held(now)


# -- Drift


def test_drift_covers_clocks_at_the_extremes_of_their_rates() -> None:
    """The holder's clock half a percent slow, the nodes' half a percent fast; whole milliseconds.

    Random worlds do not find a missing allowance as an overlap: this does.
    """
    for ttl in (0.02, 0.1, 1.0, 10.0, 3600.0):
        for begun in (0.0, 0.000999):  # the node's millisecond had begun before the request came
            node, clock_of = FakeNode(), lambda true: 5.0 + 1.005 * true
            claim = Claim("r", "t", ttl, 1)
            node.execute(Verb.ACQUIRE, [claim], clock_of(0.0) + begun)
            claim.acknowledged(0, 0.0, 0.0)
            assert claim.grant(0.0)
            still_held = math.nextafter(claim.deadline, 0.0) / 0.995  # true time
            assert claim.held(math.nextafter(claim.deadline, 0.0))
            assert node.token("r", clock_of(still_held) + begun) == "t", ttl


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(0.0, 30.0), st.floats(0.0, 5.0), st.booleans()),
        max_size=40,
    ),
    st.integers(1, 5),
)
def test_held_means_that_a_quorum_cannot_have_dropped_the_lease(
    events: list[tuple[int, float, float, bool]], nodes: int
) -> None:
    """An independent account of the rule, for any answers of the nodes in any order."""
    claim, ttl = Claim("r", "t", 10.0, nodes), 10.0
    clock, over = 0.0, False
    account: dict[int, float] = {}
    for node, age, wait, confirmed in events:
        node %= nodes
        clock += wait
        alive = sorted(account.values(), reverse=True)[: quorum_of(nodes)]
        until = alive[-1] - drift(ttl) if len(alive) == quorum_of(nodes) else -math.inf
        if claim.granted_at is not None and clock >= until:
            over = True
        assert claim.held(clock) is (claim.granted_at is not None and not over)
        if confirmed:
            sent = max(0.0, clock - age)
            claim.acknowledged(node, sent, clock)
            if not over:
                account[node] = max(account.get(node, 0.0), sent + ttl)
        else:
            claim.forgotten(node, clock)
            account.pop(node, None)
        if claim.granted_at is None:
            claim.grant(clock)


# -- The value


def test_lease_returns_its_remaining_time() -> None:
    clock = FakeClock(100.0)
    lease = Lease("r", "secret", 10.0, 109.0, clock)
    assert lease.remaining() == 9.0
    assert lease.remaining(105.0) == 4.0
    assert lease.remaining(110.0) == 0.0
    lease.ensure(8.0)
    with pytest.raises(LeaseLost, match=r"9\.000 s are left"):
        lease.ensure(9.0)
    clock.advance(9.0)
    assert lease.lost
    with pytest.raises(LeaseLost) as raised:
        lease.ensure()
    assert raised.value.lease is lease
    assert raised.value.resource == "r"


def test_repr_of_lease_and_holder_shows_no_token() -> None:
    lease = Lease("r", "host|secret", 10.0, 109.0, FakeClock())
    assert "secret" not in repr(lease)
    holder = Holder("r", Owner("h", 1), 2, 2, None, token_digest("host|secret"))
    assert "secret" not in repr(holder) + str(holder)
    assert holder.digest == token_digest("host|secret") != token_digest("host|other")


# -- What another process was acknowledged

NOW = 100.0


def held_on(nodes: int) -> Claim:
    claim = Claim("r", "t", 10.0, nodes)
    for node in range(nodes):
        claim.acknowledged(node, NOW, NOW)
    assert claim.grant(NOW)
    return claim


def test_expiry_from_the_supervisor_after_a_loss_is_ignored() -> None:
    claim = held_on(5)
    claim.kept = lambda: ()
    assert not claim.held(NOW + 10.0)
    claim.kept = lambda: [NOW + 30.0] * 5
    assert not claim.held(NOW + 11.0)


@pytest.mark.parametrize("own", [0, 1])
def test_minority_confirmed_by_the_supervisor_needs_a_node_of_the_holder(own: int) -> None:
    claim = held_on(5)
    for node in range(own):
        claim.acknowledged(node, NOW + 5.0, NOW + 5.0)
    claim.kept = lambda: [-math.inf, NOW + 15.0, NOW + 15.0, -math.inf, -math.inf]
    assert claim.held(NOW + 11.0) is bool(own)


def test_node_that_forgot_a_lease_after_the_supervisor_saw_it_counts_no_more() -> None:
    claim = held_on(3)
    kept = [NOW + 12.0] * 3
    claim.kept = lambda: kept
    assert claim.forgotten(0, NOW + 5.0)
    assert claim.held(NOW + 11.0)
    assert claim.forgotten(1, NOW + 11.0)
    assert claim.lost == "refused"


def test_extension_after_a_pause_that_the_supervisor_bridged_counts() -> None:
    claim = held_on(3)
    claim.kept = lambda: [NOW + 20.0] * 3
    claim.acknowledged(0, NOW + 15.0, NOW + 15.0)
    assert claim.lost is None
    claim.acknowledged(1, NOW + 15.0, NOW + 15.0)
    assert claim.deadline == pytest.approx(NOW + 25.0 - drift(10.0))


def test_expiry_learnt_from_another_process_is_not_passed_back() -> None:
    """If two processes passed on what they learn, one might know that a node has forgotten."""
    holder, keeper = held_on(3), Claim("r", "t", 10.0, 3)
    keeper.granted_at = NOW
    keeper.learn(holder.acknowledgements())
    assert holder.forgotten(0, NOW + 5.0)
    keeper.acknowledged(1, NOW + 6.0, NOW + 6.0)
    assert keeper.acknowledgements() == [-math.inf, NOW + 16.0, -math.inf]
    holder.learn(keeper.acknowledgements())
    assert holder.held(NOW + 9.0)
    assert holder.forgotten(2, NOW + 9.0)
    assert holder.lost == "refused"


def test_expiry_learnt_from_the_extender_shortens_none_that_was_confirmed_here() -> None:
    """The extender knows less of a node than this process learnt itself."""
    mine = Claim("r", "mine", 10.0, 3)
    for index in range(3):
        mine.acknowledged(index, NOW, NOW)
    assert mine.grant(NOW)
    assert mine.learn([NOW + 5.0] * 3)
    assert mine.expiries == [NOW + 10.0] * 3
    assert mine.deadline == pytest.approx(NOW + 10.0 - drift(10.0))
