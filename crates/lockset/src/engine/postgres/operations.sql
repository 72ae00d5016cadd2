-- The operations of the engine. Those that clients call run with the rights of their owner, so that
-- a client needs no rights on the tables.

-- The reply for a claim that waits at this position.
CREATE OR REPLACE FUNCTION @schema@.reply_queued(t @schema@.turn, queued_at bigint)
RETURNS @schema@.turn LANGUAGE plpgsql AS $$
BEGIN
  t.kind := 'q';
  t.stamp := t.fence;
  t.ahead := greatest(queued_at - t.head, 0);
  t.left_ms := @schema@.millis_left(CASE WHEN t.id IS NULL THEN t.first_end ELSE t.ends END,
                                    t.moment);
  -- The lease is over, but a transaction of the holder is still open, and nothing tells its end.
  IF t.left_ms = 0 THEN
    t.left_ms := CASE WHEN t.ahead < 2 THEN 100 ELSE 1000 END;
  END IF;
  RETURN t;
END
$$;

-- The reply for a claim that holds. A lease that is over stays only for an open transaction.
CREATE OR REPLACE FUNCTION @schema@.reply_held(t @schema@.turn, token bigint, ends timestamptz)
RETURNS @schema@.turn LANGUAGE plpgsql AS $$
BEGIN
  IF ends <= t.moment THEN
    t.kind := 'x';
  ELSE
    t.kind := 'g';
    t.given := token;
    t.left_ms := @schema@.millis_left(ends, t.moment);
  END IF;
  RETURN t;
END
$$;

-- HEARTBEAT: finds a claim that entered before, refreshes its queue entry, and hands the lock over
-- if it is free. The reply is NULL if the claim is not known.
CREATE OR REPLACE FUNCTION @schema@.revisit(t @schema@.turn, claimed uuid, to_inbox text)
RETURNS @schema@.turn LANGUAGE plpgsql AS $$
DECLARE
  c @schema@.claim;
BEGIN
  t.kind := NULL;
  IF @schema@.is_withdrawn(t, claimed) THEN
    t.kind := 'x';
    RETURN t;
  END IF;
  IF t.id = claimed THEN RETURN @schema@.reply_held(t, t.token, t.ends); END IF;
  IF t.sharers = 0 AND t.waiters = 0 THEN RETURN t; END IF;
  SELECT d.* INTO c FROM @schema@.claim d WHERE d.name = t.name AND d.id = claimed;
  IF NOT FOUND THEN RETURN t; END IF;
  IF c.held THEN RETURN @schema@.reply_held(t, c.token, c.until); END IF;
  UPDATE @schema@.claim d SET until = @schema@.lease_end(t.moment, c.entry), inbox = to_inbox
  WHERE d.name = t.name AND d.position = c.position;
  t.me := claimed;
  t.mine := NULL;
  t := @schema@.hand_over(t);
  IF t.mine IS NULL THEN RETURN @schema@.reply_queued(t, c.position); END IF;
  t.kind := 'g';
  t.given := t.mine;
  t.left_ms := c.first;
  RETURN t;
END
$$;

-- ACQUIRE: a claim's first request, or its repetition.
CREATE OR REPLACE FUNCTION @schema@.admit(t @schema@.turn, c @schema@.claim, waits boolean)
RETURNS @schema@.turn LANGUAGE plpgsql AS $$
DECLARE
  wanted integer := CASE WHEN c.mode = 'p' THEN c.lim ELSE 0 END;
BEGIN
  t := @schema@.revisit(t, c.id, c.inbox);
  IF t.kind IS NOT NULL THEN RETURN t; END IF;
  -- Also for a claim that does not wait: else dead waiters in the queue would make the lock busy.
  IF t.waiters > 0 AND t.id IS NULL THEN
    t.me := NULL;
    t := @schema@.hand_over(t);
  END IF;
  IF (t.id IS NOT NULL OR t.sharers > 0 OR t.waiters > 0) AND t.lim <> wanted THEN
    t.kind := 'c';
    t.stamp := t.lim;
    RETURN t;
  END IF;
  IF t.waiters = 0 AND @schema@.admits(t, c) THEN
    t := @schema@.grant_to(t, c, c.ttl, false);
    t.kind := 'n';
    t.given := t.fence;
    RETURN t;
  END IF;
  IF NOT waits THEN
    t.kind := 'b';
    RETURN t;
  END IF;
  c.position := t.tail;
  c.until := @schema@.lease_end(t.moment, c.entry);
  INSERT INTO @schema@.claim VALUES (c.*);
  IF t.waiters = 0 THEN t.head := t.tail; END IF;
  t.tail := t.tail + 1;
  t.waiters := t.waiters + 1;
  t.lim := wanted;
  t.changed := true;
  t.durable := true;
  RETURN @schema@.reply_queued(t, c.position);
