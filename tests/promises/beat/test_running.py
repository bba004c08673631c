"""The ways to run beats and to set them up, a few at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tests.campaign.beat.oracle import judge_ticks
from tests.support.beats import Site
from tests.support.wait import wait_until

Sites = Callable[..., Site]


def test_every_way_to_run_a_beat_shares_the_ticks(site: Sites) -> None:
    """`celery beat`, `celery worker -B` and a thread in a script, side by side, then one less.

    Nothing is set but the broker, a Redis.
    """
    here = site(entries=("tick",), redlock_beat="absent", redlock_nodes="absent")
    beats = [here.beat(way=way) for way in ("beat", "worker", "thread")]
    for beat in beats:
        beat.started()
    here.sent("tick", 2)
    begin = time.time()

    def known_to_each_other() -> bool:
        said = [bool(re.search(r"tick .* (was|is being) sent by pid", b.text)) for b in beats]
        # The signal, too: each has found a tick that another had sent.
        task = "tests.promises.beat.tick"
        heard = rf"HEARD: tick \S+ beat:\S+:tick:{task}:\S+ {task} beat$"
        said += [bool(re.search(heard, b.text, re.M)) for b in beats]
        return all(said) and time.time() > begin + 3.0

    wait_until(known_to_each_other, 60.0, "each has been refused", every=0.05)
    killed = time.time()
    beats[0].kill()
    wait_until(lambda: time.time() > killed + 2.0, 5.0, "two more seconds", every=0.05)
    verdict = judge_ticks(here.messages("tick"), [], begin, time.time())
    left_out = [problem for problem in verdict.problems if "left out" in problem]
    assert verdict.problems == left_out and verdict.count >= 3
    # The one that the killed beat was about to send, and no other.
    seconds = [int(re.findall(r"\((\d+)\)$", problem)[0]) for problem in left_out]
    assert all(abs(second - killed) <= 1.0 for second in seconds) and len(seconds) <= 1, left_out
