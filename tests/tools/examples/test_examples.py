"""The examples do what they say: run as a reader would, against real servers and a real worker."""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

import pytest

from celery_redlock import Redlock
from celery_redlock.server import LocalServer
from tests.support import forked
from tests.support.example import EXAMPLES, worker
from tests.support.wait import wait_until

SHOP = EXAMPLES / "django_shop"


def run(
    example: str, environment: dict[str, str], *arguments: str, directory: Path = EXAMPLES
) -> list[str]:
    """Run an example's own `python <example>.py`; return its lines, and check that it has no error.

    Without what the library says of nodes: on a busy machine they may be late.
    """
    code, said = forked.run(f"{example}.py", *arguments, cwd=directory, env=environment)
    assert code == 0, said
    return [line for line in said.splitlines() if not line.startswith("node 127.0.0.1:")]


def test_example_orders_loses_no_payment(environment: dict[str, str], tmp_path: Path) -> None:
    with worker("orders", environment, tmp_path / "log"):
        said = run("orders", environment)
    assert said == ["order blue: 50 paid", "order green: 50 paid"]
    assert (tmp_path / "order-blue.txt").read_text() == "50"


def test_example_signals_names_waits_and_skips(environment: dict[str, str], tmp_path: Path) -> None:
    with worker("signals", environment, tmp_path / "log") as log:
        said = run("signals", environment)
        wait_until(lambda: log.read_text().count(" to the end: ") == 2, 10, "both are released")
        told = log.read_text()
    assert said == [*["report 7 is rebuilt"] * 2, "skipped"]
    assert re.search(r"signals\.rebuild has waited \d\.\d s for report:7$", told, re.M)
    held = re.findall(r"report:7 was locked for (\d+\.\d) s, to the end: True$", told, re.M)
    assert len(held) == 2 and all(float(seconds) >= 0.7 for seconds in held)
    skipped = (
        r"signals\.refresh is skipped \(run\): signals\.rebuild\[\S+\] of pid \d+ on \S+ has it$"
    )
    assert re.search(skipped, told, re.M)


