"""The table of hostile input names its tests; they exist, so it cannot rot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_redlock.keys.template import MAX_BYTES
from celery_redlock.protocol.names import MAX_NAME_CHARS
from celery_redlock.protocol.pipeline import MAX_OWED
from celery_redlock.stores.redis.reader import MAX_NODE_BYTES
from celery_redlock.stores.redis.reader import MAX_REPLY_BYTES as LARGEST_LOOK
from celery_redlock.stores.redis.resp import MAX_REPLY_BYTES, REPLY_S

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "hostile.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!---)", line)]
NAMED = re.findall(r"`(\w+)::(\w+)`", PAGE)
UNTESTED = ["a password that the server did not ask for"]
"""Rows that say that nothing happens."""


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_test_named_in_the_table_of_hostile_input_exists(file: str, name: str) -> None:
    found = [path.read_text("utf-8") for path in TESTS.rglob(f"{file}.py")]
    assert any(re.search(rf"^(async )?def {name}\(", text, re.M) for text in found)


def test_every_row_of_hostile_input_names_a_test() -> None:
    rows = [row for row in ROWS if not row.endswith("| shown by |")]
    assert len(rows) >= 35
    silent = [row.split("|")[1].strip() for row in rows if "::" not in row]
    assert silent == UNTESTED


@pytest.mark.parametrize(
    "words",
    [
        f"after {MAX_REPLY_BYTES} bytes",
        f"read {LARGEST_LOOK >> 20} MiB of a reply and {MAX_NODE_BYTES >> 20} MiB of a node",
        f"After {REPLY_S:g} seconds the connection",
        f"more than {MAX_NAME_CHARS} characters",
        f"at most {MAX_BYTES} printable ASCII bytes",
        f"| {MAX_OWED}; of more the oldest",
    ],
)
def test_numbers_on_the_hostile_page_are_those_of_the_code(words: str) -> None:
    assert words in PAGE
