-- The objects of celery_redlock in PostgreSQL (12 or later): a table of locks, one of their
-- waiters, one of the server's identities, and the functions, which are all that a worker calls.
-- It may be run again; `celery redlock migrate` does so.
--
-- READ COMMITTED is enough. One INSERT ... ON CONFLICT decides whether a lock is free: it waits for
-- a transaction that is writing the row, and then reads the row as that has left it. Times are this
-- server's clock_timestamp(), read while the row is locked.
--
-- One statement, all or nothing. A role that may create objects in the schema must not get one of
-- its own executed, neither here nor later by a function. So operators and functions are looked up
-- in pg_catalog alone, and each name of ours is prefixed with its schema.

DO $install$ DECLARE
    home text := CURRENT_SCHEMA;
    path text := pg_catalog.current_setting('search_path');
    patience text := pg_catalog.current_setting('lock_timeout');
    part text;
    one record;
BEGIN
IF home IS NULL THEN
    RAISE EXCEPTION 'no schema of the search_path exists: set it to the schema of the tables';
END IF;
SET LOCAL search_path = pg_catalog, pg_temp;
IF strpos(home, '$$') > 0 THEN
    RAISE EXCEPTION 'the name of the schema % has $$ in it; rename it', home;
ELSIF current_setting('transaction_isolation') NOT LIKE 'read%' THEN
    RAISE EXCEPTION 'a transaction at % does not see what others make meanwhile; run this at'
        ' READ COMMITTED', current_setting('transaction_isolation');
ELSIF patience = '0' THEN
    SET LOCAL lock_timeout = '20s';
