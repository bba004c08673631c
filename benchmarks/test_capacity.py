"""The measurement of what locks cost a node: a short run, and the page that it writes."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import closing
from typing import Any

import pytest

from benchmarks import capacity
from benchmarks.capacity_node import BARE, Node, Size
from celery_redlock.server import start_servers

SHORT = Size(
    rounds=1, operations=20, many=60, connections=20, leases=200, processes=2, ttl=9.0, window=4.0
)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return capacity.on_servers(SHORT, seed=7)


def cells(head: str) -> dict[str, list[str]]:
    """Return a table of the page: the cells of each row by the first."""
    page = capacity.PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(head)} \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.M)
    assert found, head
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].splitlines()]
    return {name: rest for name, *rest in rows}


def test_node_counts_the_commands_and_requests_of_a_bare_pair() -> None:
    with start_servers(1) as (server,), closing(Node(server.url)) as node:
        cost = node.pairs(50)
    assert (cost["commands"], round(cost["requests"], 1)) == (2, 2)
    assert 100 < cost["in"] < 200


def test_load_keeps_all_its_leases_over_all_its_connections(figures: dict[str, Any]) -> None:
    load = figures["load"]
    assert (load["connections"], load["leases"]) == (20, 200)
    assert load["held at the end"] == 200
    assert load["extensions"] > 0


def test_page_of_capacity_has_the_rows_that_are_measured(figures: dict[str, Any]) -> None:
    for head, rows in capacity.tables(figures):
        assert list(cells(head[0])) == [row[0] for row in rows]


def test_page_of_capacity_has_the_commands_of_the_present_code(figures: dict[str, Any]) -> None:
    shown = cells("what it costs each node")
    for name in (BARE, *capacity.LOCKS):
        measured = figures["locks"][name]
        said = [f"{measured['commands']:.1f}", f"{measured['requests']:.1f}"]
        assert shown[name][:2] == said, f"{name}: run python -m benchmarks.capacity --write"


def test_tables_are_written_into_the_page_and_nothing_else_is_changed(
    figures: dict[str, Any],
) -> None:
    page = capacity.PAGE.read_text(encoding="utf-8")
    written = capacity.written(page, figures)
    assert capacity.written(written, figures) == written
    rest = re.compile(r"^\|.*\n", re.M)
    assert rest.sub("", written) == rest.sub("", page)
    with pytest.raises(RuntimeError, match="has 0 tables"):
        capacity.written("", figures)


def test_command_that_measures_a_core_runs_as_the_page_shows_it() -> None:
    page = capacity.PAGE.read_text(encoding="utf-8")
    (command,) = re.findall(r"^(redis-benchmark .*?)(?: +#.*)?$", page, re.M)
    words = command.split()
    program = shutil.which(words[0]) or shutil.which("valkey-benchmark")
    if program is None:
        pytest.skip("there is no redis-benchmark")
    with start_servers(1) as (server,):
        words[words.index("-h") + 1] = "127.0.0.1"
        words[words.index("-n") + 1] = "1000"
        done = subprocess.run(
            [program, *words[1:], "-p", str(server.port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and "requests per second" in done.stdout, done
        with closing(Node(server.url)) as node:
            assert node.info()["set"] >= 1000
