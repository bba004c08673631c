"""Some of the canvases of test_cells.py, with their locks in one authority."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from celery_redlock.server import LocalServer
from tests.canvas.cells import CELLS, SELVES
from tests.canvas.play import SOON, Stage
from tests.canvas.tasks import POLICIES
from tests.support import stores
from tests.support.wait import wait_until

NAMES = ("group", "chord header", "chord body", "chain head", "chain middle", "chain tail", "link")
AROUND = {
    "while_executing_retry": "locked",
    "until_executed_existing": "running",
    "until_executed_replace": "queued",
}


@pytest.fixture(scope="module", params=["postgresql", pytest.param("etcd", marks=pytest.mark.slow)])
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(stores.start(request.param))
        broker = stack.enter_context(LocalServer())
        one = Stage(nodes, broker, tmp_path_factory.mktemp("canvas"), "json")
        yield stack.enter_context(one.working("-c", "48"))


@pytest.mark.parametrize(("policy", "around"), AROUND.items())
def test_canvases_over_one_authority_come_to_their_end(
    stage: Stage, policy: str, around: str
) -> None:
    cells = [(cell, around) for cell in CELLS if cell.name in NAMES]
    assert len(cells) == len(NAMES)
    wrong = []
    for play in stage.wave(policy, POLICIES[policy], [*cells, *((it, "nobody") for it in SELVES)]):
        wrong.append(play.wrong())
        play.lift()
    assert list(filter(None, wrong)) == []


def test_played_canvases_over_one_authority_leave_nothing_and_run_nothing_twice(
    stage: Stage,
) -> None:
    if not stage.played:
        pytest.skip("no canvas of this stage was asked for")
    stage.listen_everywhere()
    for play in stage.played:
        if play.other is not None and not play.replaced_other:
            assert play.other.get(timeout=SOON) == "other", play.story()
    wait_until(lambda: not stage.at_work(), SOON, "the worker has ended all it had", every=0.1)
    wait_until(lambda: not stage.left(), SOON, "no lock and no reservation is left", every=0.1)
    stage.check()
