"""`doctor`: each thing that can be wrong with nodes is provoked on real servers, and found."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock
from celery_redlock.cli import main
from celery_redlock.cli.context import Site
from celery_redlock.cli.doctor import command as doctor
from celery_redlock.doctor import CHECKS
from celery_redlock.doctor.nodes import examine_nodes
from celery_redlock.doctor.probe import Answers, Probe
from celery_redlock.doctor.report import NEED_APP
from celery_redlock.locking import pauses
from celery_redlock.server import LocalServer, start_servers
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.survey.models import NodeLook
from tests.support.names import Servers
from tests.support.nodes import ACL_RULE, make_known, with_acl_user
from tests.support.proxy import Proxy
from tests.tools.cli.clinic import HOSTS, Forger, examined, found, shop, url

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is of its own on Linux alone"),
    pytest.mark.usefixtures("no_worker"),
]

EVERYTHING = ["+time", "+scan", "+zcard", "+zrange"]
"""Rights that the doctor needs to look, besides those of locks."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    """Three, as if on three hosts; and a user for the locks."""
    config = [*HOSTS, *with_acl_user(), *EVERYTHING, "--appendonly", "yes"]
    with start_servers(3, config=config) as started:
        yield started


@pytest.fixture
def healthy(servers: Servers) -> Iterator[list[str]]:
    """The nodes of a site with which nothing is wrong."""
    make_known(servers)
    yield [url(server, host) for host, server in enumerate(servers, 1)]
    for server in servers:
        with redis.Redis(port=server.port) as client:
            client.flushall()


def nodes(*urls: str) -> Site:
    return Site(nodes=urls)


def command(server: LocalServer, *words: Any) -> None:
    with redis.Redis(port=server.port) as client:
        client.execute_command(*words)


def test_doctor_finds_nothing_on_a_healthy_site(healthy: list[str], servers: Servers) -> None:
    code, report = examined(nodes(*healthy))
    assert report["findings"] == [] and code == 0 and report["ok"]
    assert set(report["fine"]) == set(CHECKS) - set(NEED_APP)
    assert all(node["rtt"] > 0 for node in report["nodes"]) and len(report["nodes"]) == 3
    assert set(report["skipped"]) == set(NEED_APP)  # and it says so
    of_locks = [url(server, host, "redlock:SECRET@") for host, server in enumerate(servers, 1)]
    assert examined(nodes(*of_locks))[1]["findings"] == []


def test_doctor_prints_fine_checks_and_nodes_on_one_line_each(healthy: list[str]) -> None:
    said = CliRunner().invoke(doctor, [], obj=nodes(*healthy)).output.splitlines()
    assert [line.split(" ")[0] for line in said] == ["nodes", "ok", "left", "", "Nothing"]
    assert said[1].removeprefix("ok").strip().split(", ") == [
        check for check in CHECKS if check not in NEED_APP
    ]
    assert said[0].count(" ms)") == 3


def test_doctor_finds_a_node_that_is_down_and_one_that_hangs(
    healthy: list[str], servers: Servers
) -> None:
    with Proxy(servers[0].port) as proxy:
        proxy.mode = "mute"
        code, report = examined(nodes(healthy[0], "redis://127.0.0.2:1/0", url(proxy, 1)))
    away = [one for one in report["findings"] if one["check"] == "reachable"]
    fixes = {one["where"]: one["fix"] for one in away}
    assert fixes["127.0.0.2:1"].startswith("start it, or open the way to it; ")
    asked = "it accepts connections and does not answer: stopped, swapping or busy? "
    assert fixes[f"127.0.0.1:{proxy.port}"].startswith(asked)
    assert code == 1 and {one["level"] for one in away} == {"wrong"}
    assert {one["where"] for one in away} == {"127.0.0.2:1", f"127.0.0.1:{proxy.port}"}
    # What could not be looked at there is not called fine.
    assert not {"role", "version", "eviction", "rights", "leaks"} & set(report["fine"])


def test_doctor_reports_a_missing_quorum_first(healthy: list[str]) -> None:
    gone = ["redis://127.0.0.2:1/0", "redis://127.0.0.3:2/0"]
    code, report = examined(nodes(healthy[0], *gone))
    first = report["findings"][0]
    assert code == 1 and (first["level"], first["check"]) == ("wrong", "quorum")
    said = "no quorum: 1 of 3 nodes answer, 2 are needed: nothing can be locked"
    assert first["what"] == said and "bring nodes back" in first["fix"]
    # And no node's keys are called fine.
    assert not {"leaks", "prefix"} & set(report["fine"])
    _code, report = examined(nodes(*healthy[:2], gone[0]))
    assert "quorum" in report["fine"]


def test_doctor_reports_one_finding_for_one_bad_node(healthy: list[str]) -> None:
    with start_servers(1, config=["--bind", "127.0.0.3", "--cluster-enabled", "yes"]) as (cluster,):
        for third, check in ((url(cluster, 3), "role"), ("redis://127.0.0.3:1/0", "reachable")):
            _code, report = examined(nodes(*healthy[:2], third))
            (found_,) = report["findings"]
            assert (found_["level"], found_["check"]) == ("wrong", check)
            if check == "reachable":  # what nobody could see there is not called fine
                assert {"leaks", "prefix"} <= set(found_["hides"])


NOTHING = ["resetkeys", "resetchannels", "nocommands"]


@pytest.mark.parametrize(
    "rule",
    [
        NOTHING,
        [*NOTHING, "+get", "+set", "+client|setname"],
        [*NOTHING, "+@all"],
        [*ACL_RULE, "-client|setname", "-evalsha", "resetchannels"],
        ["~*", "&*", "+@all", "-publish", "-subscribe", "-set"],
    ],
    ids=" ".join,
)
def test_doctor_names_all_missing_rights_in_one_run(
    healthy: list[str], servers: Servers, rule: list[str]
) -> None:
    """After its advice has been followed once, no right is missing any more."""
    for server in servers:
        command(server, "ACL", "DELUSER", "poor")
        command(server, "ACL", "SETUSER", "poor", "on", ">SECRET", *rule)
    poor = nodes(*(url(server, n, "poor:SECRET@") for n, server in enumerate(servers, 1)))
    _code, report = examined(poor)
    fix = found(report, "wrong")["rights"]["fix"]
    assert fix.startswith("ACL SETUSER poor +") or fix.startswith("ACL SETUSER poor ~"), fix
    for server in servers:
        command(server, *fix.split())
    _code, report = examined(nodes(*(poor.nodes or ())))
    assert not [one for one in report["findings"] if one["level"] != "unchecked"]


def test_doctor_finds_a_replica_and_a_member_of_a_cluster(healthy: list[str]) -> None:
    with (
        start_servers(1, config=["--cluster-enabled", "yes"]) as (cluster,),
        start_servers(1, config=HOSTS) as (replica,),
    ):
        command(replica, "REPLICAOF", "127.0.0.1", healthy[0].split(":")[2][:-2])
        code, report = examined(nodes(healthy[2], url(replica, 2), url(cluster)))
    found_roles = {o["where"]: o["what"] for o in report["findings"] if o["check"] == "role"}
    assert code == 1
    assert "a replica of 127.0.0.1:" in found_roles[f"127.0.0.2:{replica.port}"]
    assert "a Redis Cluster" in found_roles[f"127.0.0.1:{cluster.port}"]


@pytest.mark.parametrize("user", ["", "blind:SECRET@"], ids=["by run_id", "without INFO"])
def test_doctor_finds_one_server_under_two_addresses(servers: Servers, user: str) -> None:
    blind = [word for word in ACL_RULE if word != "+info"]
    for server in servers:
        command(server, "ACL", "SETUSER", "blind", *blind)
    twice = [url(servers[0], 1, user), url(servers[1], 2, user), url(servers[0], 3, user)]
    code, report = examined(nodes(*twice))
    port = servers[0].port
    assert code == 1
    assert found(report, "wrong")["twins"]["where"] == f"127.0.0.1:{port} and 127.0.0.3:{port}"


NOBODY = ["redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0"]


@pytest.mark.parametrize("away", [1, 2])
def test_doctor_counts_one_vote_for_one_server_under_two_addresses_as_a_lock_does(
    servers: Servers, away: int
) -> None:
    other = [url(servers[1], 2), url(servers[2], 3)][: 3 - away]
    five = [url(servers[0], 1), url(servers[0], 2), *other, *NOBODY[:away]]
    _code, report = examined(nodes(*five))
    wrong = found(report, "wrong")
    assert "only the one to which a process connects first has a vote" in wrong["twins"]["what"]
    with contextlib.closing(Redlock(five, restart_guard="off")) as lock:
        if away == 1:
            assert "quorum" in report["fine"] and lock.release(lock.acquire("order:7"))
            return
        with pytest.raises(QuorumUnavailable):
            lock.acquire("order:7")
    said = "no quorum: 2 of 5 nodes can grant a lock, 3 are needed: nothing can be locked, and"
    assert wrong["quorum"]["what"] == f"{said} reachable and twins say why"


def test_doctor_finds_two_spellings_of_one_address(servers: Servers) -> None:
    """A `Redlock` refuses such nodes; the doctor reports them and goes on."""
    port = servers[0].port
    app = shop([f"redis://localhost:{port}/0", f"redis://127.0.0.1:{port}/0"])
    code, report = examined(Site(app=app))
    assert code == 1
    assert "are the same server" in found(report, "wrong")["configuration"]["what"]
    assert "reachable" not in report["fine"]


def test_doctor_warns_of_an_even_number_of_nodes_and_of_nodes_on_one_host(
    healthy: list[str], servers: Servers
) -> None:
    code, report = examined(nodes(*healthy[:2]))
    assert code == 0 and set(found(report, "warning")) == {"even"}
    assert examined(nodes(*healthy[:2]), "--strict")[0] == 1
    code, report = examined(nodes(*(url(server) for server in servers)))
    assert code == 0 and "3 of 3 votes are gone" in found(report, "warning")["hosts"]["what"]


LRU = {"maxmemory-policy": "allkeys-lru"}


@pytest.mark.parametrize(
    ("settings", "check"),
    [(LRU, ""), ({**LRU, "maxmemory": "100mb"}, "eviction"), ({"maxmemory": "1"}, "writes")],
    ids=["never full", "evicts", "full"],
)
def test_doctor_finds_a_node_that_evicts_or_takes_no_writes(
    healthy: list[str], servers: Servers, settings: dict[str, str], check: str
) -> None:
    with redis.Redis(port=servers[1].port) as client:
        for name, value in settings.items():
            client.config_set(name, value)
        try:
            _code, report = examined(nodes(*healthy))
        finally:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")
    wrong = {one["check"]: one["where"] for one in report["findings"]}
    assert wrong == ({check: f"127.0.0.2:{servers[1].port}"} if check else {})
    for one in report["findings"]:
        assert re.search(r"it uses \d+ of (104857600|1) bytes\b", one["what"])
        assert "CONFIG SET maxmemory BYTES" in one["fix"]


def test_doctor_has_the_remedy_for_a_node_without_its_replicas(
    healthy: list[str], servers: Servers
) -> None:
    with redis.Redis(port=servers[1].port) as client:
        client.config_set("min-replicas-to-write", 1)
        try:
            _code, report = examined(nodes(*healthy))
        finally:
            client.config_set("min-replicas-to-write", 0)
    (one,) = report["findings"]
    assert one["check"] == "writes" and "CONFIG SET min-replicas-to-write 0" in one["fix"]


def fill(client: redis.Redis) -> None:
    """Write to a server with a limit of memory until it accepts no more."""
    limit = client.info("memory")["used_memory"] + 500_000
    client.config_set("maxmemory", limit)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        for number in range(1000):
            client.set(f"theirs:{number}", "x" * 10_000)
    client.config_set("maxmemory", limit - 300_000)  # buffers that come free make no room


@pytest.fixture
def full(healthy: list[str], servers: Servers) -> Iterator[Callable[[int], str]]:
    """Return a function that fills a node, and returns its URL."""
    with contextlib.ExitStack() as stack:

        def filled(index: int) -> str:
            client = stack.enter_context(redis.Redis(port=servers[index].port))
            stack.callback(client.config_set, "maxmemory", 0)
            fill(client)
            return healthy[index]

        yield filled


def without(word: str, servers: Servers, index: int) -> str:
    """Return a node's URL with a user that lacks one right of those of locks."""
    user = f"lacks{index}"
    rule = [*(kept for kept in ACL_RULE if kept != word), *EVERYTHING]
    command(servers[index], "ACL", "SETUSER", user, "reset")
    command(servers[index], "ACL", "SETUSER", user, *rule)
    return url(servers[index], index + 1, f"{user}:SECRET@")


