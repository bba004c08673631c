"""Checks of one PostgreSQL database.

Only a trial shows what its user may do. So a lock with a random name is acquired and released, in a
transaction that is rolled back, so that nobody else ever sees it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..protocol.node_info import NodeInfo
from ..stores.postgresql.schema import VERSION
from .report import KEY_CHECKS, Finding, warning, wrong
from .report import POSTGRESQL_CHECKS as CHECKS
from .tls import secrecy

if TYPE_CHECKING:
    from ..stores.postgresql.reader import PostgresReader

__all__ = ["CHECKS", "COMMON", "NODE_CHECKS", "SILENT_CHECKS", "Details", "visit"]

OLDEST = 120_000
"""The oldest supported server, in its own numbering."""
CROWDED = 0.9
"""Share of taken connections from which a process that needs one more may find none."""
DENIED = "42501"
"""SQLSTATE of a missing right."""

SETTINGS = """
SELECT current_user::text AS user, s.*, pg_is_in_recovery() AS standby,
    pg_catalog.to_regclass('redlock_lease') IS NOT NULL
        AND pg_catalog.to_regprocedure('redlock_version()') IS NOT NULL AS found,
    (SELECT pg_catalog.string_agg(n.nspname::text, ', ') FROM pg_class c JOIN pg_namespace n
     ON n.oid = c.relnamespace WHERE c.relname = 'redlock_lease') AS schemas,
    (SELECT count(*) FROM pg_class c WHERE 'autovacuum_enabled=false' = ANY (c.reloptions)
     AND c.oid IN (pg_catalog.to_regclass('redlock_lease')::oid,
                   pg_catalog.to_regclass('redlock_waiter')::oid)) AS unvacuumed,
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8 AS uptime,
    (SELECT count(*) FROM pg_stat_replication) AS standbys,
    (SELECT pg_catalog.sum(numbackends) FROM pg_stat_database) AS taken
FROM (SELECT {}) s""".format(
    ", ".join(
        f"pg_catalog.current_setting('{name}') AS {name}"
        for name in (
            *("server_version", "server_version_num", "fsync", "synchronous_commit", "autovacuum"),
            *("synchronous_standby_names", "default_transaction_isolation", "max_connections"),
            *("superuser_reserved_connections", "search_path"),
        )
    )
)
MEMORY = """
SELECT redlock_version(), i,
    extract(epoch FROM clock_timestamp())::float8 - extract(epoch FROM m.since)::float8
FROM redlock_identity() i LEFT JOIN redlock_memory m ON m.memory = i"""
# Ways for another role to have its code executed by a role that acquires or releases a lock.
NEIGHBOURS = """
WITH ours AS (
    SELECT * FROM pg_class c WHERE c.oid IN (pg_catalog.to_regclass('redlock_lease')::oid,
        pg_catalog.to_regclass('redlock_waiter')::oid,
        pg_catalog.to_regclass('redlock_memory')::oid)
), path AS (
    SELECT place, n.oid, n.nspname, n.nspowner, n.nspacl
    FROM pg_catalog.unnest(pg_catalog.string_to_array(pg_catalog.replace(
        pg_catalog.current_setting('search_path'), '$user', current_user::text), ','))
        WITH ORDINALITY u (given, place)
    LEFT JOIN pg_namespace n ON n.nspname = pg_catalog.btrim(given, ' "')
), front AS (  -- up to our tables; all, if there are none
    SELECT *, oid IN (SELECT relnamespace FROM ours) AS home FROM path WHERE place <= coalesce(
        (SELECT pg_catalog.min(place) FROM path JOIN ours ON relnamespace = path.oid), 1000)
), granted AS (
    SELECT 'CREATE' AS what, pg_catalog.format('SCHEMA %%I', p.nspname) AS place, a.*
    FROM path p, pg_catalog.aclexplode(p.nspacl) a WHERE a.grantee <> p.nspowner
    UNION ALL SELECT 'CREATE', pg_catalog.format('DATABASE %%I', datname), a.*
    FROM pg_database d, pg_catalog.aclexplode(d.datacl) a
    WHERE datname = current_catalog AND EXISTS (SELECT FROM front WHERE oid IS NULL)
    UNION ALL SELECT 'TRIGGER', pg_catalog.format('TABLE %%I', o.relname), a.*
    FROM ours o, pg_catalog.aclexplode(o.relacl) a
), made AS (
    SELECT relname AS name, relowner AS owner FROM ours
    UNION ALL SELECT proname, proowner FROM pg_proc JOIN front ON front.oid = pronamespace
    WHERE home AND pg_catalog.starts_with(proname::text, 'redlock_')
), others AS (
    SELECT r.oid AS role, pg_catalog.quote_ident(rolname::text) AS who FROM pg_roles r
    WHERE NOT rolsuper AND rolname <> 'pg_database_owner' AND r.oid NOT IN (
        SELECT datdba FROM pg_database WHERE datname = current_catalog)
    UNION ALL SELECT 0::oid, 'PUBLIC'
), strangers AS (
    SELECT * FROM others WHERE role NOT IN (SELECT owner FROM made)
)
SELECT pg_catalog.format('%%s on %%s is granted to %%s', what, place, who),
    pg_catalog.format('REVOKE %%s ON %%s FROM %%s', what, place, who)