END
$$;

-- END, then ACQUIRE for the next claim if the first one was released; or one of them. `ended` and
-- `id` may be NULL. `buried`: the ended claim leaves a tombstone. `released` is NULL without a
-- claim to end.
CREATE OR REPLACE FUNCTION @schema@.exchange_one(
  to_inbox text, name text, ended uuid, ended_token bigint, buried boolean, id uuid, mode "char",
  take integer, lim integer, entry bigint, first bigint, ttl bigint, floor bigint, waits boolean,
  signed text, note text,
  OUT released boolean, OUT kind "char", OUT given bigint, OUT stamp bigint, OUT ahead bigint,
  OUT left_ms bigint, OUT durable boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
  t @schema@.turn;
  moment timestamptz := clock_timestamp();
BEGIN
  -- The usual cases first, in one statement each: a free lock that no claim waits for, and the
  -- release of one.
  IF ended IS NULL AND mode = 'x' THEN
    UPDATE @schema@.lock k SET
      fence = @schema@.next_token(k.fence, floor, moment),
      token = @schema@.next_token(k.fence, floor, moment),
      id = id, ends = @schema@.lease_end(moment, ttl), ttl = ttl, revoked = false,
      inbox = to_inbox, signed = signed, note = note, lim = 0
    WHERE k.name = name AND k.id IS NULL AND k.sharers = 0 AND k.waiters = 0
      AND k.tombs <= moment
    RETURNING k.token INTO given;
    IF FOUND THEN
      kind := 'n';
      durable := true;
      PERFORM @schema@.announce(name);
      RETURN;
    END IF;
  ELSIF ended IS NOT NULL AND id IS NULL AND NOT buried THEN
    -- As `unpinned`: not while a transaction relies on it.
    UPDATE @schema@.lock k SET id = NULL, ends = moment
    WHERE k.name = (
      SELECT o.name FROM @schema@.lock o
      WHERE o.name = name AND o.id = ended AND o.token = ended_token AND o.waiters = 0
        AND o.ends > moment
      FOR UPDATE SKIP LOCKED);
    IF FOUND THEN
      released := true;
      durable := false;
      PERFORM @schema@.announce(name);
      RETURN;
    END IF;
  END IF;
  t := @schema@.begin_turn(name);
  IF ended IS NOT NULL THEN
    IF buried THEN t := @schema@.leave_tombstone(t, ended); END IF;
    t := @schema@.end_claim(t, ended);
    released := t.mine IS NOT DISTINCT FROM ended_token AND ended_token IS NOT NULL;
    -- The next claim of a release may have entered by itself, so it is admitted first.
    IF id IS NULL OR NOT released THEN t := @schema@.hand_over(t); END IF;
  END IF;
  IF id IS NOT NULL AND released IS NOT false THEN
    t := @schema@.admit(t, ROW(name, NULL, id, false, mode, take, lim, entry, first, ttl, floor,
      NULL, NULL, false, to_inbox, signed, note)::@schema@.claim, waits);
    kind := t.kind;
    given := t.given;
    stamp := t.stamp;
    ahead := t.ahead;
    left_ms := t.left_ms;
  END IF;
  PERFORM @schema@.end_turn(t);
  durable := t.durable;
END
$$;

-- One request.
CREATE OR REPLACE FUNCTION @schema@.exchange(
  to_inbox text, name text, ended uuid, ended_token bigint, buried boolean, id uuid, mode "char",
  take integer, lim integer, entry bigint, first bigint, ttl bigint, floor bigint, waits boolean,
  signed text, note text,
  OUT released boolean, OUT kind "char", OUT given bigint, OUT stamp bigint, OUT ahead bigint,
  OUT left_ms bigint, OUT durable boolean
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  SELECT e.* INTO released, kind, given, stamp, ahead, left_ms, durable
  FROM @schema@.exchange_one(to_inbox, name, ended, ended_token, buried, id, mode, take, lim, entry,
                             first, ttl, floor, waits, signed, note) e;
  PERFORM @schema@.commit_as(durable);
END
$$;

-- Several requests, in the order of names. Returns a row for each, in that order.
CREATE OR REPLACE FUNCTION @schema@.exchange_all(
  to_inbox text, names text[], ended uuid[], ended_tokens bigint[], buried boolean[], ids uuid[],
  modes "char"[], takes integer[], lims integer[], entries bigint[], firsts bigint[],
  ttls bigint[], floors bigint[], waits boolean[], signed text[], notes text[]
) RETURNS TABLE (released boolean, kind "char", given bigint, stamp bigint, ahead bigint,
                 left_ms bigint, durable boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  any_durable boolean := false;
BEGIN
  FOR i IN 1..cardinality(names) LOOP
    SELECT e.* INTO released, kind, given, stamp, ahead, left_ms, durable
    FROM @schema@.exchange_one(to_inbox, names[i], ended[i], ended_tokens[i], buried[i], ids[i],
      modes[i], takes[i], lims[i], entries[i], firsts[i], ttls[i], floors[i], waits[i], signed[i],
      notes[i]) e;
    any_durable := any_durable OR durable;
    RETURN NEXT;
  END LOOP;
  PERFORM @schema@.commit_as(any_durable);
END
$$;

-- HEARTBEAT for several waiters, in the order of names.
CREATE OR REPLACE FUNCTION @schema@.heartbeat(to_inbox text, names text[], ids uuid[])
RETURNS TABLE (kind "char", given bigint, stamp bigint, ahead bigint, left_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  t @schema@.turn;
  any_durable boolean := false;
BEGIN
  FOR i IN 1..cardinality(names) LOOP
    t := @schema@.begin_turn(names[i]);
    t := @schema@.revisit(t, ids[i], to_inbox);
    kind := coalesce(t.kind, 'x');
    given := t.given;
    stamp := t.stamp;
    ahead := t.ahead;
    left_ms := t.left_ms;
    PERFORM @schema@.end_turn(t);
    any_durable := any_durable OR t.durable;
    RETURN NEXT;
  END LOOP;
  PERFORM @schema@.commit_as(any_durable);
END
$$;

-- RENEW for several holders, in the order of names: `millis` from now on or, with `adds`, added to
-- what is left, up to the ttl. Returns for each what is left, -1 if it was revoked, -2 if it is
-- lost.
CREATE OR REPLACE FUNCTION @schema@.renew(to_inbox text, names text[], ids uuid[], tokens bigint[],
                                          millis bigint[], adds boolean)
RETURNS TABLE (left_ms bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  t @schema@.turn;
  c @schema@.claim;
  ends timestamptz;
  moment timestamptz;
BEGIN
  FOR i IN 1..cardinality(names) LOOP
    -- The usual case in one statement.
    UPDATE @schema@.lock k SET
      ends = CASE WHEN adds
        THEN least(@schema@.lease_end(k.ends, millis[i]),
                   @schema@.lease_end(clock_timestamp(), k.ttl))
        ELSE @schema@.lease_end(clock_timestamp(), millis[i]) END,
      inbox = to_inbox
    WHERE k.name = names[i] AND k.id = ids[i] AND k.token = tokens[i] AND NOT k.revoked
      AND k.ends > clock_timestamp()
    RETURNING k.ends, clock_timestamp() INTO ends, moment;
    IF FOUND THEN
      left_ms := @schema@.millis_left(ends, moment);
      RETURN NEXT;
      CONTINUE;
    END IF;
    left_ms := -2;
    t := @schema@.begin_turn(names[i]);
    IF t.id = ids[i] AND t.token = tokens[i] AND t.ends > t.moment AND t.revoked THEN
      left_ms := -1;
    ELSIF t.sharers > 0 THEN
      SELECT d.* INTO c FROM @schema@.claim d
      WHERE d.name = t.name AND d.id = ids[i] AND d.held AND d.token = tokens[i]
        AND d.until > t.moment;
      IF FOUND AND c.revoked THEN
        left_ms := -1;
      ELSIF FOUND THEN
        ends := CASE WHEN adds
          THEN least(@schema@.lease_end(c.until, millis[i]), @schema@.lease_end(t.moment, c.ttl))
          ELSE @schema@.lease_end(t.moment, millis[i]) END;
        UPDATE @schema@.claim d SET until = ends, inbox = to_inbox
        WHERE d.name = t.name AND d.position = c.position;
        left_ms := @schema@.millis_left(ends, t.moment);
      END IF;
    END IF;
    -- Leases that were found over are ended for the waiters.
    IF t.changed THEN
      t := @schema@.hand_over(t);
      PERFORM @schema@.end_turn(t);
    END IF;
    RETURN NEXT;
  END LOOP;
  PERFORM @schema@.commit_as(true);
END
$$;

-- Changes a held lock: n (its note), d (downgrade to a reader), r (raises the fence and the token).
-- Returns false if the claim does not hold it.
CREATE OR REPLACE FUNCTION @schema@.amend(name text, id uuid, token bigint, what "char",
                                          signed text, note text, raised bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
  t @schema@.turn := @schema@.begin_turn(name);
  c @schema@.claim;
  done boolean := true;
BEGIN
  IF t.id = id AND t.ends > t.moment AND (t.token = token OR what = 'r' AND t.token = raised) THEN
    IF what = 'n' THEN
      t.signed := signed;
      t.note := note;
    ELSIF what = 'r' THEN
      IF t.fence > raised THEN RETURN false; END IF;
      t.fence := raised;
      t.token := raised;
    ELSIF @schema@.unpinned(name) THEN
      c := ROW(name, t.tail, id, true, 's', 0, 0, 0, 0, t.ttl, NULL, token, t.ends, t.revoked,
               t.inbox, t.signed, t.note)::@schema@.claim;
      INSERT INTO @schema@.claim VALUES (c.*);
      t.tail := t.tail + 1;
      IF t.waiters = 0 THEN t.head := t.tail; END IF;
      t.sharers := 1;
      t.first_end := t.ends;
      t.id := NULL;
    ELSE
      RAISE EXCEPTION 'lockset: a transaction that relies on % is still open', name
        USING ERRCODE = 'lock_not_available';
    END IF;
    t.changed := true;
  ELSE
    UPDATE @schema@.claim d SET
      signed = CASE WHEN what = 'n' THEN signed ELSE d.signed END,
      note = CASE WHEN what = 'n' THEN note ELSE d.note END
    WHERE d.name = name AND d.id = id AND d.held AND d.token = token AND d.until > t.moment
      AND what <> 'r';
    done := FOUND;
    t.changed := t.changed OR done;
  END IF;
  t := @schema@.hand_over(t);
  PERFORM @schema@.end_turn(t);
  PERFORM @schema@.commit_as(true);
  RETURN done;
END
$$;

-- Makes a held lock another claim's: same token, same lease. Returns d (done), x (the successor was
-- withdrawn) or l (lost).
CREATE OR REPLACE FUNCTION @schema@.adopt(name text, id uuid, token bigint, successor uuid,
                                          to_inbox text, signed text, note text) RETURNS "char"
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_variable
DECLARE
  t @schema@.turn := @schema@.begin_turn(name);
BEGIN
  PERFORM @schema@.commit_as(true);
  IF @schema@.is_withdrawn(t, successor) THEN RETURN 'x'; END IF;
  IF t.id = successor AND t.token = token AND t.ends > t.moment THEN RETURN 'd'; END IF;
  PERFORM FROM @schema@.claim d
  WHERE d.name = name AND d.id = successor AND d.held AND d.token = token AND d.until > t.moment;
  IF FOUND THEN RETURN 'd'; END IF;
  IF t.id = id AND t.token = token AND t.ends > t.moment THEN
    t.id := successor;
    t.inbox := to_inbox;
    t.signed := signed;
    t.note := note;
  ELSE
    -- No key may change under an open transaction of the holder, so this may wait for it.
    UPDATE @schema@.claim d SET id = successor, inbox = to_inbox, signed = signed, note = note
    WHERE d.name = name AND d.id = id AND d.held AND d.token = token AND d.until > t.moment;
    IF NOT FOUND THEN RETURN 'l'; END IF;
  END IF;
  t := @schema@.leave_tombstone(t, id);
  PERFORM @schema@.end_turn(t);
  RETURN 'd';
END
$$;

-- Breaks a lock (`at_once`), or asks for it back. Returns the holders. They get a message; one that
-- does not receive it finds out by its next renewal.
CREATE OR REPLACE FUNCTION @schema@.force_release(wanted text, at_once boolean)
RETURNS TABLE (id uuid, token bigint, mode "char", take integer, lim integer, left_ms bigint,
               signed text, note text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  t @schema@.turn := @schema@.begin_turn(wanted);
  c @schema@.claim;
  message text := CASE WHEN at_once THEN 'b' ELSE 'r' END;
BEGIN
  IF t.id IS NOT NULL AND t.ends > t.moment THEN
    RETURN QUERY SELECT t.id, t.token, 'x'::"char", 0, 0,
      @schema@.millis_left(t.ends, t.moment), t.signed, t.note;
    PERFORM @schema@.tell(t.inbox, message || replace(t.id::text, '-', ''));
    t.revoked := true;
    t.changed := true;
    IF at_once THEN t := @schema@.end_claim(t, t.id); END IF;
  END IF;
  IF t.sharers > 0 THEN
    FOR c IN SELECT d.* FROM @schema@.claim d
             WHERE d.name = t.name AND d.held AND d.until > t.moment ORDER BY d.token LOOP
      RETURN QUERY SELECT c.id, c.token, c.mode, c.take, c.lim,
        @schema@.millis_left(c.until, t.moment), c.signed, c.note;
      PERFORM @schema@.tell(c.inbox, message || replace(c.id::text, '-', ''));
      IF at_once THEN t := @schema@.end_claim(t, c.id); END IF;
    END LOOP;
    UPDATE @schema@.claim d SET revoked = true WHERE d.name = t.name AND d.held;
    t.changed := true;
  END IF;
  t := @schema@.hand_over(t);
  PERFORM @schema@.end_turn(t);
  PERFORM @schema@.commit_as(true);
END
$$;

-- Writes or removes (`value` NULL) a cell if it has the expected version. `done`: the new version;
-- otherwise what was found. No version is used twice: a new one is not below the clock.
CREATE OR REPLACE FUNCTION @schema@.swap(wanted text, expected bigint, new_value bytea,
                                         OUT done boolean, OUT version bigint, OUT value bytea)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
  PERFORM @schema@.commit_as(true);
  swap.version := CASE WHEN new_value IS NULL THEN 0
    ELSE greatest(expected + 1, @schema@.clock_micros(clock_timestamp())) END;
  IF new_value IS NULL AND expected > 0 THEN
    DELETE FROM @schema@.cell e WHERE e.name = wanted AND e.version = expected;
  ELSIF new_value IS NULL THEN
    PERFORM WHERE NOT EXISTS (SELECT FROM @schema@.cell e WHERE e.name = wanted);
  ELSIF expected = 0 THEN
    INSERT INTO @schema@.cell (name, version, value) VALUES (wanted, swap.version, new_value)
    ON CONFLICT DO NOTHING;
  ELSE
    UPDATE @schema@.cell e SET version = swap.version, value = new_value
    WHERE e.name = wanted AND e.version = expected;
  END IF;
  done := FOUND;
  IF done THEN
    PERFORM @schema@.announce(wanted);
    RETURN;
  END IF;
  SELECT e.version, e.value INTO swap.version, swap.value
  FROM @schema@.cell e WHERE e.name = wanted;
  IF NOT FOUND THEN
    swap.version := 0;
  END IF;
END
$$;

-- What is known of one name (`exact`), or of all that begin with `scope`. Rows of each name: f (its
-- fence), h (a holder), w (a waiter), c (its cell: version and value).
CREATE OR REPLACE FUNCTION @schema@.inspect(wanted text, exact boolean)
RETURNS TABLE (name text, kind "char", id uuid, number bigint, mode "char", take integer,
               lim integer, left_ms bigint, revoked boolean, signed text, note text, value bytea)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH moment AS MATERIALIZED (SELECT clock_timestamp() AS now),
  locks AS MATERIALIZED (
    SELECT k.* FROM @schema@.lock k WHERE exact AND k.name = wanted
    UNION ALL
    SELECT k.* FROM @schema@.lock k, moment WHERE NOT exact AND k.name ^@ wanted
      AND (k.id IS NOT NULL OR k.sharers > 0 OR k.waiters > 0)
  ),
  claims AS MATERIALIZED (
    SELECT d.* FROM locks k JOIN @schema@.claim d ON d.name = k.name, moment
    WHERE d.until > moment.now AND (k.sharers > 0 OR k.waiters > 0)
  ),
  pins AS MATERIALIZED (SELECT p.* FROM @schema@.pins() p)
  SELECT k.name, 'f'::"char", NULL::uuid, k.fence, NULL::"char", 0, 0, 0::bigint, false, '', '',
         NULL::bytea
  FROM locks k
  UNION ALL
  SELECT k.name, 'h', k.id, k.token, 'x', 0, 0, @schema@.millis_left(k.ends, moment.now), k.revoked,
         k.signed, concat_ws(' ', nullif(k.note, ''), p.shown), NULL
  FROM locks k CROSS JOIN moment
  LEFT JOIN LATERAL (
    SELECT string_agg(pins.shown, ' ') AS shown FROM pins WHERE pins.key = @schema@.pin_key(k.name)
  ) p ON true
  WHERE k.id IS NOT NULL AND (k.ends > moment.now OR p.shown IS NOT NULL)
  UNION ALL
  SELECT d.name, CASE WHEN d.held THEN 'h' ELSE 'w' END::"char", d.id,
         CASE WHEN d.held THEN d.token ELSE d.position END, d.mode, d.take, d.lim,
         @schema@.millis_left(d.until, moment.now), d.revoked, d.signed, d.note, NULL
  FROM claims d, moment
  UNION ALL
  SELECT e.name, 'c', NULL, e.version, NULL, 0, 0, 0, false, '', '', e.value
  FROM @schema@.cell e WHERE CASE WHEN exact THEN e.name = wanted ELSE e.name ^@ wanted END
  ORDER BY 1, 2, 4
$$;

-- Registers a watch of this client for a minute, or ends it.
CREATE OR REPLACE FUNCTION @schema@.watch(to_inbox text, scopes text[], exacts boolean[])
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM @schema@.commit_as(false);
  DELETE FROM @schema@.watcher w
  WHERE w.inbox = to_inbox AND NOT EXISTS (
    SELECT FROM unnest(scopes, exacts) AS s (scope, exact)
    WHERE s.scope = w.scope AND s.exact = w.exact);
  INSERT INTO @schema@.watcher (inbox, scope, exact, until)
  SELECT to_inbox, s.scope, s.exact, clock_timestamp() + interval '60 seconds'
  FROM unnest(scopes, exacts) AS s (scope, exact)
  ON CONFLICT (inbox, scope, exact) DO UPDATE SET until = excluded.until;
END
$$;

-- Removes what is not used any more, at most once an hour: tombstones, watches, dead waiters, and
-- names that were not used for a week. `base` keeps the greatest fence of the names.
CREATE OR REPLACE FUNCTION @schema@.sweep() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  t @schema@.turn;
  idle text;
  greatest_fence bigint;
BEGIN
  PERFORM FROM @schema@.meta m WHERE m.swept < clock_timestamp() - interval '1 hour'
  FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN false; END IF;
  DELETE FROM @schema@.tombstone b WHERE b.until < clock_timestamp();
  DELETE FROM @schema@.watcher w WHERE w.until < clock_timestamp();
  FOR idle IN SELECT DISTINCT d.name FROM @schema@.claim d
              WHERE d.until < clock_timestamp() - interval '1 minute' ORDER BY 1 LIMIT 10000 LOOP
    t := @schema@.begin_turn(idle);
    t := @schema@.hand_over(t);
    PERFORM @schema@.end_turn(t);
  END LOOP;
  WITH unused AS (
    SELECT k.name FROM @schema@.lock k
    WHERE k.id IS NULL AND k.sharers = 0 AND k.waiters = 0
      AND k.ends < clock_timestamp() - interval '7 days' AND k.tombs < clock_timestamp()
    ORDER BY k.name LIMIT 10000 FOR UPDATE SKIP LOCKED
  ), removed AS (
    DELETE FROM @schema@.lock k USING unused WHERE k.name = unused.name RETURNING k.fence
  ) SELECT max(fence) INTO greatest_fence FROM removed;
  UPDATE @schema@.meta m
  SET swept = clock_timestamp(), base = greatest(m.base, greatest_fence);
  PERFORM @schema@.commit_as(true);
  RETURN true;
END
$$;

CREATE OR REPLACE FUNCTION @schema@.schema_version() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT m.version FROM @schema@.meta m
$$;

-- Only those to whom it is granted may call anything here.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA @schema@ FROM PUBLIC;
REVOKE ALL ON SCHEMA @schema@ FROM PUBLIC;