TOO_FEW_GRANT = "no quorum: 1 of 3 nodes can grant a lock, 2 are needed: nothing can be locked"


def assert_no_quorum(report: dict[str, Any], *checks: str) -> None:
    quorum = found(report, "wrong")["quorum"]
    why = f"{' and '.join(checks)} {'say' if checks[1:] else 'says'} why"
    assert quorum["what"] == f"{TOO_FEW_GRANT}, and {why}"
    assert quorum["fix"].startswith("mend what is named there")
    assert set(checks) <= set(found(report, "wrong")) and "quorum" not in report["fine"]


def test_doctor_counts_full_nodes_as_granting_nothing(
    healthy: list[str], full: Callable[[int], str]
) -> None:
    full(1)
    _code, report = examined(nodes(*healthy))
    assert "quorum" in report["fine"] and set(found(report, "wrong")) == {"writes"}
    full(2)
    code, report = examined(nodes(*healthy))
    assert code == 1 and report["findings"][0]["check"] == "quorum"
    assert_no_quorum(report, "writes")


@pytest.mark.parametrize("word", ["+set", "+eval", "+evalsha", "~redlock:*"])
def test_doctor_counts_nodes_whose_user_may_not_lock_as_granting_nothing(
    healthy: list[str], servers: Servers, word: str
) -> None:
    poor = [without(word, servers, index) for index in (1, 2)]
    assert "quorum" in examined(nodes(*healthy[:2], poor[1]))[1]["fine"]
    _code, report = examined(nodes(healthy[0], *poor))
    assert_no_quorum(report, "rights")
    refusal = pytest.raises((QuorumUnavailable, ConfigurationError))
    with contextlib.closing(Redlock([healthy[0], *poor])) as lock, refusal:
        lock.acquire("order:7")


