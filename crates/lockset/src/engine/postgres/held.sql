-- Exact fencing: a check inside a transaction of the user, on which the lock then waits.

CREATE OR REPLACE FUNCTION @schema@.pin_key(name text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT pg_catalog.hashtextextended('@schema@ ' || name, 0) $$;

-- The open transactions that have called `assert_held`, for `inspect`.
CREATE OR REPLACE FUNCTION @schema@.pins() RETURNS TABLE (key bigint, shown text)
LANGUAGE sql STABLE AS $$
  SELECT (l.classid::bigint << 32) | l.objid::bigint,
         '[in a transaction of backend ' || l.pid || ']'
  FROM pg_catalog.pg_locks l
  WHERE l.locktype = 'advisory' AND l.mode = 'ShareLock' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                      WHERE d.datname = pg_catalog.current_database())
$$;

-- Fails with LF001 unless the claim with this token holds the lock now. Otherwise the lock stays
-- where it is until the transaction that called it ends, however long that takes and whatever
-- becomes of the lease: no other claim is granted it before. Call it in the transaction that
-- writes, before the first write.
--
-- The server ends the session, and rolls back, if the transaction is idle for `patience`: a
-- client that is gone or stopped must not keep the lock for ever.
CREATE OR REPLACE FUNCTION @schema@.assert_held(name text, token bigint,
                                                patience interval DEFAULT '30 seconds')
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
  millis bigint := greatest(floor(extract(epoch FROM patience) * 1000), 1);
  now_ms bigint;
BEGIN
  -- Only so that `inspect` can show it. It never waits: no exclusive one is ever taken.
  PERFORM pg_advisory_xact_lock_shared(@schema@.pin_key(name));
  -- Renewals and waiters do not change keys, so they are not blocked by this. Taking the lock
  -- from its holder first takes the row FOR UPDATE, which is.
  PERFORM FROM @schema@.lock k
  WHERE k.name = name AND k.id IS NOT NULL AND k.token = token AND k.ends > clock_timestamp()
  FOR KEY SHARE;
  IF NOT FOUND THEN
    PERFORM FROM @schema@.claim d
    WHERE d.name = name AND d.held AND d.token = token AND d.until > clock_timestamp()
    FOR KEY SHARE;
    IF NOT FOUND THEN
      RAISE EXCEPTION 'lockset: % is not held with token % (any more)', name, token
        USING ERRCODE = 'LF001', HINT = 'Roll back. Another client may hold the lock by now.';
    END IF;
  END IF;
  SELECT s.setting INTO now_ms FROM pg_settings s
  WHERE s.name = 'idle_in_transaction_session_timeout';
  IF now_ms = 0 OR now_ms > millis THEN
    PERFORM set_config('idle_in_transaction_session_timeout', millis::text, true);
  END IF;
END
$$;
