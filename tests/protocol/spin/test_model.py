"""A model of the algorithm, all of whose states are looked at (`redlock.pml`), by Spin.

The simulator tries long schedules of the code itself; this tries every schedule of a small copy of
its rules. It is skipped where Spin or a C compiler is missing (Debian: `apt install spin gcc`).
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.keepalive.watchdog import EVERY
from celery_redlock.protocol.lease import drift
from celery_redlock.protocol.values import quorum_of

MODEL = Path(__file__).with_name("redlock.pml")

READERS = ["-DSHARED", "-DTTL=1", "-DDRIFT=0", "-DAHEAD=0", "-DCRASHES=0"]
"""A writer and two readers with one clock.

The model checks which of them may hold the lock together, and late requests and answers.
The timing is that of two clients, above.
"""

# Each part that is removed, by its name for Spin, and the violation that is then found.
BROKEN = {
    "a minority is a quorum": (["-DTTL=2", "-DQUORUM=1"], "phase"),
    "a node that forgot votes at once": (["-DTTL=2", "-DAMNESIA"], "phase"),
    "a node that was demoted and promoted votes at once": (
        ["-DTTL=2", "-DROLE", "-DUNSEEN"],
        "phase",
    ),
    "another server behind an address votes at once": (["-DTTL=2", "-DSWAP", "-DUNSEEN"], "phase"),
    "a release deletes whatever is there": (["-DTTL=2", "-DBLIND_RELEASE"], "owner"),
    "an answer after the deadline revives a lease": (["-DREVIVE", "-DCRASHES=0"], "overtaken"),
    "a release travels on a connection of its own": (["-DTTL=2", "-DTWO_CONNECTIONS"], "freed"),
    "a lease counts from the answer": (["-DTTL=2", "-DFROM_ANSWER"], "phase"),
    "the whole ttl is counted as held": (["-DTTL=2", "-DDRIFT=0"], "phase"),
    "any answer confirms an extension": (["-DANY_ANSWER", "-DCRASHES=0"], "phase"),
    "a reader counts a node that a writer has": ([*READERS, "-DREADS_BESIDE"], "client[0].phase"),
    "the token of one attempt serves the next": (["-DTTL=2", "-DTOKEN_KEPT", "-DTRIES=2"], "freed"),
}


def defines() -> dict[str, str]:
    """The model's constants."""
    lines = re.findall(r"^#define (\w+) +([^/\n]+)", MODEL.read_text(), re.MULTILINE)
    return {name: value.strip() for name, value in lines}


def test_numbers_of_the_spin_model_are_those_of_the_code() -> None:
    model = defines()
    nodes, ttl, allowance = int(model["N"]), int(model["TTL"]), int(model["DRIFT"])
    assert int(model["QUORUM"]) == quorum_of(nodes)
    # A tick is as long as the watchdog waits; the drift is paid in whole ticks, upwards.
    assert ttl * EVERY == 1
    assert allowance == math.ceil(drift(ttl))
    assert model["AWAY"] == "(TTL + DRIFT)"  # `restart_guard.RestartGuard.span`


@pytest.fixture(scope="module")
def tools() -> None:
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: apt install spin gcc)")


LARGE = ("-O1", "-DCOLLAPSE")
"""Options for the verifier of many states: longer to compile, less memory."""


def verify(where: Path, *options: str, made: Sequence[str] = LARGE, depth: int = 1_000_000) -> str:
    """Look at all states of the model, `depth` steps deep; what the verifier says."""
    steps = [
        ["spin", *options, "-a", str(MODEL)],
        ["gcc", *made, "-DSAFETY", "-DMEMLIM=2000", "-o", "pan", "pan.c"],
        ["./pan", f"-m{depth}", "-w22"],
    ]
    for step in steps:
        done = subprocess.run(step, cwd=where, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{step}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize(
    ("options", "least"),
    [
        pytest.param(["-DCRASHES=0"], 500_000, marks=pytest.mark.slow),
        # With a crash, and two ticks to the ttl: three of them take ten times as long (tried once).
        (["-DTTL=2"], 100_000),
        pytest.param(["-DTTL=2", "-DROLE"], 100_000, marks=pytest.mark.slow),
        pytest.param(["-DTTL=2", "-DSWAP"], 100_000, marks=pytest.mark.slow),
        pytest.param(READERS, 1_000_000, marks=pytest.mark.slow),
    ],
    ids=["no crash", "a crash", "another role", "another server", "readers"],
)
def test_spin_model_has_no_state_that_breaks_a_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], least: int
) -> None:
    said = verify(tmp_path, *options, made=() if options == ["-DTTL=2"] else LARGE)
    states = int(float(re.search(r"([\d.e+]+) states, stored", said)[1]))  # type: ignore[index]
    with capsys.disabled():
        print(f" {' '.join(options)}: {states} states", end="")
    assert "errors: 0" in said, said[-3000:]
    assert "max search depth too small" not in said
    assert "out of memory" not in said
    assert states > least


OFTEN = ("a release deletes whatever is there",)
"""The others take up to a quarter of a minute each; `make sim` runs them."""


def broken(what: str) -> Any:
    return pytest.param(what, marks=[] if what in OFTEN else [pytest.mark.slow])


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("what", [broken(what) for what in BROKEN])
def test_spin_model_without_a_rule_has_a_counterexample(tmp_path: Path, what: str) -> None:
    options, assertion = BROKEN[what]
    depth = 100 if "-DREVIVE" in options else 1_000_000  # else it takes minutes
    said = verify(tmp_path, *options, made=() if what in OFTEN else LARGE, depth=depth)
    assert "errors: 1" in said, said[-3000:]
    violated = re.search(r"assertion violated (.*)", said)
    assert violated is not None and assertion in violated[1], said[-3000:]
    assert (tmp_path / "redlock.pml.trail").exists()
