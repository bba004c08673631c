"""Measure the lock against the bare limit and its peers, print the tables, write results.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import (
    beside,
    capacity,
    celery_rate,
    coroutines,
    faults,
    hot,
    imports,
    issue,
    latency,
    leases,
    listing,
    publishing,
    several,
    signals,
    stores,
    waiting,
)
from celery_redlock.server import start_servers

RESULTS = Path(__file__).parent / "results.json"
SECTIONS = (
    "latency",
    "waiting",
    "coroutines",
    "stores",
    "faults",
    "leases",
    "several",
    "celery",
    "hot",
    "publishing",
    "signals",
    "listing",
    "capacity",
    "import",
    "beside",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes, rough figures")
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    arguments = parser.parse_args()
    quick, chosen = arguments.quick, arguments.sections or SECTIONS
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C

    machine = f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}"
    print(f"{machine}\n", flush=True)
    results: dict[str, Any] = {"machine": machine, "quick": quick, "load": os.getloadavg()}
    started = time.monotonic()

    def report(section: str, figures: Any, text: str) -> None:
        results[section] = figures
        print(f"{text}\n", flush=True)

    with start_servers(6) as (*nodes, broker):
        urls = [node.url for node in nodes]
        if "latency" in chosen:
            figures = latency.measure(nodes, rounds=10 if quick else 60)
            report("latency", figures, latency.show(figures))
        if "waiting" in chosen:
            figures = waiting.measure(urls, *((5, 1, 2.0, False) if quick else (40, 5, 2.0)))
            report("waiting", figures, waiting.show(figures))
        if "coroutines" in chosen:
            figures = coroutines.measure(urls, 3 if quick else 15)
            report("coroutines", figures, coroutines.show(figures))
        if "stores" in chosen:
            figures = stores.measure(urls, *((10, 3) if quick else (60, 60)))
            report("stores", figures, stores.show(figures))
        if "faults" in chosen:
            figures = faults.measure(nodes, *((1, 200, 0.3) if quick else (7, 500, 1.0)))
            report("faults", figures, faults.show(figures))
        if "leases" in chosen:
            size = (2000, 4.0, 1) if quick else (10_000, 20.0, 2)
            figures = leases.measure(urls, ["bare", "ours"], *size)
            report("leases", figures, leases.show(figures))
        if "several" in chosen:
            figures = several.measure(urls, *((1, 2.0) if quick else (7, 3.0)))
            report("several", figures, several.show(figures))
        if "celery" in chosen:
            size = (1, 500) if quick else (5, 1500)
            for title, used, guard in (
                ("five nodes", urls, "auto"),
                ("one node", urls[:1], "auto"),
                ("five nodes, restart guard off", urls, "off"),
            ):
                figures = celery_rate.on_servers(broker.url, used, *size, guard)
                report(f"celery, {title}", figures, celery_rate.show(title, figures))
        if "hot" in chosen:
            # Polling takes as long as all else.
            size = (1, 60, 500) if quick else (3, 200, 2000)
            figures = hot.on_servers(broker.url, urls, *size, polling=not quick)
            report("hot key", figures, hot.show(figures))
        if "publishing" in chosen:
            figures = publishing.measure(broker.url, urls, *((3, 300) if quick else (7, 1000)))
            report("publishing", figures, publishing.show(figures))
        if "signals" in chosen:
            figures = signals.measure(urls, 5 if quick else 60)
            report("signals", figures, signals.show(figures))
        if "listing" in chosen:
            figures = listing.measure(urls, rounds=3 if quick else 11)
            report("listing", figures, listing.show(figures))
    if "capacity" in chosen:
        figures = capacity.on_servers(capacity.QUICK if quick else capacity.FULL)
        report("capacity", figures, capacity.show(figures))
    if "beside" in chosen and not quick:
        figures = beside.measure()
        report("beside", figures, beside.show(figures))
    if "import" in chosen:
        figures = imports.measure(5 if quick else 15)
        report("import", figures, imports.show(figures))
    if figures := issue.rows(results):
        report("issue rows", figures, issue.show(figures))
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{time.monotonic() - started:.0f} s, all figures in {RESULTS.name}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