def test_example_orders_without_its_lock_loses_payments(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Thus it is the lock of the example that keeps them."""
    bare = tmp_path / "bare"
    bare.mkdir()
    source = (EXAMPLES / "orders.py").read_text()
    switched_off = "app.conf.redlock_ttl = 10.0\napp.conf.redlock_enabled = False\n"
    (bare / "orders.py").write_text(source.replace("app.conf.redlock_ttl = 10.0\n", switched_off))
    with worker("orders", environment, tmp_path / "log", bare):
        _, said = forked.run("orders.py", cwd=EXAMPLES, env=environment)  # may meet half a page
    assert "order blue: 50 paid" not in said


OTHERS = ["report 8 has 6 pages", *["skipped, report:7 is being made"] * 2]


def test_example_report_is_made_once_and_the_others_are_skipped(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with worker("report", environment, tmp_path / "log") as log:
        said = run("report", environment)
        told = log.read_text()
    assert sorted(said) in [[f"report 7 has {pages} pages", *OTHERS] for pages in (6, 8)]
    left = [float(seconds) for seconds in re.findall(r"; (\d\.\d) s left", told)]
    # Three seconds of work on a lock of two: it was extended, and never near its end.
    assert len(left) in (12, 14)
    assert all(0.5 < seconds <= 2.0 for seconds in left)


def test_example_script_takes_turns(
    environment: dict[str, str], servers: list[LocalServer]
) -> None:
    lines = run("script", environment)
    assert lines[0] == "block: ours for 5 s and more"
    assert re.fullmatch(r"by hand: pid \d+ on \S+ \([3-5] nodes, token \w{8}\)", lines[1])
    assert lines[2:6] == [
        "by hand: extended: True",
        "by hand: a second one gets None",
        "by hand: held to the end: True",
        "by hand: now held by None",
    ]
    assert re.fullmatch(r"contest: refused, it is held by pid \d+ on .*", lines[6])
    assert lines[7:] == ["contest: had it after the other"]


def test_example_script_says_who_holds_and_who_does_not_answer(
    environment: dict[str, str], servers: list[LocalServer]
) -> None:
    def refused() -> str:
        code, said = forked.run("script.py", cwd=EXAMPLES, env=environment)
        assert code == 1, said
        return said

    with Redlock([node.url for node in servers], ttl=30).lock("stock"):
        assert refused().startswith(f"no lock: stock is held by pid {os.getpid()} on ")
    for node in servers[:3]:
        node.kill()
    silent = refused()
    assert "no lock: stock: " in silent and "3 are needed" in silent


OVERTAKEN = """\
{0}: ours, after one that was stopped; a larger token: True
{0}: the late one: not written, a larger token than its own has been here
{0}: written by the one after it
"""


def fencing(environment: dict[str, str], place: Path = EXAMPLES) -> str:
    return "\n".join(run("fencing", environment, directory=place)) + "\n"


@pytest.fixture
def shop(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The Django project's environment, its database made by its migrations."""
    environment["SHOP_DATABASE"] = str(tmp_path / "shop.sqlite3")
    manage("migrate", environment)
    return environment


def manage(command: str, environment: dict[str, str], directory: Path = SHOP) -> list[str]:
    return run("manage", environment, command, directory=directory)


def test_example_django_charges_an_order_once_however_often_it_is_clicked(
    shop: dict[str, str], tmp_path: Path
) -> None:
    with worker("shop", shop, tmp_path / "log", SHOP) as log:
        said = manage("buy", shop)
        assert sorted(said[:5]) == ["paid", *["was paid already"] * 4]
        assert said[5:] == ["order 1: charged 1 x 50"]
        done = "shop.tasks.refresh_turnover["
        wait_until(lambda: re.search(rf"{re.escape(done)}.*succeeded", log.read_text()), 20, done)
    with sqlite3.connect(shop["SHOP_DATABASE"]) as database:
        assert database.execute("SELECT paid FROM shop_turnover").fetchall() == [(50,)]
    database.close()


def test_example_coroutines_loses_no_apple(environment: dict[str, str]) -> None:
    five, impatient, log, lost, held = run("coroutines", environment)
    assert five == "five took one apple each: 5 left"
    assert impatient == "impatient: it was taken, so no apple"
    assert log.startswith("lost the lock report") and "max_lifetime" in log
    assert lost == "may be lost: its work was cancelled: True"
    assert held == "now held by None"


def test_example_fastapi_sends_one_task_and_loses_no_apple(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with worker("fastapi_app:tasks", environment, tmp_path / "log"):
        said = run("fastapi_app", environment)
    assert said == [
        "three asked for one report: 1 task",
        "SUCCESS: report 7",
        "four took an apple and four gave one: 10 left, {200}",
    ]


def test_example_fencing_refuses_the_late_write_of_a_stopped_holder(
    environment: dict[str, str],
) -> None:
    sqlite, postgresql = OVERTAKEN.format("SQLite"), OVERTAKEN.format("PostgreSQL")
    out = fencing(environment)
    if re.search(r"^PostgreSQL: left out: \w+ is not installed$", out, re.M):
        assert out.startswith(sqlite)
        pytest.skip(out.splitlines()[-1])
    assert out == sqlite + postgresql


def test_example_fencing_without_its_check_takes_the_late_write(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The check is the last line of the example's statement."""
    source = (EXAMPLES / "fencing.py").read_text()
    guard = "WHERE stock.last_fencing_token < excluded.last_fencing_token\n"
    assert source.count(guard) == 1
    source = source.replace('"initdb",', '"no initdb",')  # SQLite is enough here
    (tmp_path / "fencing.py").write_text(source.replace(guard, ""))
    assert "SQLite: written by the late one\n" in fencing(environment, tmp_path)
