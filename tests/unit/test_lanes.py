"""The table of lanes names what there is, and does with it what it says."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests import lanes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [*lanes.COMPUTING, *lanes.RABBITMQ, *lanes.LONGEST])
def test_what_is_named_exists(name: str) -> None:
    assert (ROOT / name).is_dir() or list(ROOT.glob(f"{name}*"))


def test_files_that_compute_are_one_lane_and_others_one_each() -> None:
    computing = ["tests/faults/test_campaign.py::a", "tests/unit/test_key.py::b[1]"]
    assert {lanes.lane_of(test) for test in computing} == {"computing"}
    tests = ["tests/worker/test_lost.py::a", "tests/worker/test_lost.py::b[x::y]"]
    assert {lanes.lane_of(test) for test in tests} == {"tests/worker/test_lost.py"}
    assert lanes.lane_of("tests/worker/test_green.py::a") == "tests/worker/test_green.py"


def test_the_longest_are_begun_first() -> None:
    files = [
        "tests/compat/test_once.py",
        "tests/contract/test_acl.py",
        "tests/worker/test_keys.py",
        "tests/worker/test_shutdown.py",
        "tests/unit/test_key.py",
        "tests/faults/test_campaign.py",
    ]
    assert sorted(files, key=lanes.place) == files[::-1]


def test_temporary_files_are_made_where_they_go_in_the_end() -> None:
    """By us, and by all that is started here."""
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
    assert Path(tempfile.gettempdir()).name.startswith("redlock-tests-")
