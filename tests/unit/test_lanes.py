"""The table of lanes names what there is, and does with it what it says."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.support import lanes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    [
        *(*lanes.COMPUTING, *lanes.RABBITMQ, *lanes.BROWSER),
        *(*lanes.LONGEST, *lanes.FILLING, *lanes.SPLIT),
    ],
)
def test_path_named_in_a_table_of_lanes_exists(name: str) -> None:
    assert (ROOT / name).is_dir() or list(ROOT.glob(f"{name}*"))


def test_computing_test_files_share_one_lane_and_others_have_their_own() -> None:
    computing = ["tests/faults/test_campaign.py::a", "tests/sim/test_world.py::b[1]"]
    assert {lanes.lane_of(test) for test in computing} == {"computing"}
    assert {lanes.lane_of(f"{file}::a") for file in lanes.BROWSER} == {"browser"}
    shutdown = "tests/worker/test_shutdown.py"
    pools = [f"{shutdown}::test_ending[{one}]" for one in ("prefork-a", "prefork-b", "solo-a")]
    assert [lanes.lane_of(test) for test in pools] == [
        f"{shutdown} prefork",
        f"{shutdown} prefork",
        f"{shutdown} solo",
    ]
    tests = ["tests/worker/test_lost.py::a", "tests/worker/test_lost.py::b[x::y]"]
    assert {lanes.lane_of(test) for test in tests} == {"tests/worker/test_lost.py"}
    assert lanes.lane_of("tests/worker/test_green.py::a") == "tests/worker/test_green.py"


def test_longest_test_files_are_begun_first() -> None:
    files = [
        "tests/unit/test_key.py",
        "tests/compat/test_once.py",
        "tests/contract/test_acl.py",
        "tests/worker/test_keys.py",
        "tests/worker/test_shutdown.py",
        "tests/faults/test_campaign.py",
    ]
    assert sorted(files, key=lanes.place) == files[::-1]


def test_first_lane_reads_the_tests_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    order: list[str] = []

    def another() -> None:
        with lanes.in_turn("gw1"):
            order.append("second")

    with lanes.in_turn(lanes.FIRST):
        thread = threading.Thread(target=another)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(30.0)
    assert order == ["first", "second"]


def test_temporary_files_of_tests_are_made_in_the_directory_of_the_run() -> None:
    """Those of the tests, and of all processes started here."""
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
    assert Path(tempfile.gettempdir()).name.startswith("redlock-tests-")


def test_failure_of_a_test_whose_cluster_has_no_workers_is_reported() -> None:
    item: Any = SimpleNamespace(funcargs={"cluster": "the id of one"})
    report = SimpleNamespace(failed=True, sections=[])
    steps = conftest.pytest_runtest_makereport(item, None)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(report)
    assert end.value.value is report and report.sections == []
