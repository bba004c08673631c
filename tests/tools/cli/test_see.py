"""Commands that show locks: ls, show, watch, stats; and bench, which leaves no key behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from celery_redlock import Redlock, SingletonTask
from celery_redlock.cli import redlock as group
from celery_redlock.cli.context import Site
from celery_redlock.cli.ls import command as ls
from celery_redlock.cli.show import SPELLING
from celery_redlock.cli.watch import Changes
from celery_redlock.doctor.votes import votes_in
from celery_redlock.keys.canonical import text_of
from celery_redlock.protocol.names import mark_of
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.values import Owner
from celery_redlock.server import start_servers
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.survey.durations import span
from celery_redlock.survey.snapshot import survey
from tests.support import forked
from tests.support.names import Patch, Servers
from tests.support.nodes import TOKEN, told_all
from tests.support.wait import wait_until
from tests.tools.cli.clinic import OWNER, TOKENS, put, shop

OTHER = Owner("web-2", 17, "4567-ef01", task="shop.refund").token("0" * 32, 1.6e9)

ADDRESSES = parse_nodes([f"redis://127.0.0.1:{n}/0" for n in (1, 2, 3)])

Cli = Callable[..., Any]
Nodes = list[redis.Redis]


def test_ls_shows_who_holds_a_lock_and_for_how_long(redlock: Redlock, cli: Cli) -> None:
    with redlock.lock("order:1", owner=OWNER, fencing=True) as lease:
        told_all(redlock)
        result = cli("ls")
        assert result.exit_code == 0, result.output
        head, line, total = result.stdout.splitlines()
        assert total == "1 lock"
        said = dict(zip(re.split(r"\s{2,}", head), re.split(r"\s{2,}", line), strict=True))
        assert re.fullmatch(r"(\d+ ?){5}", said.pop("ttl on each"))
        assert re.fullmatch(r"\d+\.\d s", said.pop("held for"))
        assert said == {
            "key": "order:1",
            "task": "shop.charge",
            "task id": "0123-abcd",
            "host": "web-1",
            "pid": "4242",
            "nodes": "5/5",
            "fence": str(lease.fencing_token),
        }
        assert not TOKEN.search(result.output)
    assert cli("ls").stdout == "nothing is held\n"
    chosen = ["--match", "ordr:*", "--task", "shop.x", "--kind", "tick"]
    assert cli("ls", *chosen).stdout == (
        "nothing that is held fits --match 'ordr:*' --task shop.x --kind tick\n"
    )
    assert (
        "nothing that is held fits --match 'ordr:*'\n" in cli("stats", "--match", "ordr:*").stdout
    )


def test_ls_json_has_the_documented_shape(redlock: Redlock, cli: Cli) -> None:
    documented = Path(__file__).parents[3] / "docs" / "cli.md"
    shape = json.loads(re.findall(r"```json\n(.*?)```", documented.read_text("utf-8"), re.S)[0])
    with redlock.lock("order:1", owner=OWNER):
        said = json.loads(cli("ls", "--json").stdout)
    assert said.keys() == shape.keys()
    for part in ("nodes", "entries"):
        assert said[part][0].keys() == shape[part][0].keys()
    rival = shape["entries"][0]["rivals"][0]
    assert rival.keys() <= shape["entries"][0].keys()
    assert said["entries"][0]["resource"] == "order:1" and len(said["nodes"]) == 5


@pytest.mark.defaults
def test_ls_says_how_long_nodes_that_were_just_started_have_no_vote() -> None:
    with start_servers(3) as fresh:
        urls = [server.url for server in fresh]
        app = shop(urls, redlock_ttl=60)

        @app.task(base=SingletonTask, name="shop.long", shared=False, lock_ttl=90)
        def long() -> None: ...

        sites = [(Site(app=app), 90), (Site(nodes=urls), 30)]

        def said(site: Site, *options: str) -> str:
            result = CliRunner().invoke(ls, options, obj=site)
            assert result.exit_code == 0, result.output
            assert result.stderr == ""
            return str(result.stdout)

        for site, ttl in sites:
            first, last = said(site).splitlines()
            assert first == "nothing is held"
            found = re.match(r"no quorum has a vote for another (\d+) s", last)
            assert found and ttl - 20 < int(found[1]) <= ttl + 2
            assert ("default ttl of 30 s" in last) is (site.app is None)
            assert ttl - 20 < json.loads(said(site, "--json"))["votes_in"] < ttl + 2
        app.conf.redlock_restart_guard = "off"
        assert said(Site(app=app)) == "nothing is held\n"
        assert json.loads(said(Site(app=app), "--json"))["votes_in"] is None
        Redlock.from_app(app).close()


@pytest.mark.parametrize(
    ("uptimes", "seconds"),
    [
        ([5, 5, 5], 26.3),
        ([5, 9, 90], 22.3),  # the second of them makes the quorum
        ([5, 90, 90], None),
        ([5, 5], 26.3),  # the third is away, or a replica
        ([5, 90], 26.3),
        ([5], None),  # that there is no quorum is said elsewhere
        ([None, None, None], None),  # its user may not ask
    ],
)
def test_seconds_to_a_quorum_of_votes_follow_from_uptimes(
    uptimes: list[float | None], seconds: float | None
) -> None:
    app = shop([f"redis://127.0.0.1:{n}/0" for n in (1, 2, 3)], redlock_restart_guard="uptime")
    facts = [NodeInfo(uptime=uptime) for uptime in uptimes]
    others = 3 - len(facts)
    found = votes_in([*[None] * others, *facts], ADDRESSES, app)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=0.1))
    assert (
        votes_in([*[NodeInfo(role="slave", uptime=90.0)] * others, *facts], ADDRESSES, app) == found
    )
    app.conf.redlock_restart_guard = "off"
    assert votes_in([*[None] * others, *facts], ADDRESSES, app) is None


def test_server_under_two_addresses_has_one_vote_for_ls() -> None:
    app = shop([f"redis://127.0.0.1:{n}/0" for n in (1, 2, 3)], redlock_restart_guard="uptime")
    twins = [NodeInfo(run_id=run, uptime=90.0) for run in ("one", "one", "two")]
    young = [NodeInfo(run_id="one", uptime=90.0), *twins[:1], NodeInfo(run_id="two", uptime=5.0)]
    assert votes_in(twins, ADDRESSES, app) is None
    assert votes_in(young, ADDRESSES, app) == pytest.approx(26.3, abs=0.1)


def test_ls_shows_the_kinds_that_are_asked_for(cli: Cli, admins: Nodes) -> None:
    put(admins, "redlock:order:1", TOKENS[0])
    put(admins, "redlock:order:2", OTHER, px=5000)
    put(admins, "redlock:order:1#reserved", TOKENS[1])
    put(admins, "redlock:user:1", "not ours")
    assert "2 locks, 1 reservation, 1 foreign" in cli("ls").stdout
    put(admins, "redlock:order:1#fence", "17")

    def keys(*options: str) -> list[str]:
        entries = json.loads(cli("ls", "--json", *options).stdout)["entries"]
        return [f"{entry['resource']} {entry['kind']}" for entry in entries]

    plain = ["order:1 lock", "order:1 reservation", "order:2 lock", "user:1 foreign"]
    assert keys() == plain
    assert keys("--match", "order:*") == plain[:3]
    assert keys("--task", "*.refund") == ["order:2 lock"]
    assert keys("--kind", "reservation") == ["order:1 reservation"]
    assert keys("--all") == [*plain[:2], "order:1 fence", *plain[2:]]
    for order, place in (("age", 0), ("ttl", 0), ("task", 1)):
        assert keys("--sort", order, "--kind", "lock")[place] == "order:2 lock", order


def test_foreign_text_is_printable_in_every_command(cli: Cli, admins: Nodes) -> None:
    evil = Owner("h\x1b[2J", 1, "\x9b31m\u202e", task="t\n\u2066ä\ud800")
    key = "redlock:ä\x1b]0;x\x07\n\x9b"
    put(admins, key, evil.token("0" * 32, 1.7e9))
    for arguments in (("ls",), ("show", key), ("stats",), ("watch", "--count", "1")):
        result = cli(*arguments)
        assert result.exit_code == 0, result.output
        assert all(c.isprintable() or c == "\n" for c in result.output), arguments
        assert "ä" in result.output
        text = cli(*arguments, "--json").stdout
        assert json.loads(text.splitlines()[0] if arguments[0] == "watch" else text)
        assert text.isascii() and all(c.isprintable() or c == "\n" for c in text), arguments


def test_show_prints_everything_about_one_key(cli: Cli, admins: Nodes, servers: Servers) -> None:
    put(admins[:3], "redlock:order:1", TOKENS[0])
    put(admins[3:4], "redlock:order:1", OTHER)
    put(admins, "redlock:order:1#reserved", TOKENS[1])
    put(admins, "redlock:order:1#fence", "17")
    mark = mark_of(OWNER, ["order:1"])
    put(admins, "redlock:" + mark, "done")
    for admin in admins:
        since = (time.time() - 75) * 1e6
        admin.zadd("redlock:order:1#line", {"a:1": since, "b:1": since + 60e6})
    by_name, by_key = cli("show", "order:1"), cli("show", "redlock:order:1#slot2")
    assert by_name.exit_code == by_key.exit_code == 0
    assert by_name.stdout.splitlines()[0] == by_key.stdout.splitlines()[0] == "order:1"
    for part in (
        "lock: shop.charge 0123-abcd, pid 4242 on web-1, token ",
        "on 3 of 5 nodes\n",
        f"127.0.0.1:{servers[4].port}  not there",
        "but shop.refund 4567-ef01, pid 17 on web-2",
        f"on 127.0.0.1:{servers[3].port}\n",
        "reservation: shop.charge",
        "fencing token last granted: 17",
        f"done: {mark[:-5]} on 5 of 5 nodes",
    ):
        assert part in by_name.stdout
    assert re.search(r"waiting: 2, for 1 min \d+ s, 1\d s", by_name.stdout)
    assert not TOKEN.search(by_name.stdout)


WAITS = """
import sys
from celery_redlock import Redlock
with Redlock(sys.argv[1:]).lock("order:1", wait=60):
    pass