def test_doctor_counts_a_node_as_granting_whose_user_only_waits_slower(
    healthy: list[str], servers: Servers
) -> None:
    poor = [without("+zadd", servers, index) for index in (1, 2)]
    assert "quorum" in examined(nodes(healthy[0], *poor))[1]["fine"]


def test_doctor_names_all_checks_that_say_why_there_is_no_quorum(
    healthy: list[str], servers: Servers, full: Callable[[int], str]
) -> None:
    wrong_password = url(servers[2], 3, "redlock:SECRETIVE@")
    poor = without("+set", servers, 1)
    _code, report = examined(nodes(healthy[0], poor, wrong_password))
    assert_no_quorum(report, "reachable", "rights")
    unnamed = without("+client|setname", servers, 2)
    _code, report = examined(nodes(healthy[0], full(1), unnamed))
    assert_no_quorum(report, "rights", "writes")


def test_doctor_does_not_count_the_vote_of_a_full_node(
    healthy: list[str], full: Callable[[int], str]
) -> None:
    with start_servers(1, config=HOSTS) as (fresh,):
        conf = {"redlock_ttl": 60, "redlock_restart_guard": "uptime"}
        site = Site(app=shop([healthy[0], full(1), url(fresh, 3)], **conf))
        _code, report = examined(site)
    quorum = found(report, "wrong")["quorum"]
    assert "1 of 3 nodes have a vote and can grant a lock, 2 are needed" in quorum["what"]
    assert quorum["fix"].startswith("wait ")


