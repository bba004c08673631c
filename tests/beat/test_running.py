"""The ways to run beats and to set them up, a few at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from celery_redlock.server import LocalServer
from tests.beat.oracle import judge_ticks
from tests.support.beats import Site
from tests.support.machine import by_wall_clock
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
        heard = r"HEARD: tick \S+ beat:\S+:tick:tests.beat.tick:\S+ tests.beat.tick beat$"
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


def test_beats_without_a_quorum_hold_or_send_by_their_setting(
    site: Sites, servers: list[LocalServer]
) -> None:
    """ "hold": nothing is sent; "send": everything, by all. Both say so, once a minute."""
    held = site("persistent", entries=("tick",))
    sent = site("django", entries=("tick",), redlock_beat_on_unavailable="send")
    for here in (held, sent):
        for beat in [here.beat(), here.beat()]:
            beat.started()
    for here in (held, sent):
        here.sent("tick", 2)
    for node in servers[:3]:
        node.pause()
    begin = time.time()

    def each_has_sent() -> bool:
        meanwhile = [m.pid for m in sent.messages("tick") if m.sent > begin + 1.0]
        return all(meanwhile.count(beat.pid) >= 2 for beat in sent.beats)

    wait_until(lambda: time.time() > begin + 4.0, 30.0, "four seconds", every=0.05)
    wait_until(each_has_sent, 30.0, "each beat sends without a quorum", every=0.05)
    end = time.time()
    for node in servers[:3]:
        node.resume()
    assert [m for m in held.messages("tick") if begin + 0.5 < m.sent < end] == []
    wait_until(
        lambda: held.messages("tick")[-1].sent > end, 30.0, "the overdue tick is sent", every=0.05
    )
    overdue = next(message.sent for message in held.messages("tick") if message.sent > end)
    by_wall_clock(end, overdue, 3.0, "to send the overdue tick")
    for here, words in ((held, "held back until"), (sent, "sent without a claim, by every beat")):
        for beat in here.beats:
            lines = [line for line in beat.text.splitlines() if "no quorum for" in line]
            assert len(lines) == 1
            assert "ERROR" in lines[0]
            assert words in lines[0]
            beat.said("a quorum answers again")
