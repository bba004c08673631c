"""A tick that is overdue, that cannot be sent, whose sender dies: sent once, by whoever can."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.beat.harness import KINDS, Beat, Site
from tests.support import wait_until

pytestmark = pytest.mark.worker

Sites = Callable[..., Site]
TTL = 1.5
"""Seconds a claim is held for one who is sending; beats start within less of each other."""
LONG = 7200.0
"""Seconds ago: a run of a crontab that is long past, in a schedule that is stale."""


def overdue(site: Site, *beats: Beat) -> None:
    """The entry "hourly", a crontab, is overdue in all these beats."""
    for beat in beats[: 1 if site.kind != "persistent" else None]:
        site.age(beat, "hourly", LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overdue_crontab_is_sent_once(site: Sites, kind: str) -> None:
    """Beats start with stale schedules, when it is due and when another has sent it."""
    here = site(kind, entries=("hourly",), redlock_ttl=TTL)
    beats = [here.beat(start=False) for _ in range(3)]
    overdue(here, *beats)
    beats[0].start()
    first = here.sent("hourly")[0]
    assert first.pid == beats[0].pid
    if kind == "django":  # the first one has written into the database, which is theirs as well
        overdue(here, beats[1])
    for beat in beats[1:]:
        beat.start()
    for beat in beats[1:]:
        beat.started()
        if kind != "redbeat":  # its entries are in one place: they see by themselves
            line = beat.said("hourly (due ")
            assert "INFO" in line
            assert f" was sent by pid {first.pid} on " in line
    killed = beats[0].kill()
    wait_until(lambda: time.time() > killed + TTL + 1.2, 5.0, "no claim of a dead one is left")
    assert here.messages("hourly") == [first]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("end", "within"),
    [("fails", 2.0), ("dies", TTL + 1.0), ("hangs", 2 * TTL + 1.0)],
)
def test_who_cannot_send_is_replaced(
    site: Sites, kind: str, end: str, within: float, tmp_path: Path
) -> None:
    """Who holds the tick fails to send it, or dies, or hangs: it is sent all the same, soon."""
    here = site(kind, entries=("hourly",), redlock_ttl=TTL)
    gates = {}
    for name in ("one", "two"):
        beat = here.beat(start=False, TEST_GATE=str(tmp_path / name))
        gates[beat] = tmp_path / name
    overdue(here, *here.beats)
    for beat in here.beats:
        beat.start()
    for beat in here.beats:
        beat.started()

    def who_waits() -> list[Beat]:
        return [beat for beat in here.beats if " is being sent by pid " in beat.text]

    (other,) = wait_until(who_waits, 10.0, "one has been refused", every=0.02)
    (sender,) = (beat for beat in here.beats if beat is not other)
    line = other.said(f"is being sent by pid {sender.pid} on ")
    assert "INFO" in line
    assert here.messages("hourly") == []
    gates[other].touch()
    begin = time.time()
    if end == "fails":
        gates[sender].write_text("fail", encoding="ascii")
    elif end == "dies":
        sender.kill()
    (message,) = here.sent("hourly", timeout=within + 1.0)
    assert message.pid == other.pid or end == "fails"  # who failed may try again, and be the first
    assert message.sent - begin < within + 0.2


def test_a_dead_beat_is_replaced_at_the_normal_time(site: Sites) -> None:
    """Its interval is kept by another, that had begun at another moment."""
    sites = [site(kind, entries=("interval",)) for kind in KINDS]
    for here in sites:
        here.beat()
    for here in sites:
        here.sent("interval")
        here.beat()
    for here in sites:
        here.beats[1].started()
        if here.kind == "persistent":  # with a memory of its own
            here.beats[1].said(f"interval (every-2s) was sent by pid {here.beats[0].pid} on ")
    last = {}
    for here in sites:
        *_, last[here.kind] = here.sent("interval", len(here.messages("interval")) + 1)
        sent = last[here.kind].sent
        wait_until(lambda sent=sent: time.time() > sent + 0.3, 1.0, "it is known to be sent")
        (sender,) = (beat for beat in here.beats if beat.pid == last[here.kind].pid)
        sender.kill()
    for here in sites:
        before = last[here.kind]
        after = here.sent("interval", here.messages("interval").index(before) + 2)
        (next_one,) = after[after.index(before) + 1 :][:1]
        assert next_one.pid != before.pid
        assert 1.8 < next_one.sent - before.sent < 2.3
