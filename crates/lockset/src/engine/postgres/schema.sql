-- The locks of Lockset in PostgreSQL 13 or later. docs/postgres.md explains them.
--
-- Install:  lockset schema postgres | psql --single-transaction -v ON_ERROR_STOP=1
-- It may be run again. An engine runs it if the schema is missing and its role may create it.
--
-- Every operation first locks the row of its name in `lock`, in the order of names if there are
-- several. So decisions about a name are made one after the other, and nothing deadlocks.

-- Two clients may install at the same moment; IF NOT EXISTS alone fails then.
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('lockset schema', 0));

DO $$
DECLARE
  found integer;
BEGIN
  IF to_regclass('@schema@.meta') IS NOT NULL THEN
    SELECT m.version INTO found FROM @schema@.meta m;
    IF found > @version@ THEN
      RAISE EXCEPTION 'lockset: the schema has version %, this script has @version@', found
        USING ERRCODE = 'LF002', HINT = 'Use a newer version of Lockset.';
    END IF;
  END IF;
END
$$;

CREATE SCHEMA IF NOT EXISTS @schema@;

-- One row per name. It is updated in place: no index covers what changes, and pages have room.
CREATE TABLE IF NOT EXISTS @schema@.lock (
  name text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 255),
  -- The greatest token given so far.
  fence bigint NOT NULL,
  -- The exclusive holder: its claim, token, the end of its lease, and what others see of it.
  -- Without one, `ends` is when the name was last used.
  id uuid,
  token bigint,
  ends timestamptz NOT NULL DEFAULT '-infinity',
  ttl bigint NOT NULL DEFAULT 0,
  revoked boolean NOT NULL DEFAULT false,
  inbox text NOT NULL DEFAULT '',
  signed text NOT NULL DEFAULT '',
  note text NOT NULL DEFAULT '',
  -- Readers or holders of permits in `claim`: how many, the sum of their permits, and a moment
  -- before which no lease of them ends.
  sharers integer NOT NULL DEFAULT 0,
  taken bigint NOT NULL DEFAULT 0,
  first_end timestamptz NOT NULL DEFAULT 'infinity',
  -- Waiters in `claim`: how many, a position before which there is none, and the next one.
  waiters integer NOT NULL DEFAULT 0,
  head bigint NOT NULL DEFAULT 1,
  tail bigint NOT NULL DEFAULT 1,
  -- The permits of a semaphore, 0 for a lock; while the name is in use.
  lim integer NOT NULL DEFAULT 0,
  -- Until when there may be tombstones of claims on this name.
  tombs timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05,
        autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Waiters, readers and holders of permits.
CREATE TABLE IF NOT EXISTS @schema@.claim (
  name text COLLATE "C" NOT NULL,
  position bigint NOT NULL,
  id uuid NOT NULL,
  held boolean NOT NULL,
  -- x (exclusive), s (shared) or p (permits).
  mode "char" NOT NULL,
  take integer NOT NULL,
  lim integer NOT NULL,
  -- In milliseconds: how long a queue entry lives without a heartbeat, the first lease, the ttl.
  entry bigint NOT NULL,
  first bigint NOT NULL,
  ttl bigint NOT NULL,
  -- The caller's own lower bound of the token.
  floor bigint,
  token bigint,
  -- The end of the queue entry or of the lease.
  until timestamptz NOT NULL,
  revoked boolean NOT NULL DEFAULT false,
  inbox text NOT NULL,
  signed text NOT NULL,
  note text NOT NULL,
  PRIMARY KEY (name, position),
  UNIQUE (name, id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05,
        autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

-- Claims that were withdrawn: a late request for one of them is refused.
CREATE TABLE IF NOT EXISTS @schema@.tombstone (
  id uuid PRIMARY KEY,
  until timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- Small values beside names, for latches and barriers.
CREATE TABLE IF NOT EXISTS @schema@.cell (
  name text COLLATE "C" PRIMARY KEY,
  version bigint NOT NULL,
  value bytea NOT NULL
) WITH (fillfactor = 50);

-- Clients that watch names: all that begin with `scope`, or the one that is it.
CREATE TABLE IF NOT EXISTS @schema@.watcher (
  inbox text NOT NULL,
  scope text COLLATE "C" NOT NULL,
  exact boolean NOT NULL,
  until timestamptz NOT NULL,
  PRIMARY KEY (inbox, scope, exact)
);

-- Created last, because its presence says that the rest is there. One row. `base` is the greatest
-- fence of the names that were removed.
CREATE TABLE IF NOT EXISTS @schema@.meta (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  version integer NOT NULL,
  base bigint NOT NULL DEFAULT 0,
  swept timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO @schema@.meta (version) VALUES (@version@)
ON CONFLICT (one) DO UPDATE SET version = excluded.version WHERE meta.version < excluded.version;
