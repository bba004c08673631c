"""Canvas never hangs: whatever is published, however it is locked, comes to an end.

All canvases of a policy are under way together, each with a key of its own. `make test` looks at
some combinations of broker, serializer and policy; `-m slow` at all.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import psutil
import pytest
from celery.exceptions import TaskRevokedError

from celery_redlock.server import start_servers
from tests.promises.canvas.cells import CELLS, SELVES, Self
from tests.promises.canvas.play import AROUND, SOON, Stage
from tests.promises.canvas.tasks import POLICIES, Policy
from tests.support.brokers import ACKS, HAS_QUORUM_QUEUES, QUORUM
from tests.support.nodes import with_acl_user
from tests.support.wait import wait_until

STAGES = [
    *itertools.product(("redis", "classic"), ("json", "pickle"), ("early",)),
    *itertools.product(("redis", "classic"), ("json",), ("late",)),
    *itertools.product(QUORUM, ("json",), ACKS),
]
"""Broker, serializer, and when messages are acknowledged."""
Where = tuple[str, str, str]
SLOTS = "48"
"""More than there are cells: in each of them one body may hold a slot, until it is looked at."""
USUAL = {
    ("redis", "json", "early", "while_executing_retry"): ("locked",),
    ("redis", "json", "early", "until_executed_existing"): ("running",),
    ("classic", "pickle", "early", "until_executed_replace"): ("queued",),
    ("classic", "pickle", "early", "until_expired_skip"): ("done",),
}
"""Cases of `make test`, besides canvases with duplicates of their own: two policies a broker.

In eager mode all cases are played.
"""


EVERY = [*itertools.product(CELLS, AROUND), *((cell, "nobody") for cell in SELVES)]


def wanted(arounds: Iterable[str]) -> list[tuple[Any, str]]:
    return [(cell, around) for cell, around in EVERY if isinstance(cell, Self) or around in arounds]


def usual_rows() -> list[Any]:
    return [
        pytest.param(
            (broker, serializer, acks),
            POLICIES[policy],
            cell,
            around,
            id=f"{broker}-{serializer}-{acks}-{policy}-{cell.name}-{around}",
        )
        for (broker, serializer, acks, policy), arounds in USUAL.items()
        for cell, around in wanted(arounds)
    ]


@pytest.fixture(scope="module")
def stages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Where], Stage]]:
    """The stages, each begun when it is first asked for."""
    begun: dict[Where, Stage] = {}
    with contextlib.ExitStack() as stack:

        def stage(which: Where) -> Stage:
            if which not in begun:
                kind, serializer, acks = which
                if kind in QUORUM and not HAS_QUORUM_QUEUES:
                    pytest.skip("Celery 5.4 cannot use quorum queues")
                url = "" if kind == "redis" else request.getfixturevalue("rabbitmq")
                servers = stack.enter_context(start_servers(6, config=with_acl_user()))
                path = tmp_path_factory.mktemp("canvas")
                one = Stage(servers[:5], servers[5], path, serializer, url, kind, acks)
                begun[which] = stack.enter_context(one.working("-c", SLOTS))
            return begun[which]

        yield stage


@pytest.fixture
def stage(request: pytest.FixtureRequest, stages: Callable[[Where], Stage]) -> Stage:
    return stages(request.node.callspec.params["where"])


@pytest.mark.parametrize(("where", "policy", "cell", "around"), usual_rows())
def test_canvas_comes_to_its_end(
    stage: Stage, where: Where, policy: Policy, cell: Any, around: str
) -> None:
    plays = stage.wave(policy.name, policy, wanted(USUAL[(*where, policy.name)]))
    (play,) = (play for play in plays if (play.cell, play.around) == (cell, around))
    wrong = play.wrong()
    assert not wrong, wrong  # as a message: what pytest shows of a comparison is cut
    play.lift()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("where", STAGES, ids="-".join)
def test_every_canvas_of_a_policy_comes_to_its_end(
    stage: Stage, where: Where, policy: Policy
) -> None:
    wrong = []
    for play in stage.wave(f"every {policy.name}", policy, EVERY):
        wrong.append(play.wrong())
        play.lift()
    assert list(filter(None, wrong)) == []


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(
            stage,
            id="-".join(stage),
            marks=() if any(stage == usual[:3] for usual in USUAL) else pytest.mark.slow,
        )
        for stage in STAGES
    ],
)
def test_played_canvases_leave_nothing_and_run_nothing_twice(stage: Stage, where: Where) -> None:
    if not stage.played:
        pytest.skip("no canvas of this stage was asked for")
    stage.listen_everywhere()
    for play in stage.played:
        if play.other is None:
            continue
        if play.replaced_other:
            with pytest.raises(TaskRevokedError):
                play.other.get(timeout=SOON)
        else:
            assert play.other.get(timeout=SOON) == "other", play.story()
    wait_until(lambda: not stage.at_work(), SOON, "the worker has ended all it had", every=0.1)
    wait_until(lambda: not stage.left(), SOON, "no lock and no reservation is left", every=0.1)
    stage.check()


def test_rabbitmq_of_the_tests_listens_on_the_loopback_only(rabbitmq: str) -> None:
    """A program that reaches Erlang's port, and has its cookie, can run code here."""
    listening = {
        (process.name(), connection.laddr)
        for process in psutil.Process().children(recursive=True)
        if process.name() in ("epmd", "beam.smp")
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {name for name, _address in listening} == {"epmd", "beam.smp"}
    assert all(ipaddress.ip_address(address.ip).is_loopback for _name, address in listening)