FROM granted JOIN strangers ON role = grantee WHERE what = privilege_type
UNION ALL SELECT pg_catalog.format('SCHEMA %%I of the search_path belongs to %%s', nspname, who),
    'name a search_path without it in the URL, or ALTER SCHEMA ... OWNER TO another role'
FROM front JOIN strangers ON role = nspowner WHERE who <> pg_catalog.quote_ident(current_user::text)
UNION ALL SELECT pg_catalog.format('%%I, which comes before the schema of our tables in the'
        ' search_path, has the function %%I', nspname, proname),
    'name a search_path without it in the URL, or drop the function'
FROM front JOIN pg_proc ON pronamespace = front.oid
WHERE NOT home AND pg_catalog.starts_with(proname::text, 'redlock_')
    AND EXISTS (SELECT FROM ours)
UNION ALL SELECT pg_catalog.format('%%s belongs to %%s, and others of ours do not', name, who),
    'ALTER ... OWNER TO the role that owns the others'
FROM made JOIN others ON role = owner WHERE EXISTS (
    SELECT FROM made m WHERE m.owner <> role)
UNION ALL SELECT pg_catalog.format('%%I has the trigger %%I', relname, tgname),
    pg_catalog.format('DROP TRIGGER %%I ON %%I', tgname, relname)
FROM ours o JOIN pg_trigger ON tgrelid = o.oid AND NOT tgisinternal"""
TRIES = """
SELECT redlock_hello();
SELECT redlock_acquire(ARRAY[{0}], 'doctor'::text, 10::float8, 1::bigint, NULL::bigint);
SELECT redlock_extend(ARRAY[{0}], ARRAY['doctor'], ARRAY[0], ARRAY[10::float8],
    ARRAY[10::float8], true);
