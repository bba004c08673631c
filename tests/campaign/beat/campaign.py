"""Three beats of each scheduler, side by side, under faults, judged at the end.

    python -m tests.campaign.beat.campaign --seconds 600 --seed 1

Exits with 1 when a tick was sent twice or left out, or an interval was not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_redlock.server import LocalServer
from celery_redlock.testing.etcd import LocalEtcd
from tests.campaign.beat.nemesis import Chronicle, Nemesis, Node
from tests.campaign.beat.oracle import Verdict, judge_interval, judge_ticks
from tests.support import stores
from tests.support.beats import KINDS, TTL, Site

BEATS = 3


@dataclass
class Report:
    """Report of one run: its faults, and the verdict on each entry of each scheduler."""

    faults: Chronicle
    verdicts: dict[tuple[str, str], Verdict]
    log: str

    @property
    def problems(self) -> list[str]:
        return [
            f"{kind} {entry}: {problem}"
            for (kind, entry), verdict in self.verdicts.items()
            for problem in verdict.problems
        ]

    def __str__(self) -> str:
        kinds = ("kill", "stop", "node", "quorum", "stall")
        lines = ["faults: " + ", ".join(f"{self.faults.count(kind)} x {kind}" for kind in kinds)]
        lines[0] += f", {self.faults.skipped} skipped (too few beats up)"
        for (kind, entry), verdict in self.verdicts.items():
            forgiven = ", ".join(f"{n} x {what}" for what, n in verdict.forgiven.items())
            lines.append(
                f"{kind:<10} {entry:<8} {verdict.count:>5} sent of {verdict.ideal:.1f},"
                f" longest gap {verdict.longest:.2f} s, {len(verdict.problems)} problems"
                + (f" (forgiven: {forgiven})" if forgiven else "")
            )
        lines += [f"  {problem}" for problem in self.problems[:40]]
        lines.append("VIOLATIONS" if self.problems else "each tick was sent once")
        return "\n".join(lines)


def campaign(
    nodes: Sequence[Node],
    broker: LocalServer,
    path: Path,
    seconds: float,
    *,
    seed: int | None = 1,
    kinds: tuple[str, ...] = KINDS,
    beats: int = BEATS,
    loss_every: float = 60.0,
    every: Callable[[], None] | None = None,
    **conf: Any,
) -> Report:
    """Run the campaign.

    Args:
        nodes: The lock nodes.
        broker: The broker of all sites.
        path: For files.
        seconds: How long to judge.
        seed: Of the faults; None for no faults.
        kinds: The schedulers.
        beats: How many of each.
        loss_every: Seconds between two losses of the quorum.
        every: Called now and then.
        **conf: More of the apps' configuration.
    """
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(kinds)) as pool:
            made = pool.map(lambda kind: Site(kind, nodes, broker, path / kind, **conf), kinds)
            sites = [stack.enter_context(contextlib.closing(site)) for site in made]
        for _ in range(beats):
            for site in sites:
                site.beat()
        for site in sites:
            for beat in site.beats:
                beat.started()
        for site in sites:
            site.sent("tick", 2)
            site.sent("interval")
        begin = time.time()
        nemesis = Nemesis(sites, nodes, seed, loss_every=loss_every)
        nemesis.run(seconds, every)
        end = time.time()
        time.sleep(0.3)  # messages stamped before the end arrive
        verdicts = {}
        for site in sites:
            faults = nemesis.done.of(site)
            ticks, intervals = site.messages("tick"), site.messages("interval")
            verdicts[site.kind, "tick"] = judge_ticks(ticks, faults, begin, end)
            verdicts[site.kind, "interval"] = judge_interval(
                *(intervals, faults, begin, end),
                every=2.0,
                ttl=TTL,
                late=1.5 if isinstance(nodes[0], LocalEtcd) else 0.0,  # docs/etcd.md, "Times"
            )
        return Report(nemesis.done, verdicts, "".join(site.text() for site in sites))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--off", action="store_true", help="redlock_beat = False: must fail")
    parser.add_argument("--store", default="redis", choices=("redis", "postgresql", "etcd"))
    parser.add_argument("--kind", choices=KINDS, help="only this scheduler")
    parser.add_argument("--beats", type=int, default=BEATS)
    parser.add_argument("--quiet", action="store_true", help="no faults")
    parser.add_argument("--keep", type=Path, help="keep logs and files here")
    options = parser.parse_args()
    print(f"{options.seconds:g} s, seed {options.seed}: {options.beats} beats of each", flush=True)
    begin = time.monotonic()
    said = 0

    def progress() -> None:
        nonlocal said
        minutes = int((time.monotonic() - begin) // 60)
        if minutes > said:
            said = minutes
            print(f"{minutes} min", flush=True)

    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        nodes = stack.enter_context(stores.start(options.store, 5))
        broker = stack.enter_context(LocalServer())
        report = campaign(
            nodes,
            broker,
            options.keep or Path(directory),
            options.seconds,
            seed=None if options.quiet else options.seed,
            kinds=(options.kind,) if options.kind else KINDS,
            beats=options.beats,
            every=progress,
            **({"redlock_beat": False} if options.off else {}),
        )
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
