"""The beats of this campaign: two over the stage's nodes, with a rare entry beside short ones, and
two over one Redis, where nothing is set."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from celery_redlock.server import LocalServer
from tests.campaign.beat.oracle import Fault, judge_ticks
from tests.campaign.publishing.acts import PAUSED
from tests.campaign.publishing.stage import TTL
from tests.campaign.worker import chronicle
from tests.campaign.worker.journal import now
from tests.campaign.worker.oracle import Verdict
from tests.support import machine
from tests.support.beats import Site

TICKS = {"nodes": "a tick of beats over nodes", "unset": "a tick of beats over one Redis"}
"""Problems, by the site."""
AGED = 7200.0
"""Seconds ago: the last run of the rare entry. It is due at once, and not again for long."""
BEATS = 2
SLOW = 10.0
"""Seconds until beats are judged that send nothing."""
STALL = 0.2
"""Seconds for which the machine stood still that a beat may have missed a tick in."""


class Beats:
    """All beats. Made by `beats`.

    Attributes:
        sites: By what they are.
    """

    def __init__(self, sites: dict[str, Site]) -> None:
        self.sites = sites
        self._begin = 0.0

    def started(self) -> None:
        """Wait until all beats run."""
        for site in self.sites.values():
            for beat in site.beats:
                beat.started()

    def count(self) -> None:
        """Judge the ticks sent from now on: none may be missing. A beat may be slow to start."""
        for site in self.sites.values():
            with contextlib.suppress(AssertionError):
                site.sent("tick", 3, timeout=SLOW)
        self._begin = time.time()

    def judge(self, verdict: Verdict, faults: Sequence[chronicle.Fault]) -> None:
        """Check that each tick of each entry was sent once, in time.

        Add violations to the verdict.
        """
        end = time.time()
        past = end - now()
        lost = [
            Fault("quorum", fault.begin + past, (fault.end or now()) + past)
            for fault in faults
            if fault.kind == PAUSED
        ]
        # The oracle knows a stall of the machine as a fault.
        monotonic = time.time() - time.monotonic()
        stalls = [
            Fault("stall", one + monotonic, two + monotonic)
            for one, two in machine.stalls()
            if two - one > STALL
        ]
        time.sleep(0.3)  # messages stamped before the end arrive
        for name, site in self.sites.items():
            of_site = [*stalls, *(lost if name == "nodes" else ())]
            for text in judge_ticks(site.messages("tick"), of_site, self._begin, end).problems:
                verdict.problem(TICKS[name], now(), text)
            rare = len(site.messages("hourly"))
            if rare != ("hourly" in site.environment["TEST_ENTRIES"]):
                verdict.problem(TICKS[name], now(), f"hourly: sent {rare} times")


@contextlib.contextmanager
def beats(nodes: Sequence[LocalServer], path: Path, mutant: str = "") -> Iterator[Beats]:
    """Start the beats, with a bug planted if one is named."""
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(LocalServer()) for _site in range(2)]
        entries = ("tick", "hourly")
        guarded = Site(
            "persistent", nodes, brokers[0], path / "nodes", entries=entries, redlock_ttl=TTL,
            redlock_restart_guard="uptime",
        )  # fmt: skip
        unset = Site(
            "persistent", (), brokers[1], path / "unset", entries=("tick",), redlock_nodes="absent",
            redlock_beat="absent", redlock_restart_guard="absent",
        )  # fmt: skip
        for site in (guarded, unset):
            site.environment["TEST_PLANTED"] = mutant
            stack.callback(site.close)
            for _beat in range(BEATS):
                site.beat(start=False)
        for beat in guarded.beats:
            guarded.age(beat, "hourly", AGED)
        for site in (guarded, unset):
            for beat in site.beats:
                beat.start()
        yield Beats({"nodes": guarded, "unset": unset})
