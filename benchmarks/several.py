"""Two resources in one lock against two locks one after the other: moves of money per second."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT
from benchmarks.stats import table

CLERKS, ACCOUNTS, EACH = 8, 5, 10_000
WORK = 0.001
"""Seconds that a body takes."""
WAYS = {"together": "one lock of both accounts", "in-order": "one after the other, sorted"}


def _moves(how: str, urls: Sequence[str], seconds: float) -> int:
    """How many moves all clerks make in so many seconds. The sum must stay."""
    with tempfile.TemporaryDirectory() as directory:
        accounts = [Path(directory, f"account-{number}") for number in range(ACCOUNTS)]
        for account in accounts:
            account.write_text(str(EACH))
        command = [sys.executable, "-m", "benchmarks.bank", how, directory, str(seconds), str(WORK)]
        clerks = [
            subprocess.Popen(
                [*command, *urls],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(CLERKS)
        ]
        try:
            for clerk in clerks:
                assert clerk.stdout and clerk.stdout.readline() == "ready\n"
            for clerk in clerks:
                assert clerk.stdin
                clerk.stdin.write("go\n")
                clerk.stdin.flush()
            moves = sum(int(clerk.communicate()[0]) for clerk in clerks)
        finally:
            for clerk in clerks:
                clerk.kill()
        total = sum(int(account.read_text()) for account in accounts)
        if total != ACCOUNTS * EACH:
            raise RuntimeError(f"{how}: {ACCOUNTS * EACH} has become {total}")
    return moves


def measure(urls: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Moves per second, by way; all in each round, in random order."""
    figures: dict[str, list[float]] = {how: [] for how in WAYS}
    for _ in range(rounds):
        for how in random.sample(list(WAYS), len(WAYS)):
            figures[how].append(_moves(how, urls, seconds) / seconds)
    return figures


def ratio(figures: dict[str, Any]) -> float:
    """How many times as many moves together; the median of the rounds."""
    pairs = zip(figures["together"], figures["in-order"], strict=True)
    return statistics.median(one / other for one, other in pairs)


def show(figures: dict[str, Any]) -> str:
    rows = [(WAYS[how], f"{statistics.median(rates):.0f}", "") for how, rates in figures.items()]
    rows[0] = (*rows[0][:2], f"{ratio(figures):.2f} (target > 1)")
    title = (
        f"{CLERKS} processes move money between {ACCOUNTS} accounts, {WORK * 1000:g} ms each,"
        " five nodes"
    )
    return table([title, "moves/s", "ratio"], rows)