@pytest.mark.parametrize("count", [1, 2], ids=["one of three", "a majority"])
def test_doctor_finds_nodes_that_were_just_started(healthy: list[str], count: int) -> None:
    with start_servers(count, config=HOSTS) as fresh:
        new = [url(server, 3 - index) for index, server in enumerate(fresh)]
        urls = [*healthy[: 3 - count], *new]
        on = {"redlock_ttl": 60, "redlock_restart_guard": "uptime"}
        _code, guarded = examined(Site(app=shop(urls, **on)))
        _code, off = examined(Site(app=shop(urls, redlock_restart_guard="off")))
    for report, words in ((guarded, "no vote for"), (off, "redlock_restart_guard is off")):
        assert words in found(report, "warning")["restart"]["what"]
        named = found(report, "warning")["restart"]["where"]
        assert set(named.split(", ")) <= {one.removeprefix("redis://")[:-2] for one in new}
    assert "quorum" not in found(off, "wrong")
    first = guarded["findings"][0]
    assert ("1 of 3 nodes have a vote, 2 are needed" in first["what"]) is (count == 2)


@pytest.mark.defaults
def test_doctor_without_an_app_counts_with_the_default_ttl(healthy: list[str]) -> None:
    with start_servers(2, config=HOSTS) as fresh:
        new = [url(server, 3 - index) for index, server in enumerate(fresh)]
        _code, report = examined(nodes(healthy[0], *new))
    quorum = found(report, "wrong")["quorum"]
    assert "1 of 3 nodes have a vote" in quorum["what"]
    assert re.match(r"wait (2\d|3[01]) s, with the default ttl; tasks then", quorum["fix"])


