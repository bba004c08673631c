-- What celery_redlock keeps in PostgreSQL (12 or later): two tables for locks and who waits for
-- them, one for what the server is known as, and the functions that are all a worker calls.
-- It may be run again; `celery redlock migrate` does.
--
-- READ COMMITTED is enough. Whether a lock is free is decided by one INSERT ... ON CONFLICT, which
-- waits for whoever is just writing the row, and then reads the row as that left it. Times are this
-- server's clock_timestamp(), read while the row is locked.
--
-- One statement, all or nothing. Whoever may create objects in the schema must not get one of theirs
-- executed here, nor by a function later on: operators and functions are looked up in pg_catalog
-- alone, and each name of ours gets its schema in front.

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
-- Before each part: while the first one waits for a lock, others may make what is not there yet.
FOREACH part IN ARRAY ARRAY[$sql$
CREATE TABLE IF NOT EXISTS redlock_lease (
    resource text COLLATE "C" PRIMARY KEY,
    token text COLLATE "C" NOT NULL,         -- the proof of who holds it, or held it last
    fence bigint NOT NULL,                   -- its last fencing token; 0 if it never had one
    until timestamptz NOT NULL,              -- it is free from then on; -infinity: given back
    changed timestamptz NOT NULL             -- when it was last granted, extended or given back
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE IF NOT EXISTS redlock_waiter (
    resource text COLLATE "C",
    waiter text COLLATE "C",                 -- the channel of its process, and its own name
    since bigint NOT NULL,                   -- when it first waited, in microseconds since 1970
    until timestamptz NOT NULL,              -- it is forgotten then; each of its tries renews it
    PRIMARY KEY (resource, waiter)
);

-- A promoted standby may not have heard of the last locks that the old primary granted. Which
-- server with which history this is, and since when clients have met it; `migrate` meets it first,
-- before there is any lock.
CREATE TABLE IF NOT EXISTS redlock_memory (
    memory text PRIMARY KEY,
    since timestamptz NOT NULL,
    swept timestamptz NOT NULL DEFAULT '-infinity'
);

CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 2';

-- Its timeline changes with each promotion and each point-in-time recovery. Where commits are
-- acknowledged before they are on disk, a crash forgets locks as well: then each start counts, and
-- each crash of one process, with which all start anew but the first, and the statistics.
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

-- Who this server is, and for how many seconds clients have known it. Fails at once where a right
-- is missing that a lock will need.
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
    -- With the time: each of two standbys of one primary becomes the same timeline, if promoted.
    SELECT concat_ws(' ', m.memory, extract(epoch FROM m.since)),
           CASE WHEN isfinite(m.since)
                THEN extract(epoch FROM clock_timestamp() - m.since) ELSE 'infinity' END
    INTO identity, age FROM redlock_memory m WHERE m.memory = identity;
END $$;

-- All of these names or none, for one token; in one order, so that no two wait for each other.
-- held_by and place (from 1): whose lock is in the way, and which of the names it is. A fence is
-- raised when the holder changes, to what the holder proposes at least, and not by its own retry.
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

-- One character per claim: 1, it was ours and is renewed; 2, nobody's, and is ours again; 0, not
-- ours. A row that another has had since is never taken back, and of two that miss the same name the
-- first has it. Without `again`, for a supervisor, what has ended stays so, nothing is shortened,
-- and what has more than `below` left is let be.
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

-- How many of these names were held by this token until now. A row with a fence is kept.
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

-- Calls the first waiter whose process listens, and takes it from the queue; whether there is one.
-- A process that listens holds a lock under the name of its channel: who can have it is alone.
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

-- 1 if all were held, and 2 more if a waiter was called. All slots of a resource share one queue.
-- The mark, of a delivery that is done, is there as soon as the lock is seen to be free.
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

-- Leaves the queues; where it had been called, or nobody holds the lock, the next one is called.
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

-- Who holds each of these names, in their order, and for how many seconds yet.
CREATE OR REPLACE FUNCTION redlock_peek(names text[])
RETURNS TABLE (token text, seconds float8) LANGUAGE sql STABLE AS $$
    SELECT l.token, extract(epoch FROM l.until - clock_timestamp())
    FROM unnest(names) WITH ORDINALITY AS u (name, n)
    LEFT JOIN redlock_lease l ON l.resource = u.name AND l.until > clock_timestamp()
    ORDER BY u.n;
$$;

-- Deletes what is over, once a minute whoever asks: a row with a fence a week after its last use,
-- so that no fencing token comes again while a late write may still be under way.
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

-- Nobody makes a trigger there from now on.
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
