"""The table of locks: one line a lock at every width, and which columns go first."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from celery_redlock.cli.lock_table import DROPPED, lock_table
from celery_redlock.protocol.values import Owner
from celery_redlock.survey.models import Entry

ID = "8c1f02d0-5b5e-4be4-9d0c-0123456789ab"
OWNER = Owner("web-1.prod.example.org", 4242, ID, task="shop.orders.charge")
LOCK = Entry(
    resource="order:12345",
    key="redlock:order:12345",
    kind="lock",
    slot=1,
    owner=OWNER,
    digest="54c1c859",
    ttls=(28.4, 28.4, 28.2, 28.3, 28.4),
    nodes=5,
    total=5,
    quorum=3,
    held_for=12.0,
    fence=17,
    waiting=2,
)
ALL = ["key", "task", "task id", "host", "pid", "held for", "nodes", "ttl", "fence", "waiting"]


def head(width: int) -> list[str]:
    """The columns that are shown."""
    line = lock_table([LOCK], width, waiters=True)[0]
    return re.split(r" {2,}", line.replace("ttl on each", "ttl"))


def test_lock_table_at_80_and_120_columns_has_one_line_a_lock() -> None:
    assert lock_table([LOCK], 120, waiters=True) == [
        "key          task                task id   host                    pid   held for  nodes"
        "  ttl  fence  waiting",
        "order:12345  shop.orders.charge  8c1f02d0  web-1.prod.example.org  4242  12 s      5/5  "
        "  28   17     2",
    ]
    assert lock_table([LOCK], 80, waiters=True) == [
        "key          task                task id   held for  nodes  ttl  waiting",
        "order:12345  shop.orders.charge  8c1f02d0  12 s      5/5    28   2",
    ]


def test_lock_table_drops_columns_in_the_documented_order() -> None:
    left = list(ALL)
    shown = [head(width) for width in range(130, 10, -1)]
    for columns in shown:
        while left != columns:
            gone = next(name for name in DROPPED if name in left)
            left.remove(gone)
    assert left == ["key", "nodes"]


@pytest.mark.parametrize("width", [1, 4, 10, 20, 40, 60, 80, 100, 120, 160])
@pytest.mark.parametrize("name", ["order:1", "order:" + "9" * 200, "ключ " * 20, "鍵" * 60])
def test_lock_table_has_no_line_wider_than_the_terminal(width: int, name: str) -> None:
    owner = replace(OWNER, task="shop.a_very_long_package.tasks.a_task_that_says_what_it_does")
    entry = replace(LOCK, resource=name, owner=owner, ttls=(28.0, None, 9.5, math.inf, 28.0))
    lines = lock_table([LOCK, entry, replace(LOCK, owner=None)], width, waiters=True)
    assert len(lines) == 4
    for line in lines:
        assert len(line) + sum(c == "鍵" for c in line) <= width


def test_lock_table_shows_all_ttls_where_they_differ_and_with_wide() -> None:
    def ttl(*ttls: float | None, width: int | None = 90) -> str:
        lock = replace(LOCK, ttls=ttls, total=len(ttls), nodes=len(ttls))
        found = re.search(r"3/3[^-\d]*  (.*?)  ", lock_table([lock], width, waiters=True)[1])
        assert found
        return found[1]

    assert ttl(28.0, 28.6, 28.9) == "28"
    assert ttl(28.0, None, 28.9) == "28 - 29"
    assert ttl(28.0, 24.0, 28.9) == "28 24 29"
    assert ttl(math.inf, math.inf, math.inf) == "never"
    assert ttl(28.0, 28.0, 28.0, width=None) == "28 28 28"


def test_lock_table_without_a_width_shows_everything() -> None:
    head, line = lock_table([LOCK], None, waiters=False)
    assert head.endswith("ttl on each     fence") and ID in line and OWNER.host in line
    assert lock_table([LOCK], len(line) + 20, waiters=False) == [head, line]  # there is room
