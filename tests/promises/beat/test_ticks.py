"""Real beats, run in every way: each tick is sent once, if overdue or if its sender dies, too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign.beat.oracle import judge_ticks
from tests.support.beats import KINDS, START, Beat, Site
from tests.support.machine import by_wall_clock
from tests.support.wait import wait_until

Sites = Callable[..., Site]
TTL = 2.0
"""Seconds for which a sender's claim is held; beats start within less of each other."""
LONG = 7200.0
"""Seconds ago: a run of a crontab that is long past, in a schedule that is stale."""


def overdue(site: Site, *beats: Beat) -> None:
    """Make the entry "hourly", a crontab, overdue in all these beats."""
    for beat in beats[: 1 if site.kind != "persistent" else None]:
        site.age(beat, "hourly", LONG)


def test_overdue_crontab_is_sent_once_by_three_beats(site: Sites) -> None:
    """Beats start with stale schedules, when it is due and when another has sent it."""
    first = {}
    sites = [site(kind, entries=("hourly",), redlock_ttl=TTL) for kind in KINDS]
    for here in sites:
        overdue(here, *[here.beat(start=False) for _ in range(3)])
        here.beats[0].start()
    for here in sites:
        first[here] = here.sent("hourly")[0]
        assert first[here].pid == here.beats[0].pid
        if here.kind == "django":  # the first one has written into the database of all
            overdue(here, here.beats[1])
        for beat in here.beats[1:]:
            beat.start()
    for here in sites:
        for beat in here.beats[1:]:
            beat.started()
            if here.kind != "redbeat":  # its entries are in one place: they see by themselves
                line = beat.said("hourly (due ")
                assert "INFO" in line
                assert f" was sent by pid {first[here].pid} on " in line
        killed = here.beats[0].kill()
    wait_until(lambda: time.time() > killed + TTL + 1.2, 5.0, "no claim of a dead one is left")
    for here in sites:
        assert here.messages("hourly") == [first[here]]


@pytest.mark.parametrize(
    ("end", "within"),
    [
        ("fails", 2.0),
        pytest.param("dies", TTL + 1.0, marks=pytest.mark.slow),
        pytest.param("hangs", 2 * TTL + 1.0, marks=pytest.mark.slow),
    ],
)
def test_beat_that_cannot_send_is_replaced_by_another(site: Sites, end: str, within: float) -> None:
    """The holder of the tick fails to send it, dies or hangs; the tick is sent soon anyway."""
    sites = [site(kind, entries=("hourly",), redlock_ttl=TTL) for kind in KINDS]
    for here in sites:
        for name in ("one", "two"):
            here.beat(start=False, TEST_GATE=str(here.path / name))
        overdue(here, *here.beats)
    begun = {}
    for here in sites:
        for beat in here.beats:
            beat.start()
        sender, other = who_sends(here)
        assert here.messages("hourly") == []
        Path(other.variables["TEST_GATE"]).touch()
        begun[here] = time.time(), other
        if end == "fails":
            Path(sender.variables["TEST_GATE"]).write_text("fail", encoding="ascii")
        elif end == "dies":
            sender.kill()
    for here, (begin, other) in begun.items():
        (message,) = here.sent("hourly", timeout=within + 30.0)
        assert message.pid == other.pid or end == "fails"  # who failed may be the first to retry
        by_wall_clock(begin, message.sent, within + 0.2, "to send it in another's stead")


def who_sends(site: Site) -> tuple[Beat, Beat]:
    """Return the beat that holds the tick, and the other one, which was refused."""

    def who_waits() -> list[Beat]:
        return [beat for beat in site.beats if " is being sent by pid " in beat.text]

    (other,) = wait_until(who_waits, START, "one has been refused", every=0.02)
    (sender,) = (beat for beat in site.beats if beat is not other)
    assert "INFO" in other.said(f"is being sent by pid {sender.pid} on ")
    return sender, other


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