END IF;
-- The checks precede each part: while the first one waits for a lock, other roles may make objects
-- that do not exist yet.
FOREACH part IN ARRAY ARRAY[$sql$
CREATE TABLE IF NOT EXISTS redlock_lease (
    resource text COLLATE "C" PRIMARY KEY,
    token text COLLATE "C" NOT NULL,         -- the proof of its holder, or of its last one
    fence bigint NOT NULL,                   -- its last fencing token; 0 if it never had one
    until timestamptz NOT NULL,              -- it is free from then on; -infinity: released
    changed timestamptz NOT NULL             -- when it was last granted, extended or released
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE IF NOT EXISTS redlock_waiter (
    resource text COLLATE "C",
    waiter text COLLATE "C",                 -- the channel of its process, and its own name
    since bigint NOT NULL,                   -- when it first waited, in microseconds since 1970
    until timestamptz NOT NULL,              -- its place ends then; each of its tries renews it
    PRIMARY KEY (resource, waiter)
);

-- The identities of this server and its history, with the time since which clients have met each: a
-- promoted standby may lack the last locks that the old primary granted. `migrate` adds the first
-- one, before there is any lock.
CREATE TABLE IF NOT EXISTS redlock_memory (
    memory text PRIMARY KEY,
    since timestamptz NOT NULL,
    swept timestamptz NOT NULL DEFAULT '-infinity'
);

CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 2';

-- The timeline changes with each promotion and each point-in-time recovery. If commits are
-- acknowledged before they are on disk, a crash loses locks as well. Then the identity also has the
-- time of the start, and that of the last reset of statistics: after a crash of one process all
-- others but the postmaster start anew, and the statistics are reset.
CREATE OR REPLACE FUNCTION redlock_identity() RETURNS text LANGUAGE plpgsql AS $$
DECLARE identity text;
BEGIN
    identity := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
    IF current_setting('synchronous_commit') = 'off' OR current_setting('fsync') = 'off' THEN
        identity := concat_ws(' ', identity, extract(epoch FROM pg_postmaster_start_time()),
                              (SELECT extract(epoch FROM stats_reset) FROM pg_stat_bgwriter));
    END IF;
    RETURN identity;
END $$;

-- Return the identity of this server, and the seconds since clients first met it. Fails at once if
-- a right is missing that a lock will need.
CREATE OR REPLACE FUNCTION redlock_hello(OUT identity text, OUT age float8) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO redlock_lease SELECT l.* FROM redlock_lease l WHERE false;
    INSERT INTO redlock_waiter SELECT w.* FROM redlock_waiter w WHERE false;
    UPDATE redlock_lease SET until = now() WHERE false;
    UPDATE redlock_waiter SET until = now() WHERE false;
    UPDATE redlock_memory SET swept = now() WHERE false;
    DELETE FROM redlock_lease WHERE false;
    DELETE FROM redlock_waiter WHERE false;
    identity := redlock_identity();
    INSERT INTO redlock_memory VALUES (identity, clock_timestamp()) ON CONFLICT DO NOTHING;
    -- With the time, because two standbys of one primary get the same timeline if they are
    -- promoted.
    SELECT concat_ws(' ', m.memory, extract(epoch FROM m.since)),
           CASE WHEN isfinite(m.since)
                THEN extract(epoch FROM clock_timestamp() - m.since) ELSE 'infinity' END
    INTO identity, age FROM redlock_memory m WHERE m.memory = identity;
END $$;

-- Acquire all of these names or none, for one token; in one order, so that no two callers wait for
-- each other. held_by and place (from 1): the token that is in the way, and the number of its name.
-- A fence is raised when the holder changes, to at least the proposal, and not by the holder's
-- retry.
CREATE OR REPLACE FUNCTION redlock_acquire(
    names text[], mine text, seconds float8, proposal bigint, ceiling bigint,
    OUT held_by text, OUT place bigint, OUT granted bigint
) LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    one text;
BEGIN
    FOR one, place IN
        SELECT u.name, u.n FROM unnest(names) WITH ORDINALITY AS u (name, n)
        ORDER BY u.name COLLATE "C"
    LOOP
        LOOP
            INSERT INTO redlock_lease AS l
            VALUES (one, mine, coalesce(proposal, 0),
                    clock_timestamp() + make_interval(secs => seconds), clock_timestamp())
            ON CONFLICT (resource) DO UPDATE SET
                token = mine,
                until = clock_timestamp() + make_interval(secs => seconds),
                changed = clock_timestamp(),
                fence = CASE WHEN proposal IS NULL OR (l.token = mine AND l.fence >= proposal)
                             THEN l.fence ELSE greatest(l.fence + 1, proposal) END
            WHERE l.until <= clock_timestamp() OR l.token = mine
            RETURNING l.fence INTO granted;
            EXIT WHEN FOUND;
            -- The row is locked now, by the INSERT that found it held.
            SELECT l.token INTO held_by FROM redlock_lease l
            WHERE l.resource = one AND l.until > clock_timestamp();
            IF FOUND THEN
                PERFORM redlock_free(names, mine);
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
    IF granted > ceiling THEN
        RAISE EXCEPTION 'its last fencing token is more than a day ahead of the clock here';
    END IF;
END $$;

-- Extend claims; return one character per claim: 1, it was ours and is renewed; 2, it had no
-- holder, and is ours again; 0, it is not ours. A row that another has had since is never taken
-- back, and of two claims that miss the same name the first gets it. Without `again`, for a
-- supervisor, a claim that has ended stays so, none is shortened, and none with more than `below`
-- left is changed.
CREATE OR REPLACE FUNCTION redlock_extend(
    names text[], tokens text[], claims int[], seconds float8[], below float8[], again boolean
) RETURNS text LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    moment timestamptz;
    expected bigint;
    votes text;
BEGIN
    PERFORM FROM redlock_lease l WHERE l.resource = ANY (names) ORDER BY l.resource FOR UPDATE;
    moment := clock_timestamp();
    WITH asked AS (
        SELECT *, row_number() OVER (PARTITION BY a.resource ORDER BY a.claim) = 1 AS first
        FROM unnest(names, tokens, claims, seconds, below)
            AS a (resource, token, claim, seconds, below)
    ), judged AS (
        SELECT a.claim, CASE
            WHEN bool_and(coalesce(l.token = a.token AND l.until > moment, false)) THEN '1'
            WHEN again AND bool_and(coalesce(l.token = a.token, a.first)) THEN '2'
            ELSE '0' END AS vote
        FROM asked a LEFT JOIN redlock_lease l USING (resource) GROUP BY a.claim
    ), renewed AS (
        INSERT INTO redlock_lease AS l
        SELECT a.resource, min(a.token), 0, moment + make_interval(secs => max(a.seconds)), moment
        FROM asked a JOIN judged j USING (claim) LEFT JOIN redlock_lease h USING (resource)
        WHERE j.vote <> '0' AND (again OR (h.until < moment + make_interval(secs => a.seconds)
                                  AND h.until <= moment + make_interval(secs => a.below)))
        GROUP BY a.resource ORDER BY a.resource COLLATE "C"
        ON CONFLICT (resource) DO UPDATE SET until = excluded.until, changed = moment
        WHERE l.token = excluded.token
        RETURNING 1
    )
    SELECT string_agg(vote, '' ORDER BY claim),
           (SELECT count(DISTINCT resource) FROM asked JOIN judged USING (claim) WHERE vote <> '0')
           - (SELECT count(*) FROM renewed)
    INTO votes, expected FROM judged;
    IF again AND expected > 0 THEN
        RAISE EXCEPTION 'a lock was taken while it was extended' USING ERRCODE = '40001';
    END IF;
    RETURN votes;
END $$;

-- Release these names; return how many of them this token held until now. A row with a fence stays.
CREATE OR REPLACE FUNCTION redlock_free(names text[], mine text) RETURNS bigint
LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    gone bigint;
    kept bigint;
BEGIN
    IF cardinality(names) > 1 THEN
        PERFORM FROM redlock_lease l
        WHERE l.resource = ANY (names) AND l.token = mine ORDER BY l.resource FOR UPDATE;
    END IF;
    WITH freed AS (
        DELETE FROM redlock_lease l
        WHERE l.resource = ANY (names) AND l.token = mine AND l.fence = 0
        RETURNING l.until
    ) SELECT count(*) FILTER (WHERE until > clock_timestamp()) INTO gone FROM freed;
    WITH freed AS (
        UPDATE redlock_lease l SET until = '-infinity', changed = clock_timestamp()
        WHERE l.resource = ANY (names) AND l.token = mine AND l.until > clock_timestamp()
        RETURNING 1
    ) SELECT count(*) INTO kept FROM freed;
    RETURN gone + kept;
END $$;

-- Notify the first waiter whose process listens, and take it from the queue; return true if there
-- is one. A listening process holds an advisory lock of its channel's name: if we can get that
-- lock, nobody listens.
CREATE OR REPLACE FUNCTION redlock_call(name text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    called text;
    channel text;
BEGIN
    FOR passed_over IN 1..200 LOOP
        DELETE FROM redlock_waiter w WHERE w.resource = name AND w.waiter = (
            SELECT f.waiter FROM redlock_waiter f WHERE f.resource = name
            ORDER BY f.since, f.waiter LIMIT 1 FOR UPDATE SKIP LOCKED
        ) RETURNING w.waiter INTO called;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        channel := 'redlock_' || md5(regexp_replace(called, ':[^:]*$', ''));
        IF NOT pg_try_advisory_xact_lock_shared(hashtextextended(channel, 0)) THEN
            PERFORM pg_notify(channel, regexp_replace(called, '^.*:', ''));
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END $$;

-- Release; return 1 if all were held, and 2 more if a waiter was notified. All slots of a resource
-- share one queue. The mark, of a delivery that is done, appears together with the free lock.
CREATE OR REPLACE FUNCTION redlock_release(
    names text[], mine text, mark text, life float8
) RETURNS int LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    held boolean;
    called boolean := false;
    one text;
BEGIN
    held := redlock_free(names, mine) = cardinality(names);
    IF mark IS NOT NULL THEN
        INSERT INTO redlock_lease VALUES
            (mark, 'done', 0, clock_timestamp() + make_interval(secs => life), clock_timestamp())
        ON CONFLICT (resource) DO UPDATE SET
            token = excluded.token, until = excluded.until, changed = excluded.changed;
    END IF;
    FOREACH one IN ARRAY names LOOP
        called := redlock_call(regexp_replace(one, '#slot[0-9]+$', '')) OR called;
    END LOOP;
    RETURN held::int + 2 * called::int;
END $$;

CREATE OR REPLACE FUNCTION redlock_enqueue(names text[], mine text, since bigint, life float8)
RETURNS int LANGUAGE sql AS $$
    INSERT INTO redlock_waiter
    SELECT u, mine, since, clock_timestamp() + make_interval(secs => life) FROM unnest(names) u
    ORDER BY u COLLATE "C"
    ON CONFLICT (resource, waiter) DO UPDATE SET since = excluded.since, until = excluded.until;
    SELECT 1;
$$;

CREATE OR REPLACE FUNCTION redlock_dequeue(names text[], mine text) RETURNS int LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM redlock_waiter w WHERE w.resource = ANY (names) AND w.waiter = mine RETURNING 1
    ) SELECT (count(*) = cardinality(names))::int FROM gone;
$$;

-- Leave the queues; where we had been notified, or nobody holds the lock, notify the next waiter.
CREATE OR REPLACE FUNCTION redlock_hand_on(names text[], mine text) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    one text;
    stood int := 0;
BEGIN
    FOREACH one IN ARRAY names LOOP
        DELETE FROM redlock_waiter w WHERE w.resource = one AND w.waiter = mine;
        IF FOUND THEN
            stood := stood + 1;
            CONTINUE WHEN EXISTS (SELECT FROM redlock_lease l
                                  WHERE l.resource = one AND l.until > clock_timestamp());
        END IF;
        PERFORM redlock_call(one);
    END LOOP;
    RETURN (stood = cardinality(names))::int;
END $$;

-- Return the token of each of these names, in their order, and its seconds left.
CREATE OR REPLACE FUNCTION redlock_peek(names text[])
RETURNS TABLE (token text, seconds float8) LANGUAGE sql STABLE AS $$
    SELECT l.token, extract(epoch FROM l.until - clock_timestamp())
    FROM unnest(names) WITH ORDINALITY AS u (name, n)
    LEFT JOIN redlock_lease l ON l.resource = u.name AND l.until > clock_timestamp()
    ORDER BY u.n;
$$;

-- Delete ended rows, at most once a minute for all callers; a row with a fence a week after its
-- last use, so that no fencing token is granted again while a late write may still be under way.
CREATE OR REPLACE FUNCTION redlock_sweep() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE redlock_memory m SET swept = clock_timestamp() WHERE m.memory = (
        SELECT n.memory FROM redlock_memory n WHERE n.memory = redlock_identity()
        AND n.swept < clock_timestamp() - interval '1 minute' FOR UPDATE SKIP LOCKED
    );
    IF FOUND THEN
        DELETE FROM redlock_lease l WHERE l.ctid = ANY (ARRAY(
            SELECT o.ctid FROM redlock_lease o WHERE o.until < clock_timestamp()
            AND (o.fence = 0 OR o.changed < clock_timestamp() - interval '7 days')
            FOR UPDATE SKIP LOCKED
        ));
        DELETE FROM redlock_waiter w WHERE w.ctid = ANY (ARRAY(
            SELECT o.ctid FROM redlock_waiter o WHERE o.until < clock_timestamp()
            FOR UPDATE SKIP LOCKED
        ));
    END IF;
END $$;

-- From here on nobody can create a trigger on it.
LOCK TABLE redlock_memory IN ROW EXCLUSIVE MODE;
$sql$, $sql$
INSERT INTO redlock_memory SELECT redlock_identity(), '-infinity'
WHERE NOT EXISTS (SELECT FROM redlock_memory);
$sql$] LOOP
    FOR one IN
        SELECT o.name, quote_ident(r.rolname) AS owner
        FROM (SELECT relname, relnamespace, relowner, relkind <> 'r' FROM pg_class
              WHERE relname IN ('redlock_lease', 'redlock_waiter', 'redlock_memory')
              UNION ALL SELECT proname, pronamespace, proowner, false FROM pg_proc
              WHERE starts_with(proname::text, 'redlock_')) AS o (name, namespace, owner, no_table),
            pg_namespace n, pg_roles r, pg_database d
        WHERE n.oid = o.namespace AND n.nspname = home AND r.oid = o.owner
        AND d.datname = current_database() AND (o.no_table OR NOT (
            r.rolsuper OR r.rolname = CURRENT_USER OR r.oid = n.nspowner OR r.oid = d.datdba))
    LOOP
        RAISE EXCEPTION '% is there already, made by %, whose code all who lock would execute;'
            ' if you trust that role, run this as %, else drop it', one.name, one.owner, one.owner;
    END LOOP;
    FOR one IN
        SELECT c.relname, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = home AND c.relname = 'redlock_memory' AND NOT t.tgisinternal
    LOOP
        RAISE EXCEPTION '% has the trigger %, which this would fire; drop it', one.relname,
            one.tgname;
    END LOOP;
    EXECUTE regexp_replace(part, '\mredlock_(?=[a-z])',
        replace(quote_ident(home), '\', '\\') || '.redlock_', 'g');
END LOOP;
FOR one IN
    SELECT oid::regprocedure AS name FROM pg_proc
    WHERE pronamespace = quote_ident(home)::regnamespace AND starts_with(proname::text, 'redlock_')
LOOP
    EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', one.name);
END LOOP;
PERFORM set_config('search_path', path, true), set_config('lock_timeout', patience, true);
END $install$;