SELECT redlock_enqueue(ARRAY[{0}], 'doctor'::text, 0::bigint, 10::float8);
SELECT redlock_hand_on(ARRAY[{0}], 'doctor'::text);
SELECT redlock_release(ARRAY[{0}], 'doctor'::text, NULL::text, NULL::float8);
SELECT redlock_sweep()"""


@dataclass(frozen=True)
class Details:
    """The answers of a database.

    Attributes:
        info: Its settings by name, and the other columns of `SETTINGS`.
        peer: The IP address that answered; empty for a socket of this machine.
        facts: The facts that count for the restart guard.
        ahead: Seconds that its clock is ahead of ours.
        version: Version of its tables; 0 if there are none.
        neighbours: The ways in which another role can have its code executed, each with its remedy.
        refused: The right that the user lacks; empty if no trial was refused.
        fails: The error of a trial lock; empty if it worked, or there was no trial.
        pooled: True if a pooler is in front of it.
    """

    info: Mapping[str, Any]
    peer: str
    facts: NodeInfo
    ahead: float
    version: int
    neighbours: Sequence[tuple[Any, ...]]
    refused: str
    fails: str
    pooled: bool


def visit(reader: PostgresReader, *, tries: bool) -> Details:
    """Query a database about itself; if `tries`, also try what the user may do."""
    from ..stores.postgresql.handshake import MAX_AGE_S, pooled

    before = time.time()
    ((clock,),) = reader.ask("SELECT extract(epoch FROM clock_timestamp())::float8")
    ahead = clock - (before + time.time()) / 2
    (row,) = reader.ask(SETTINGS)
    info = dict(zip(reader.columns, row, strict=True))
    neighbours = reader.ask(NEIGHBOURS)
    version, refused, fails = 0, "", ""
    facts = NodeInfo(role="slave" if info["standby"] else "master", master="another server")
    try:
        if info["found"] and not info["standby"]:
            ((version, identity, age),) = reader.ask(MEMORY)
            facts = NodeInfo(run_id=identity, uptime=min(age or 0.0, MAX_AGE_S), role="master")
        if tries and version >= VERSION:
            name = f"'{reader.prefix}nonce:{secrets.token_hex(16)}'".replace("%", "%%")
            with reader.connection.transaction(force_rollback=True):
                reader.ask(TRIES.format(name))
    except Exception as error:
        if not (state := getattr(error, "sqlstate", "")):
            raise
        why = reader.why(error) or "it takes too long"
        refused, fails = (why, "") if state == DENIED else ("", why)
    if version < VERSION and not (info["standby"] or refused or fails):
        facts = NodeInfo(unfit="its tables are missing, or old; run celery redlock migrate")
    return Details(
        info=info,
        peer=reader.peer,
        facts=facts,
        ahead=ahead,
        version=version,
        neighbours=neighbours,
        refused=refused,
        fails=fails,
        pooled=pooled(reader.connection),
    )


# -- A node that answers ---------------------------------------------------------------------------


def _tables(probe: Any, _site: Any) -> Iterator[Finding]:
    said, user = probe.details, probe.details.info["user"]
    hides = ("rights", "restart", *KEY_CHECKS)
    if not said.info["found"] and said.info["schemas"]:
        yield wrong(
            f"its tables are in the schema {said.info['schemas']}, where {user!r} does not look"
            f" (search_path {said.info['search_path']})",
            f'ALTER ROLE "{user}" SET search_path = {said.info["schemas"]}',
            hides=hides,
        )
    elif not said.info["found"]:
        yield wrong(
            "its tables are missing: no worker starts, and nothing can be locked",
            "run celery redlock migrate",
            hides=hides,
        )
    elif said.facts.unfit:
        yield wrong(
            f"its tables are of version {said.version}, and this library wants {VERSION}: no worker"
            " starts",
            "run celery redlock migrate",
            hides=hides,
        )


def _rights(probe: Any, _site: Any) -> Iterator[Finding]:
    if why := probe.details.refused:
        user = probe.details.info["user"]
        yield wrong(
            f"the user {user!r} lacks a right: {why}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON redlock_lease, redlock_waiter, redlock_memory"
            f' TO "{user}"; functions need EXECUTE, which all have unless it was revoked',
            hides=("writes",),
        )


def _neighbours(probe: Any, _site: Any) -> Iterator[Finding]:
    for what, fix in probe.details.neighbours:
        yield warning(
            f"{what}: code of others may be executed with the rights of whoever locks, or frees a"
            " lock",
            fix,
        )


def _writes(probe: Any, _site: Any) -> Iterator[Finding]:
    if why := probe.details.fails:
        yield wrong(f"a lock cannot be taken there: {why}", "correct what it names")


def _role(probe: Any, _site: Any) -> Iterator[Finding]:
    if probe.details.info["standby"]:
        yield wrong(*STANDBY, hides=("tables", "rights", "writes"))


STANDBY = (
    "it takes no writes: it is a standby, or default_transaction_read_only is on",
    "name its primary, or all hosts of the cluster in one URL (postgresql://one,two/db)",
)


def _version(probe: Any, _site: Any) -> Iterator[Finding]:
    if int(probe.details.info["server_version_num"]) < OLDEST:
        what = f"it is PostgreSQL {probe.details.info['server_version']}, which is too old"
        yield wrong(what, "upgrade it to PostgreSQL 12 or newer")


def _durability(probe: Any, site: Any) -> Iterator[Finding]:
    info, guarded = probe.details.info, site.guard == "uptime"
    guard = "or redlock_restart_guard to 'uptime'"
    commits = info["synchronous_commit"]
    if info["fsync"] == "off":
        yield warning(
            "fsync is off: a crash of its machine may lose the last locks, or all of its data",
            "set fsync to on",
        )
    elif commits == "off" and not guarded:
        yield warning(
            "synchronous_commit is off: a crash loses the last locks, and others are granted them",
            f"set synchronous_commit to on for this user or database, {guard}",
        )
    waits = info["synchronous_standby_names"] and commits not in ("off", "local")
    if info["standbys"] and not waits and not guarded:
        yield warning(
            "a standby is attached, and no commit waits for it: once it is promoted, the last locks"
            " may be forgotten and granted to others",
            f"set synchronous_standby_names, and synchronous_commit to on, {guard}",
        )


def _pooler(probe: Any, _site: Any) -> Iterator[Finding]:
    if probe.details.pooled:
        yield warning(
            "a pooler is in front of it, and LISTEN does not work through it: waiters are not"
            " notified, and ask every second",
            "name the server itself in redlock_nodes",
        )


def _isolation(probe: Any, _site: Any) -> Iterator[Finding]:
    level = probe.details.info["default_transaction_isolation"]
    if level not in ("read committed", "read uncommitted"):
        yield wrong(
            f"default_transaction_isolation is {level!r}: a try on a taken lock gets an error",
            f'ALTER ROLE "{probe.details.info["user"]}" SET default_transaction_isolation ='
            " 'read committed'",
        )


def _vacuum(probe: Any, _site: Any) -> Iterator[Finding]:
    if probe.details.info["autovacuum"] == "off" or probe.details.info["unvacuumed"]:
        yield warning(
            "autovacuum is off: each lock leaves a dead row behind, and locks get slower",
            "set autovacuum to on, for the server and for the tables redlock_lease and"
            " redlock_waiter",
        )


def _connections(probe: Any, _site: Any) -> Iterator[Finding]:
    info = probe.details.info
    room = int(info["max_connections"]) - int(info["superuser_reserved_connections"])
    if info["taken"] > CROWDED * room:
        yield warning(
            f"{info['taken']} of {room} connections are taken: a process that gets none can lock"
            " nothing",
            "raise max_connections, or run fewer processes: each that takes locks keeps one"
            " connection, and one more while it waits",
        )


COMMON = ("restart", "clock", "ttl")
NODE_CHECKS = {
    "tables": _tables,
    "rights": _rights,
    "neighbours": _neighbours,
    "writes": _writes,
    "role": _role,
    "version": _version,
    "durability": _durability,
    "pooler": _pooler,
    "tls": secrecy,
    "isolation": _isolation,
    "vacuum": _vacuum,
    "connections": _connections,
}

# -- A node that does not answer -------------------------------------------------------------------

REASONS = {
    r"session is read-only|not in read-write mode": STANDBY,
    r"password|authentication|role .* does not exist|pg_hba": (
        "it refuses us",
        "put the right user and password into its URL in redlock_nodes, and let this host in"
        " (pg_hba.conf)",
    ),
    r'database ".*" does not exist': ("it has no such database", "correct its URL, or create it"),
    r"too many (clients|connections)|remaining connection slots": (
        "all its connections are taken",
        "raise max_connections, or run fewer processes",
    ),
    r"certificate|hostname|does not match host": (
        "its certificate is not accepted",
        "add ?sslrootcert=PATH to its URL, the certificate of the authority that signed it, and"
        " name it as its certificate does",
    ),
    r"does not support SSL|SSL was required": (
        "it does not speak TLS, and is asked in TLS",
        "set ssl to on there, or take sslmode out of its URL",
    ),
}
"""The finding for a database that does not answer, by a pattern of its error: fault and remedy."""


def _unreachable(probe: Any, _site: Any) -> Iterator[Finding]:
    why = probe.look.error
    what, fix = "it gives no answer", "start it, or open the way to it"
    for pattern, reason in REASONS.items():
        if re.search(pattern, why):
            what, fix = reason
            break
    yield wrong(f"{what}: {why}", f"{fix}; until then nothing can be locked", hides=HIDDEN_CHECKS)


HIDDEN_CHECKS = (*NODE_CHECKS, *COMMON, *KEY_CHECKS)
SILENT_CHECKS = {"reachable": _unreachable}
