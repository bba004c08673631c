"""`doctor` over PostgreSQL: each thing that can be wrong with a database is provoked, and found."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from celery_redlock import Redlock
from celery_redlock.cli import main
from celery_redlock.cli.context import Site
from celery_redlock.doctor import postgresql
from celery_redlock.doctor.quorum import GRANTING_CHECKS
from celery_redlock.doctor.report import NEED_APP, POSTGRESQL_CHECKS
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.stores.postgresql.reader import PostgresReader
from celery_redlock.survey.reader import read_nodes
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.certificates import Authority
from tests.support.names import Patch
from tests.support.postgres_sites import (
    empty_server,
    execute,
    new_database,
    open_folder,
    pooler,
    standby_of,
    url_of,
)
from tests.support.wait import wait_until
from tests.tools.cli.clinic import examined, found, shop

pytestmark = pytest.mark.usefixtures("no_worker")

GRANTS = (
    "GRANT SELECT, INSERT, UPDATE, DELETE ON redlock_lease, redlock_waiter, redlock_memory"
    " TO worker"
)
ROLE = "DO $$ BEGIN CREATE ROLE worker LOGIN; EXCEPTION WHEN OTHERS THEN END $$"


@pytest.fixture(scope="module")
def host() -> Iterator[LocalPostgres]:
    """Yield a server that keeps what it has acknowledged."""
    with empty_server(fsync="on") as host:
        yield host


@pytest.fixture
def database(host: LocalPostgres) -> str:
    return new_database(host)


def of(*urls: str) -> Site:
    return Site(nodes=urls)


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


def only(url: str, check: str, level: str = "wrong", *more: str) -> dict[str, Any]:
    """The one finding of a site, besides the missing quorum that it explains."""
    code, report = examined(of(url))
    one, *others = [one for one in report["findings"] if one["check"] not in (*more, "quorum")]
    assert not others, others
    assert (one["check"], one["level"]) == (check, level), report["findings"]
    if check in GRANTING_CHECKS:
        said = f"can grant a lock, 1 is needed: nothing can be locked, and {check} says why"
        assert found(report, "wrong")["quorum"]["what"] == f"no quorum: 0 of 1 node {said}"
    else:
        assert "quorum" in report["fine"]
    assert code == (level == "wrong")
    assert not set(one["hides"]) & set(report["fine"])
    return one


def test_doctor_finds_nothing_on_a_healthy_database(database: str, host: LocalPostgres) -> None:
    code, report = examined(of(database))
    assert report["findings"] == [] and code == 0 and report["ok"]
    assert set(report["fine"]) == set(POSTGRESQL_CHECKS) - set(NEED_APP)
    (node,) = report["nodes"]
    assert node["name"] == f"127.0.0.1:{host.port}/{name_of(database)}" and node["rtt"] > 0
    _code, report = examined(Site(app=shop([database])))
    assert [one["check"] for one in report["findings"]] == ["workers"]
    assert {"restart", "ttl"} <= set(report["fine"])


def test_doctor_leaves_nothing_behind_in_the_database(database: str) -> None:
    before = execute(database, "SELECT memory, since::text FROM redlock_memory")
    examined(of(database))
    for table in ("redlock_lease", "redlock_waiter"):
        assert execute(database, f"SELECT * FROM {table}") == []
    assert execute(database, "SELECT memory, since::text FROM redlock_memory") == before


def test_doctor_finds_tables_that_are_missing_old_or_out_of_the_search_path(
    host: LocalPostgres,
) -> None:
    url = new_database(host, tables=False)
    # That no keys can be read there goes without saying.
    one = only(url, "tables", "wrong", "leaks")
    assert "its tables are missing" in one["what"] and "celery redlock migrate" in one["fix"]
    execute(url, "CREATE SCHEMA locks; SET search_path = locks;" + postgres.SCHEMA)
    one = only(url, "tables", "wrong", "leaks")
    assert "in the schema locks, where 'postgres' does not look" in one["what"]
    assert one["fix"] == 'ALTER ROLE "postgres" SET search_path = locks'
    execute(url, f"ALTER DATABASE {name_of(url)} SET search_path = locks")
    assert examined(of(url))[1]["findings"] == []
    old = "CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 0'"
    execute(url, old)
    assert "of version 0, and this library wants 2" in only(url, "tables")["what"]


def test_doctor_finds_missing_rights_and_names_the_least_that_suffice(
    host: LocalPostgres, database: str
) -> None:
    execute(database, ROLE)
    url = url_of(host, user="worker", database=name_of(database))
    one = only(url, "rights", "wrong", "leaks")
    assert "the user 'worker' lacks a right: permission denied for" in one["what"]
    execute(database, one["fix"].partition(";")[0])
    assert examined(of(url))[1]["findings"] == []
    # Each of them is needed: it is tried.
    for right in ("INSERT", "UPDATE", "DELETE"):
        execute(database, f"REVOKE {right} ON redlock_lease FROM worker")
        assert "redlock_lease" in only(url, "rights")["what"]
        execute(database, GRANTS)
    execute(database, "REVOKE DELETE ON redlock_waiter FROM worker")
    assert "redlock_waiter" in only(url, "rights")["what"]


def test_doctor_finds_roles_that_could_have_their_code_executed(
    host: LocalPostgres, database: str
) -> None:
    execute(database, ROLE)
    execute(database, GRANTS)
    url = url_of(host, user="worker", database=name_of(database))
    owner = "CREATE SCHEMA worker AUTHORIZATION worker; GRANT ALL ON SCHEMA worker TO worker;"
    execute(database, f"{owner} GRANT ALL ON SCHEMA public TO postgres")
    assert examined(of(url))[1]["findings"] == []
    execute(database, "GRANT CREATE ON SCHEMA public TO PUBLIC, worker")
    execute(database, "GRANT ALL ON redlock_memory TO worker")
    trigger = "AFTER INSERT ON redlock_lease EXECUTE FUNCTION suppress_redundant_updates_trigger()"
    execute(database, f'CREATE TRIGGER "of theirs" {trigger}')
    execute(database, 'ALTER TABLE redlock_lease DISABLE TRIGGER "of theirs"')
    for user in (url, database):
        findings = examined(of(user))[1]["findings"]
        assert {(one["check"], one["level"]) for one in findings} == {("neighbours", "warning")}
        granted = ("{} on {} is granted to {}", "REVOKE {} ON {} FROM {}")
        rights = [("CREATE", "SCHEMA public", role) for role in ("PUBLIC", "worker")]
        rights.append(("TRIGGER", "TABLE redlock_memory", "worker"))
        said = {one["what"].partition(":")[0]: one["fix"] for one in findings}
        assert said.pop('redlock_lease has the trigger "of theirs"') == (
            'DROP TRIGGER "of theirs" ON redlock_lease'
        )
        assert said == dict(tuple(text.format(*r) for text in granted) for r in rights)
    for one in findings:
        execute(database, one["fix"])
    assert examined(of(url))[1]["findings"] == []


SAME_NAME = "FUNCTION app.redlock_free() RETURNS int LANGUAGE sql AS 'SELECT 1'"
NEIGHBOURS = {
    "CREATE SCHEMA app AUTHORIZATION other": "SCHEMA app of the search_path belongs to other",
    "CREATE SCHEMA worker AUTHORIZATION other": "SCHEMA worker of the search_path belongs to other",
    "GRANT CREATE ON DATABASE {} TO other": "CREATE on DATABASE {} is granted to other",
    "ALTER TABLE redlock_lease OWNER TO other": (
        "redlock_lease belongs to other, and others of ours do not"
    ),
    "ALTER FUNCTION redlock_sweep() OWNER TO other": (
        "redlock_sweep belongs to other, and others of ours do not"
    ),
    f"CREATE SCHEMA app; CREATE {SAME_NAME}": (
        "app, which comes before the schema of our tables in the search_path, has the function"
        " redlock_free"
    ),
}


@pytest.mark.parametrize("done", NEIGHBOURS)
def test_doctor_finds_roles_that_decide_which_functions_are_called(
    host: LocalPostgres, database: str, done: str
) -> None:
    execute(database, ROLE + ";" + ROLE.replace("worker", "other") + ";" + GRANTS)
    name = name_of(database)
    path = "-csearch_path%3Dapp,%22$user%22,public"
    url = f"{url_of(host, user='worker', database=name)}?options={path}"
    # Schemas behind ours, and roles that may do all of it anyway, are nobody's business.
    execute(database, "CREATE SCHEMA behind AUTHORIZATION other")
    assert examined(of(f"{url},behind"))[1]["findings"] == []
    execute(database, done.format(name))
    execute(database, GRANTS)
    one = only(url, "neighbours", "warning")
    assert one["what"].partition(":")[0] == NEIGHBOURS[done].format(name)


def test_doctor_finds_a_lock_refused_for_another_reason(database: str) -> None:
    execute(database, "ALTER TABLE redlock_lease ADD CHECK (token <> 'doctor')")
    one = only(database, "writes")
    assert "a lock cannot be taken there: new row for relation" in one["what"]


def test_doctor_refuses_a_standby_and_warns_of_one_nobody_waits_for(
    host: LocalPostgres, database: str
) -> None:
    execute(database, ROLE)
    execute(database, GRANTS)
    ordinary = url_of(host, user="worker", database=name_of(database))
    with standby_of(host) as standby:
        for url in (database, ordinary):
            one = only(url, "durability", "warning")
            assert "a standby is attached, and no commit waits for it" in one["what"]
            guarded = Site(app=shop([url], redlock_restart_guard="uptime", redlock_ttl=2))
            assert "durability" in examined(guarded)[1]["fine"]
        there = url_of(standby, database=name_of(database))
        code, report = examined(of(there))
        assert code == 1 and "it is a standby" in found(report, "wrong")["reachable"]["what"]
        code, report = examined(of(f"{there}?target_session_attrs=any"))
        assert code == 1 and "it is a standby" in found(report, "wrong")["role"]["what"]
        assert not {"tables", "rights", "writes"} & set(report["fine"])
        postgres.sql(host, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        postgres.sql(host, "SELECT pg_reload_conf()")
        try:
            assert examined(of(ordinary))[1]["findings"] == []
        finally:
            postgres.sql(host, "ALTER SYSTEM RESET synchronous_standby_names")
            postgres.sql(host, "SELECT pg_reload_conf()")


def test_doctor_warns_of_synchronous_commit_off(database: str) -> None:
    execute(database, f"ALTER DATABASE {name_of(database)} SET synchronous_commit = off")
    assert "synchronous_commit is off" in only(database, "durability", "warning")["what"]
    guarded = Site(app=shop([database], redlock_restart_guard="uptime"))
    fine = examined(guarded)[1]["fine"]
    assert "durability" in fine and "restart" not in fine  # it counts from its start then


def test_doctor_finds_a_database_that_has_forgotten_and_has_no_vote_yet(database: str) -> None:
    execute(database, "UPDATE redlock_memory SET since = clock_timestamp()")
    site = Site(app=shop([database], redlock_restart_guard="uptime", redlock_ttl=60))
    code, report = examined(site)
    assert code == 1 and found(report, "wrong")["quorum"]["where"] == "1 node"
    said = found(report, "warning")["restart"]["what"]
    assert re.search(r"set back or started anew \d s ago.*give it no vote for [56]\d s", said)


def test_doctor_finds_settings_that_make_locks_slow_or_fail(database: str) -> None:
    with empty_server(autovacuum="off", max_connections="10") as other:
        postgres.sql(other, postgres.SCHEMA)
        held = [psycopg.connect(other.url) for _ in range(6)]
        _code, report = examined(of(other.url))
        warned = found(report, "warning")
        assert warned.keys() == {"durability", "vacuum", "connections"}
        assert "fsync is off" in warned["durability"]["what"]
        assert re.match(r"[789] of 7 connections are taken", warned["connections"]["what"])
        held += [psycopg.connect(other.url) for _ in range(4)]
        code, report = examined(of(other.url))
        assert code == 1
        assert "its connections are taken" in found(report, "wrong")["reachable"]["what"]
        for one in held:
            one.close()
    execute(database, "ALTER TABLE redlock_lease SET (autovacuum_enabled = false)")
    assert "a dead row behind" in only(database, "vacuum", "warning")["what"]
    execute(database, "ALTER TABLE redlock_lease RESET (autovacuum_enabled)")
    level = "SET default_transaction_isolation = 'repeatable read'"
    execute(database, f"ALTER DATABASE {name_of(database)} {level}")
    assert "is 'repeatable read'" in only(database, "isolation")["what"]


def test_doctor_finds_a_pooler_in_front_of_the_database(host: LocalPostgres, database: str) -> None:
    with open_folder() as folder, pooler(host, folder) as port:
        url = url_of(host, database=name_of(database), port=port)
        assert "LISTEN does not work" in only(url, "pooler", "warning")["what"]
        # It is looked at through it without a trace in the connections that it lends to others.
        assert execute(url, "SHOW statement_timeout") == [("0",)]
        lock = Redlock([url])
        with lock.lock("order:1"):
            pass
        lock.close()


@pytest.mark.parametrize(("ahead", "how"), [(5.0, "behind"), (-5.0, "ahead of")])
def test_doctor_finds_a_database_whose_clock_is_off(
    database: str, monkeypatch: Patch, ahead: float, how: str
) -> None:
    class Clock:  # ours is set, not the server's: it has no other than the machine's
        time = staticmethod(lambda: time.time() + ahead)

    monkeypatch.setattr(postgresql, "time", Clock)
    assert re.match(
        rf"its clock is [45]\.\d s {how} ours", only(database, "clock", "warning")["what"]
    )


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("postgresql://worker:SECRET@127.0.0.1:1/shop", "it gives no answer"),
        ("postgresql://nobody:SECRET@127.0.0.1:{port}/postgres", "it refuses us"),
        ("postgresql://postgres:SECRET@127.0.0.1:{port}/nowhere", "it has no such database"),
        ("postgresql://postgres@127.0.0.1:{port}/postgres?sslmode=require", "not speak TLS"),
    ],
)
def test_doctor_finds_a_database_that_gives_no_answer(
    host: LocalPostgres, url: str, what: str
) -> None:
    code, report = examined(of(url.format(port=host.port)))
    first = "reachable" if "refuses" in what else "quorum"
    assert code == 1 and report["findings"][0]["check"] == first
    assert what in found(report, "wrong")["reachable"]["what"]
    assert not {"tables", "rights", "leaks", "clock"} & set(report["fine"])


def test_doctor_finds_a_database_that_hangs(host: LocalPostgres, database: str) -> None:
    host.pause()
    begun = time.monotonic()
    code, report = examined(of(database))
    host.resume()
    assert code == 1 and time.monotonic() - begun < 5.0
    assert "no answer within 1 s" in found(report, "wrong")["reachable"]["what"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_doctor_checks_the_certificates_of_a_database() -> None:
    with open_folder() as folder, empty_server(fsync="on") as host:
        ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
        cert, key = ours.sign("server", "IP:127.0.0.1")
        key.chmod(0o600)
        if host._user:
            shutil.chown(key, host._user)
        postgres.sql(host, postgres.SCHEMA)
        for name, file in {"ssl_cert_file": cert, "ssl_key_file": key, "ssl": "on"}.items():
            postgres.sql(host, f"ALTER SYSTEM SET {name} = '{file}'")
        postgres.sql(host, "SELECT pg_reload_conf()")
        url = f"{host.url}?sslrootcert={ours.ca}&sslmode="
        for mode in ("require", "verify-ca"):
            assert "receives the password" in only(f"{url}{mode}", "tls", "warning")["what"]
        assert examined(of(f"{url}verify-full"))[1]["findings"] == []
        other = f"{host.url}?sslrootcert={theirs.ca}&sslmode=verify-full"
        refused = found(examined(of(other))[1], "wrong")["reachable"]["what"]
        assert "its certificate is not accepted" in refused


def test_doctor_without_psycopg_says_what_to_install(database: str, monkeypatch: Patch) -> None:
    for name in [name for name in sys.modules if name.startswith("psycopg")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "celery_redlock.stores.postgresql.address", raising=False)
    code, report = examined(Site(app=shop([database])))
    assert code == 1
    said = found(report, "wrong")["configuration"]
    assert "pip install 'celery-redlock[postgresql]'" in said["what"]


def test_doctor_finds_leaks_and_foreign_values_in_a_database(database: str) -> None:
    row = "INSERT INTO redlock_lease VALUES ('redlock:{}', 'x', 0, '{}', clock_timestamp())"
    execute(database, row.format("leak", "infinity"))
    execute(database, row.format("theirs", "2100-01-01"))
    code, report = examined(of(database))
    assert code == 1 and found(report, "wrong")["leaks"]["where"] == "redlock:leak"
    assert found(report, "warning")["prefix"]["where"] == "redlock:leak, redlock:theirs"


def test_doctor_checks_of_postgresql_are_all_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", page, re.M))
    assert set(POSTGRESQL_CHECKS) <= rows


def test_commands_that_only_look_need_only_select(host: LocalPostgres, database: str) -> None:
    execute(database, "DO $$ BEGIN CREATE ROLE looks LOGIN; EXCEPTION WHEN OTHERS THEN END $$")
    url = url_of(host, user="looks", database=name_of(database))

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["--nodes", url, *arguments])

    refused = call("ls")
    assert refused.exit_code == 3 and "permission denied for table" in refused.stderr
    assert "docs/cli.md has the ACL of users who only read" in refused.stderr
    tables = "redlock_lease, redlock_waiter, redlock_memory"
    execute(database, f"GRANT SELECT ON {tables} TO looks")
    lock = Redlock([database])
    with lock.lock("order:1"):
        for arguments in (["ls", "--all"], ["show", "order:1"], ["stats"], ["exporter", "--once"]):
            assert call(*arguments).exit_code == 0, call(*arguments).output
        freeing = call("release", "order:1", "--force")
        assert freeing.exit_code == 2 and "its user lacks a right" in freeing.stderr
        assert lock.holder("order:1") is not None
    lock.close()


def test_look_at_a_hanging_database_ends_by_itself(host: LocalPostgres, database: str) -> None:
    """The look is abandoned after the timeout.

    The looks of a page, one a second, must not pile up.
    """
    (address,) = parse_nodes([database])
    host.pause()
    try:
        (look,), _found = read_nodes([address], "redlock:", lambda reader: reader.scan(""), 0.2)
        assert not look.reachable and look.error == "no answer within 0.2 s"
    finally:
        host.resume()

    def frozen(reader: PostgresReader) -> object:
        host.pause()
        return reader.scan("")

    try:
        (look,), _found = read_nodes([address], "redlock:", frozen, 0.2)
        assert not look.reachable
        wait_until(lambda: not _looking(address.name), 10.0, "the look has ended")
    finally:
        host.resume()


def _looking(name: str) -> bool:
    return any(one.name == f"celery_redlock read {name}" for one in threading.enumerate())
