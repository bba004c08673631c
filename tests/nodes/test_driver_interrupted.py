"""The driver over scripted peers, interrupted by an exception at any of its calls.

Handlers that use the driver at any of its lines are in tests/promises/lock/test_reentry.py.
"""

from __future__ import annotations

import pytest

from tests.support.peer import DEADLINE, in_thread
from tests.support.peer_world import PeerWorld, acquire, echoing, own
from tests.support.struck import struck_at_each_call
from tests.support.wait import wait_until


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