@pytest.mark.parametrize(
    ("conf", "warned"), [({}, True), ({"redlock_restart_guard": "uptime"}, False)], ids=str
)
def test_doctor_warns_that_a_single_unguarded_node_forgets(
    conf: dict[str, Any], warned: bool
) -> None:
    with start_servers(1, config=HOSTS) as (fresh,):
        _code, report = examined(Site(app=shop([url(fresh, 1)], **conf)))
    restart = found(report, "warning").get("restart", {}).get("what", "")
    assert ("if it restarts it forgets its locks, and votes at once" in restart) is warned
    assert "restart" not in report["fine"] or not warned


def ahead(reply: bytes) -> bytes:
    return reply[:-10] + b"%d" % (time.time() + 100)


def old(line: bytes) -> bytes:
    return line.split(b":")[0] + b":6.0." + b"9" * (len(line.split(b":")[1]) - 4)


CLOCK = (rb"\*2\r\n\$10\r\n\d{10}", ahead, "warning", r"(100\.0|99\.\d) s ahead of ours")
VERSION = (rb"redis_version:[\d.]+", old, "wrong", r"is Redis 6\.0\.9")


@pytest.mark.parametrize(("check", "case"), [("clock", CLOCK), ("version", VERSION)])
def test_doctor_finds_a_clock_that_differs_and_a_server_that_is_too_old(
    healthy: list[str], servers: Servers, check: str, case: Any
) -> None:
    pattern, change, level, words = case
    with Forger(servers[1].port, pattern, change) as forger:
        _code, report = examined(nodes(healthy[0], url(forger), healthy[2]))
    finding = found(report, level)[check]
    assert finding["where"] == f"127.0.0.1:{forger.port}" and re.search(words, finding["what"])


def test_doctor_survives_a_malformed_version() -> None:
    look = NodeLook("node", True, "", 0.001)
    told = Answers(info={"redis_version": "7." + "9" * 5000}, ahead=0.0)
    probes = [Probe(index, parse_nodes(["redis://node"])[0], look, told) for index in range(3)]
    assert "version" not in {it.check for it in examine_nodes(probes, "redlock:", [], None)}


@pytest.mark.parametrize("word", [word for word in ACL_RULE if word[0] in "+~&"])
def test_doctor_names_every_missing_right(servers: Servers, word: str) -> None:
    rest = [kept for kept in (*ACL_RULE, *EVERYTHING) if kept != word]
    command(servers[0], "ACL", "SETUSER", "lacking", "reset")
    command(servers[0], "ACL", "SETUSER", "lacking", *rest)
    code, report = examined(nodes(url(servers[0], 1, "lacking:SECRET@")))
    named = {one["fix"] for one in report["findings"] if one["fix"].startswith("ACL")}
    assert f"ACL SETUSER lacking {word}" in named
    slower = {"+publish", "+subscribe", "+zadd", "+zrem", "+zpopmin", "+info", "&"}
    assert code == (0 if word in slower or word[0] == "&" else 1)