"""


def test_show_names_waiters_that_no_worker_reports_and_what_becomes_of_them(
    redlock: Redlock, cli: Cli, servers: Servers, monkeypatch: Patch
) -> None:
    urls = [server.url for server in servers]
    parked = {"resource": "order:1", "waited": 1.5, "where": "parked"}
    slot = {"resource": "order:1", "waited": 2.5, "where": "slot"}
    replies: dict[str, Any] = {"w1@h": {"waits": [parked]}}
    monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_: (replies, ""))
    site = SimpleNamespace(app=shop(urls))

    def show(*more: str) -> str:
        return str(CliRunner().invoke(group, ["show", "order:1", *more], obj=site).stdout)

    with redlock.lock("order:1", owner=OWNER):
        dead = subprocess.Popen([sys.executable, "-c", WAITS, *urls])
        try:
            wait_until(lambda: "waiting: 1" in cli("show", "order:1").stdout, 20.0, "it waits")
        finally:
            dead.kill()
            dead.wait()
        *_, who, what, then = show().splitlines()
        assert "no worker reports 1 of those that wait" in who
        assert re.fullmatch(
            r"    a release passes over the place of a dead process; all places end in"
            r" (\d+ s|1 min 0 s) if nobody else waits",
            what,
        )
        assert "the broker has delivered its message again, see " in then
        assert json.loads(show("--json"))["unreported"] == 1
        assert json.loads(cli("show", "order:1", "--json").stdout)["unreported"] is None
        for reply in ({"waits": [slot]}, {"waits": [parked], "queued": ["order:1"]}):
            replies["w1@h"] = reply
            assert "no worker reports" not in show()
    redlock.release(redlock.acquire("order:1"))  # passes over it
    assert "no node knows anything of it" in cli("show", "order:1").stdout


@pytest.mark.parametrize("score", ["-inf", "-1e308", "inf"])
def test_wait_since_an_infinite_time_is_shown_as_a_number(
    cli: Cli, admins: Nodes, score: str
) -> None:
    for admin in admins:
        admin.zadd("redlock:order:1#line", {"a:1": float(score)})
    text = cli("show", "order:1", "--json").stdout
    (entry,) = json.loads(text)["entries"]
    assert 0 <= entry["waits"][0] <= time.time(), "Infinity is no JSON"
    assert entry["held_for"] == entry["waits"][0]


def test_waiting_tasks_that_nodes_do_not_see_are_reported(
    redlock: Redlock, cli: Cli, servers: Servers, monkeypatch: Patch
) -> None:
    waits = [
        {"resource": "order:1", "task": "shop.charge", "task_id": n, "waited": w, "where": where}
        for n, w, where in (("late", 1.5, "slot"), ("early", 75.0, "parked"))
    ]
    odd = ["x", {"resource": "order:1", "waited": "long"}, {"resource": "order:2", "waited": 1.0}]
    replies: dict[str, Any] = {"w1@h": {"waits": [*odd, *waits]}, "w2@h": {"waits": 7}}
    monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_: (replies, ""))
    app = shop([server.url for server in servers])

    def with_app(*arguments: str) -> Any:
        return CliRunner().invoke(group, arguments, obj=SimpleNamespace(app=app))

    with redlock.lock("order:1", owner=OWNER):
        assert with_app("show", "order:1").stdout.splitlines()[-2:] == [
            "  waits 1 min 15 s in w1@h (parked): shop.charge early",
            "  waits 1.5 s in w1@h (in a pool slot): shop.charge late",
        ]
        unseen = "(tasks that wait parked in workers are not seen without"
        assert unseen in cli("show", "order:1").stdout
        for command in ("ls", "stats"):
            said = with_app(command).stdout.splitlines()
            table = said[: 2 if command == "ls" else 3]
            assert re.search(r"  waiting$", table[0]) and re.search(r"  1$", table[1]), said
            assert "waiting" not in cli(command).stdout  # without the app nobody knows
        (entry,) = json.loads(with_app("ls", "--json").stdout)["entries"]
        assert (entry["waiting"], entry["waits"]) == (1, [75.0])
        (line,) = with_app("watch", "--json", "--count", "1").stdout.splitlines()
        assert json.loads(line)["entry"]["waiting"] == 1
    told = with_app("show", "order:1", "--json")
    assert told.exit_code == 0  # nobody has it, but tasks wait
    assert [wait["task_id"] for wait in json.loads(told.stdout)["waits"]] == ["early", "late"]
    replies.clear()
    nobody = with_app("show", "order:1")
    assert nobody.exit_code == 1 and "no worker answered within 1 s" in nobody.stdout
    with redlock.lock("order:1", owner=OWNER):
        why = "no worker answered within 1 s: parked tasks are not counted"
        assert with_app("ls").stdout.splitlines()[-1] == why
        assert json.loads(with_app("stats", "--json").stdout)["unasked"] == why
    Redlock.from_app(app).close()


def test_show_of_a_free_key_exits_with_1(cli: Cli) -> None:
    result = cli("show", "order:1")
    assert result.exit_code == 1 and "nobody holds it" in result.output
    assert SPELLING in result.output
    assert all(text_of(text) in SPELLING for text in ("7", "a b", "a@b"))
    assert json.loads(cli("show", "order:1", "--json").stdout)["entries"] == []


def test_node_that_is_away_is_named_beside_the_answer(
    redlock: Redlock, cli: Cli, servers: Servers
) -> None:
    looks = [("ls",), ("show", "order:1"), ("stats",)]
    with redlock.lock("order:1"):
        servers[0].kill()
        for command in looks:
            result = cli(*command)
            assert result.exit_code == 0
            assert f"node 127.0.0.1:{servers[0].port} does not answer" in result.stderr
            assert "order:1" in result.stdout or command == ("stats",)
        for server in servers[1:3]:
            server.kill()
        assert cli("watch", "--count", "1").exit_code == 3
        for command in (*looks, ("release", "x"), ("bench",)):
            assert cli(*command).exit_code == 3, command
            result = cli(*command, "--json")
            assert result.exit_code == 3, command
            assert "2 of 5 nodes" in json.loads(result.stdout)["error"], command


def test_stats_count_locks_by_task(cli: Cli, admins: Nodes) -> None:
    for number in range(3):
        put(admins, f"redlock:order:{number}", TOKENS[0])
    put(admins, "redlock:order:0#slot2", TOKENS[1])
    put(admins, "redlock:order:9#reserved", OTHER)
    put(admins, "redlock:bad", "not ours", nx=True)
    for admin, token in zip(admins, (*TOKENS[:2], *TOKENS[:2]), strict=False):
        admin.set("redlock:split", token, px=9000)
        admin.zadd("redlock:order:0#line", {"a:1": 1, "b:1": 2})
    said = json.loads(cli("stats", "--json").stdout)
    charge, refund = said["tasks"]
    assert (charge["task"], charge["locks"], charge["reservations"]) == ("shop.charge", 5, 0)
    assert charge["waiting"] == 2  # for one of two slots
    assert (refund["task"], refund["locks"], refund["reservations"]) == ("shop.refund", 0, 1)
    assert charge["oldest"] > 0 and refund["oldest"] is None
    assert (said["splits"], said["leaks"], said["foreign"]) == (1, 1, 1)
    assert all(node["rtt"] > 0 for node in said["nodes"])
    text = cli("stats").stdout
    assert "1 split vote, 1 key without a ttl, 1 not of ours" in text and "shop.charge" in text


def test_watch_prints_each_change_once(
    redlock: Redlock, servers: Servers, admins: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    say, key = Changes(for_programs=False), "redlock:order:1"

    def look() -> list[str]:
        say(survey(redlock, kinds=("lock", "foreign"), timeout=20))
        return [line[9:] for line in capsys.readouterr().out.splitlines()]

    assert look() == []
    put(admins, key, TOKENS[0])
    (line,) = look()
    assert line.startswith("+ order:1 shop.charge 0123-abcd, pid 4242 on web-1, token ")
    assert look() == []
    put(admins, key, TOKENS[1])
    (line,) = look()
    assert line.startswith("~ order:1 shop.charge")
    put(admins[:1], key, TOKENS[1], keepttl=False)
    (line,) = look()
    assert line.endswith("no ttl")
    for admin in admins:
        admin.delete(key)
    (line,) = look()
    assert line.startswith("- order:1 is free")
    servers[0].kill()
    (line,) = look()
    assert line.startswith(f"! node 127.0.0.1:{servers[0].port} does not answer")
    servers[0].start()
    assert look() == [f"node 127.0.0.1:{servers[0].port} answers again"]
    say("no quorum")
    say("no quorum")
    assert [line[9:] for line in capsys.readouterr().out.splitlines()] == ["no quorum"]
    assert look() == ["a quorum of nodes answers again"]


def test_watch_for_programs_prints_one_json_object_a_line(cli: Cli, admins: Nodes) -> None:
    put(admins, "redlock:order:1", TOKENS[0])
    lines = cli("watch", "--json", "--count", "2", "--interval", "0.1").stdout.splitlines()
    (said,) = map(json.loads, lines)
    assert said["event"] == "new" and said["entry"]["resource"] == "order:1"


PROGRAM = "import sys; {}from celery_redlock.cli import main; main()"


@pytest.fixture
def program(servers: Servers, tmp_path: Path) -> Callable[..., list[str]]:
    """Makes command lines; without rich as where it is not installed."""

    def made(*arguments: str, rich: bool = True) -> list[str]:
        script = tmp_path / f"{'with' if rich else 'without'}.py"
        script.write_text(PROGRAM.format("" if rich else "sys.modules['rich'] = None; "))
        return [str(script), "--nodes", ",".join(server.url for server in servers), *arguments]

    return made


def on_terminal(
    command: list[str], until: Callable[[str], bool], end: bool, columns: int = 160
) -> tuple[str, int]:
    """Run a command on a terminal until its screen has something; its exit code."""
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    program = [sys.executable, "-m", forked.MODULE, forked.PROGRAM, *command]
    with os.fdopen(its, "wb") as output:
        process = forked.start(program, cwd=Path.cwd(), env=environment, output=output)
    text = b""

    def read() -> bool:
        nonlocal text
        if select.select([ours], [], [], 0.05)[0]:
            try:
                text += os.read(ours, 65536)
            except OSError:  # it has ended
                return True
        return until(text.decode("utf-8", "replace"))

    try:
        wait_until(read, 30, "the screen shows it")
        if end:
            process.send_signal(signal.SIGINT)
        wait_until(lambda: read() and process.poll() is not None, 30, "it ends")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return text.decode("utf-8", "replace"), process.returncode


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "without rich"])
def test_terminal_gets_tables_with_rich_and_plain_text_without(
    program: Callable[..., list[str]], admins: Nodes, rich: bool
) -> None:
    put(admins, "redlock:order:1", TOKENS[0])
    command = program("watch", "--interval", "0.1", rich=rich)
    text, code = on_terminal(command, lambda text: "shop.charge" in text, end=True)
    assert code == 0
    assert "Traceback" not in text and "Aborted" not in text
    assert ("in use" in text) is rich
    text, code = on_terminal(program("ls", rich=rich), lambda text: "1 lock" in text, end=False)
    assert code == 0 and "shop.charge" in text
    assert rich or "\x1b" not in text


def test_watch_on_a_narrow_terminal_has_one_line_a_lock(
    program: Callable[..., list[str]], admins: Nodes
) -> None:
    task_id = "8c1f02d0-5b5e-4be4-9d0c-0123456789ab"
    owner = Owner("a-host-with-a-long-name.example.org", 4242, task_id, task="shop.orders.charge")
    for order in ("12345", "67890"):
        put(admins, f"redlock:order:{order}", owner.token("0" * 32, 1.7e9))
    command = program("watch", "--interval", "0.1", "--count", "1")
    text, code = on_terminal(command, lambda text: "order:67890" in text, end=False, columns=80)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for order in ("12345", "67890"):
        whole = rf"order:{order} +shop\.orders\.charge +8c1f02d0 +\d+ d \d+ h +5/5"
        assert re.search(whole, plain), plain
    assert code == 0 and "host" not in plain and task_id not in plain
    text, code = on_terminal(program("ls"), lambda text: "2 locks" in text, end=False, columns=80)
    head, *locks, total = text.splitlines()[:4]  # then perhaps that the nodes are new
    assert code == 0 and head.startswith("key") and total == "2 locks" and len(head) <= 80
    for line, order in zip(locks, ("12345", "67890"), strict=True):
        assert line.startswith(f"order:{order}  shop.orders.charge  8c1f02d0") and len(line) <= 80
    wide, code = on_terminal(
        program("ls", "--wide"), lambda text: "2 locks" in text, end=False, columns=80
    )
    assert code == 0 and task_id in wide and owner.host in wide


def test_bench_measures_and_leaves_nothing(cli: Cli, admins: Nodes) -> None:
    result = cli("bench", "--seconds", "0.3", "--concurrency", "2", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    for what in ("acquire", "release"):
        assert said[what]["count"] > 0 and 0 < said[what]["p50"] <= said[what]["p99"], what
    trip = sorted(node["rtt"] for node in said["nodes"])[2]
    pair = said["acquire"]["p50"] + said["release"]["p50"]
    assert said["quorum_round_trip"] == trip and said["left"] == 0
    assert said["ratio"] == pytest.approx(pair / 2 / trip)
    assert all(admin.keys() == [] for admin in admins)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min")),
        (90_061, "1 d 1 h"),
    ],
)
def test_span_of_seconds_is_printed_short(seconds: float, text: str) -> None:
    assert span(seconds) == text
