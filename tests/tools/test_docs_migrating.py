"""The page on moving in: its table names its tests, its others name what the shims know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from celery_redlock.compat import once, singleton
from celery_redlock.config.options import check_option

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "migrating.md").read_text("utf-8")
PEERS = (TESTS / "promises/peers/test_peers.py").read_text("utf-8")
ROWS = PAGE.partition("## What they leave behind")[2].splitlines()
NAMED = re.findall(r"`test_peers::(\w+)`", PAGE)


def test_every_row_on_migrating_names_one_test_and_every_test_has_a_row() -> None:
    rows = [line for line in ROWS if re.match(r"\| (?!---|\|)", line)]
    assert len(rows) == len(NAMED) == len(set(NAMED)) >= 23
    assert re.findall(r"^def (test_\w+)\(", PEERS, re.M) == NAMED


@pytest.mark.parametrize("name", once.TASK_OPTIONS)
def test_each_option_of_celery_once_has_a_row_on_migrating(name: str) -> None:
    section = PAGE.partition("## From celery-once")[2].partition("\n## ")[0]
    assert re.search(rf'^\| `once={{"{name}": ', section, re.M)


@pytest.mark.parametrize("name", ["unique_on", "raise_on_duplicate", "lock_expiry"])
def test_each_option_of_celery_singleton_has_a_row_on_migrating(name: str) -> None:
    assert hasattr(singleton.Singleton, name)
    section = PAGE.partition("## From celery-singleton")[2].partition("\n## ")[0]
    assert re.search(rf"^\| `{name}\b", section, re.M)


VALUES = re.findall(r"\block_(\w+)=(\"[^\"`]*\"|\[[^\]`]*\]|[\w.]+)", PAGE)


@pytest.mark.parametrize(("name", "value"), sorted({v for v in VALUES if v[0] != "expiry"}))
def test_replacement_named_on_migrating_is_a_valid_option(name: str, value: str) -> None:
    check_option(name, ast.literal_eval(value))