def test_doctor_does_not_call_fine_what_it_may_not_read(servers: Servers) -> None:
    blind = [word for word in ACL_RULE if word != "+info"]
    command(servers[0], "ACL", "SETUSER", "blind", "reset")
    command(servers[0], "ACL", "SETUSER", "blind", *blind)
    code, report = examined(nodes(url(servers[0], 1, "blind:SECRET@")))
    unchecked = found(report, "unchecked")
    assert code == 0  # nothing is known to be wrong
    assert {"role", "clock", "leaks"} == set(unchecked)  # each once, not by what they hide
    hidden = {"role", "clock", "leaks", "version", "eviction", "prefix"}
    assert not hidden & set(report["fine"])


def test_doctor_shows_no_password_that_was_refused(servers: Servers) -> None:
    _code, report = examined(nodes(url(servers[0], 1, "redlock:SECRETIVE@")))
    assert "it refuses us" in found(report, "wrong")["reachable"]["what"]
    assert not {"role", "twins", "version", "rights", "clock"} & set(report["fine"])


@pytest.mark.defaults
def test_doctor_names_a_wrong_password_before_nodes_that_have_just_started() -> None:
    with start_servers(3) as fresh:
        command(fresh[0], "CONFIG", "SET", "requirepass", "SECRET")
        _code, report = examined(Site(app=shop([server.url for server in fresh])))
    first, second = report["findings"][:2]
    assert (first["check"], second["check"]) == ("reachable", "quorum")
    assert "right user and password" in first["fix"] and second["fix"].startswith("wait ")


def test_doctor_finds_a_ttl_too_short_for_the_round_trip(servers: Servers) -> None:
    with Proxy(servers[1].port, delay=0.1) as slow:
        slow.mode = "late"
        app = shop([url(servers[0], 1), url(slow), url(servers[2], 3)], redlock_ttl=0.5)
        _code, report = examined(Site(app=app), "--timeout", "5")
    ttl = next(one for one in report["findings"] if one["check"] == "ttl")
    assert f"127.0.0.1:{slow.port}" in ttl["where"] and "a ttl of 0.5 s" in ttl["what"]


def test_doctor_finds_leaks_and_foreign_keys_under_the_prefix(
    healthy: list[str], servers: Servers
) -> None:
    assert examined(nodes(*healthy))[0] == 0
    command(servers[0], "SET", "redlock:leak", "x")
    command(servers[0], "SET", "redlock:theirs", "x", "EX", "100")
    code, report = examined(nodes(*healthy))
    leak = found(report, "wrong")["leaks"]
    assert code == 1 and leak["where"] == "redlock:leak"
    assert f"on 127.0.0.1:{servers[0].port}:" in leak["what"]
    assert found(report, "warning")["prefix"]["where"] == "redlock:leak, redlock:theirs"


def test_doctor_names_pauses_and_limits_in_force_and_the_command_that_ends_each(
    healthy: list[str],
) -> None:
    with contextlib.closing(Redlock(healthy)) as lock:
        pauses.begin(lock, "order:a b*", 600, "alice@web-1", "a bad release")
        pauses.begin(lock, "mail:*", 600, "", limit=2)
        code, report = examined(nodes(*healthy))
        warnings = {one["where"]: one for one in report["findings"]}
        assert code == 0 and {one["check"] for one in warnings.values()} == {"pauses"}
        paused, limited = warnings["order:a b*"], warnings["mail:*"]
        assert re.fullmatch(
            r"paused by alice@web-1 for \d\.\d s, since 20[-\d]+ [:\d]+ UTC, because of: a bad"
            r" release; no body of such a key begins until 20[-\d]+ [:\d]+ UTC",
            paused["what"],
        )
        assert "limited for" in limited["what"] and "no more than 2 bodies" in limited["what"]
        for one in warnings.values():
            words = shlex.split(one["fix"].partition(", unless")[0])[2:]  # without celery redlock
            assert CliRunner().invoke(main, ["--nodes", ",".join(healthy), *words]).exit_code == 0
    assert examined(nodes(*healthy))[1]["findings"] == []


def test_doctor_checks_are_all_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \|$", page, re.M)
    assert list(dict.fromkeys(rows))[: len(CHECKS)] == list(CHECKS)  # some have several rows
