-- The queue: docs/redis-handoff.md has its rules, which are the same here.

-- One operation on one name, under the lock of its row: that row, then what the operation found.
DO $$
BEGIN
  IF to_regtype('@schema@.turn') IS NULL THEN
    CREATE TYPE @schema@.turn AS (
      name text, fence bigint, id uuid, token bigint, ends timestamptz, ttl bigint,
      revoked boolean, inbox text, signed text, note text, sharers integer, taken bigint,
      first_end timestamptz, waiters integer, head bigint, tail bigint, lim integer,
      tombs timestamptz,
      -- The time; whether the row changed; whether a claim was granted the lock, so that the commit
      -- must be durable; the claim whose own request this is, and the token that it was granted.
      moment timestamptz, changed boolean, durable boolean, me uuid, mine bigint,
      -- The reply to a claim: n given (granted now, for the ttl) | g given left (granted before) |
      -- q stamp ahead left (queued) | b (busy) | x (gone) | c stamp (clash: in use as a semaphore
      -- of that many permits, or as a lock if 0). NULL: the claim is not known.
      kind "char", given bigint, stamp bigint, ahead bigint, left_ms bigint
    );
  END IF;
END
$$;

-- Sends a message to a client, unless the server's queue of them is filling up: then the commit
-- would fail. The client's heartbeat finds out instead.
CREATE OR REPLACE FUNCTION @schema@.tell(inbox text, message text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF inbox <> '' AND pg_notification_queue_usage() < 0.5 THEN
    PERFORM pg_notify(inbox, message);
  END IF;
END
$$;

-- Tells the clients that watch this name.
CREATE OR REPLACE FUNCTION @schema@.announce(changed text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  to_inbox text;
BEGIN
  FOR to_inbox IN
    SELECT DISTINCT w.inbox FROM @schema@.watcher w
    WHERE w.until > clock_timestamp()
      AND CASE WHEN w.exact THEN w.scope = changed ELSE starts_with(changed, w.scope) END
  LOOP
    PERFORM @schema@.tell(to_inbox, 'w' || changed);
  END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION @schema@.clock_micros(moment timestamptz) RETURNS bigint
LANGUAGE sql AS $$ SELECT (extract(epoch FROM moment) * 1000000)::bigint $$;

-- What is left of a lease, in whole milliseconds.
CREATE OR REPLACE FUNCTION @schema@.millis_left(ends timestamptz, moment timestamptz) RETURNS bigint
LANGUAGE sql AS $$
  SELECT CASE WHEN ends = 'infinity' THEN 0
              ELSE greatest(floor(extract(epoch FROM ends - moment) * 1000), 0)::bigint END
$$;

-- The end of a lease of this length.
CREATE OR REPLACE FUNCTION @schema@.lease_end(moment timestamptz, millis bigint) RETURNS timestamptz
LANGUAGE sql AS $$ SELECT moment + millis * interval '1 millisecond' $$;

-- Whether no transaction has called `assert_held` for the exclusive holder of this name. The row
-- stays locked until the end of this transaction, so none can from now on.
CREATE OR REPLACE FUNCTION @schema@.unpinned(wanted text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM @schema@.lock k WHERE k.name = wanted FOR UPDATE SKIP LOCKED;
  RETURN FOUND;
END
$$;

-- Removes readers and holders of permits whose lease is over.
CREATE OR REPLACE FUNCTION @schema@.expire_sharers(t @schema@.turn) RETURNS @schema@.turn
LANGUAGE plpgsql AS $$
DECLARE
  ended integer;
  freed bigint;
BEGIN
  WITH over AS (
    SELECT c.id FROM @schema@.claim c
    WHERE c.name = t.name AND c.held AND c.until <= t.moment
    FOR UPDATE SKIP LOCKED
  ), gone AS (
    DELETE FROM @schema@.claim c USING over WHERE c.name = t.name AND c.id = over.id
    RETURNING c.take
  ) SELECT count(*), coalesce(sum(take), 0) INTO ended, freed FROM gone;
  t.sharers := t.sharers - ended;
  t.taken := t.taken - freed;
  SELECT coalesce(min(c.until), 'infinity') INTO t.first_end
  FROM @schema@.claim c WHERE c.name = t.name AND c.held;
  t.changed := true;
  RETURN t;
END
$$;

-- Locks the row of a name, creates it if it is missing, and ends the leases that are over.
CREATE OR REPLACE FUNCTION @schema@.begin_turn(wanted text) RETURNS @schema@.turn
LANGUAGE plpgsql AS $$
DECLARE
  t @schema@.turn;
BEGIN
  LOOP
    SELECT k.name, k.fence, k.id, k.token, k.ends, k.ttl, k.revoked, k.inbox, k.signed, k.note,
           k.sharers, k.taken, k.first_end, k.waiters, k.head, k.tail, k.lim, k.tombs,
           NULL, false, false, NULL, NULL, NULL, NULL, NULL, NULL, NULL
    INTO t FROM @schema@.lock k WHERE k.name = wanted FOR NO KEY UPDATE;
    EXIT WHEN FOUND;
    INSERT INTO @schema@.lock (name, fence) SELECT wanted, m.base FROM @schema@.meta m
    ON CONFLICT DO NOTHING;
  END LOOP;
  t.moment := clock_timestamp();
  -- A holder whose transaction is still open stays until it ends.
  IF t.id IS NOT NULL AND t.ends <= t.moment AND @schema@.unpinned(wanted) THEN
    t.id := NULL;
    t.changed := true;
  END IF;
  IF t.sharers > 0 AND t.first_end <= t.moment THEN
    t := @schema@.expire_sharers(t);
  END IF;
  RETURN t;
END
$$;

-- Stores what an operation changed.
CREATE OR REPLACE FUNCTION @schema@.end_turn(t @schema@.turn) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF NOT t.changed THEN RETURN; END IF;
  UPDATE @schema@.lock k SET
    fence = t.fence, id = t.id, token = t.token,
    ends = CASE WHEN t.id IS NULL THEN t.moment ELSE t.ends END,
    ttl = t.ttl, revoked = t.revoked, inbox = t.inbox, signed = t.signed, note = t.note,
    sharers = t.sharers, taken = t.taken, first_end = t.first_end, waiters = t.waiters,
    head = t.head, tail = t.tail, lim = t.lim, tombs = t.tombs
  WHERE k.name = t.name;
  PERFORM @schema@.announce(t.name);
END
$$;

-- The next token of a name. It is decided here, and nowhere else: above all tokens so far; not
-- below the caller's own floor, if it has one; otherwise not below the clock, so that tokens keep
-- growing after a failover to a standby that is behind. Division by zero: they are used up.
CREATE OR REPLACE FUNCTION @schema@.next_token(fence bigint, own bigint, moment timestamptz)
RETURNS bigint LANGUAGE sql AS $$
  SELECT greatest(fence + 1, coalesce(own, @schema@.clock_micros(moment)))
         / (greatest(fence + 1, own, 0) < 9007199254740992)::integer
$$;

-- The one predicate for all modes.
CREATE OR REPLACE FUNCTION @schema@.admits(t @schema@.turn, c @schema@.claim) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  RETURN t.id IS NULL AND CASE c.mode
    WHEN 'x' THEN t.sharers = 0
    WHEN 's' THEN true
    ELSE t.taken + c.take <= c.lim
  END;
END
$$;

-- Makes `c` a holder for `lease` milliseconds. A reader or holder of permits keeps its row if it
-- has waited.
CREATE OR REPLACE FUNCTION @schema@.grant_to(t @schema@.turn, c @schema@.claim, lease bigint,
                                             waited boolean) RETURNS @schema@.turn
LANGUAGE plpgsql AS $$
BEGIN
  t.fence := @schema@.next_token(t.fence, c.floor, t.moment);
  t.lim := CASE WHEN c.mode = 'p' THEN c.lim ELSE 0 END;
  t.changed := true;
  t.durable := true;
  c.until := @schema@.lease_end(t.moment, lease);
  IF c.mode = 'x' THEN
    IF waited THEN
      DELETE FROM @schema@.claim d WHERE d.name = t.name AND d.position = c.position;
    END IF;
    t.id := c.id;
    t.token := t.fence;
    t.ends := c.until;
    t.ttl := c.ttl;
    t.revoked := false;
    t.inbox := c.inbox;
    t.signed := c.signed;
    t.note := c.note;
    RETURN t;
  END IF;
  t.sharers := t.sharers + 1;
  t.taken := t.taken + c.take;
  t.first_end := least(t.first_end, c.until);
  IF waited THEN
    UPDATE @schema@.claim d SET held = true, token = t.fence, until = c.until
    WHERE d.name = t.name AND d.position = c.position;
  ELSE
    c.held := true;
    c.token := t.fence;
    c.position := t.tail;
    t.tail := t.tail + 1;
    IF t.waiters = 0 THEN t.head := t.tail; END IF;
    INSERT INTO @schema@.claim VALUES (c.*);
  END IF;
  RETURN t;
END
$$;

-- HAND-ON: grants the lock to the first live waiters, as far as they are admitted. The reply tells
-- `t.me`, a message all others.
CREATE OR REPLACE FUNCTION @schema@.hand_over(t @schema@.turn) RETURNS @schema@.turn
LANGUAGE plpgsql AS $$
DECLARE
  c @schema@.claim;
BEGIN
  FOR i IN 1..256 LOOP
    EXIT WHEN t.waiters = 0 OR t.id IS NOT NULL;
    SELECT d.* INTO c FROM @schema@.claim d
    WHERE d.name = t.name AND d.position >= t.head AND NOT d.held
    ORDER BY d.position LIMIT 1;
    IF NOT FOUND THEN
      t.waiters := 0;
      t.changed := true;
      EXIT;
    END IF;
    IF c.until <= t.moment THEN
      DELETE FROM @schema@.claim d WHERE d.name = t.name AND d.position = c.position;
    ELSIF @schema@.admits(t, c) THEN
      t := @schema@.grant_to(t, c, c.first, true);
      IF c.id = t.me THEN
        t.mine := t.fence;
      ELSE
        PERFORM @schema@.tell(c.inbox, 'g' || replace(c.id::text, '-', '') || t.fence);
      END IF;
    ELSE
      EXIT;
    END IF;
    t.head := c.position + 1;
    t.waiters := t.waiters - 1;
    t.changed := true;
  END LOOP;
  RETURN t;
END
$$;

-- Removes a claim, held or waiting. `t.mine` is the token that it held by. A holder whose
-- transaction is still open stays until that ends, but its lease is over.
CREATE OR REPLACE FUNCTION @schema@.end_claim(t @schema@.turn, ended uuid) RETURNS @schema@.turn
LANGUAGE plpgsql AS $$
DECLARE
  c @schema@.claim;
BEGIN
  t.mine := NULL;
  IF t.id = ended THEN
    t.mine := t.token;
    t.changed := true;
    t.ends := t.moment;
    IF @schema@.unpinned(t.name) THEN t.id := NULL; END IF;
    RETURN t;
  END IF;
  IF t.sharers = 0 AND t.waiters = 0 THEN RETURN t; END IF;
  SELECT d.* INTO c FROM @schema@.claim d WHERE d.name = t.name AND d.id = ended;
  IF NOT FOUND THEN RETURN t; END IF;
  t.changed := true;
  IF NOT c.held THEN
    DELETE FROM @schema@.claim d WHERE d.name = t.name AND d.position = c.position;
    t.waiters := t.waiters - 1;
    RETURN t;
  END IF;
  t.mine := c.token;
  PERFORM FROM @schema@.claim d WHERE d.name = t.name AND d.position = c.position
  FOR UPDATE SKIP LOCKED;
  IF FOUND THEN
    DELETE FROM @schema@.claim d WHERE d.name = t.name AND d.position = c.position;
    t.sharers := t.sharers - 1;
    t.taken := t.taken - c.take;
    IF t.sharers = 0 THEN t.first_end := 'infinity'; END IF;
  ELSE
    UPDATE @schema@.claim d SET until = t.moment
    WHERE d.name = t.name AND d.position = c.position;
    t.first_end := t.moment;
  END IF;
  RETURN t;
END
$$;

-- Marks a claim as withdrawn.
CREATE OR REPLACE FUNCTION @schema@.leave_tombstone(t @schema@.turn, withdrawn uuid)
RETURNS @schema@.turn LANGUAGE plpgsql AS $$
DECLARE
  life timestamptz := t.moment + interval '60 seconds';
BEGIN
  INSERT INTO @schema@.tombstone AS b (id, until) VALUES (withdrawn, life)
  ON CONFLICT (id) DO UPDATE SET until = excluded.until;
  t.tombs := life;
  t.changed := true;
  t.durable := true;
  RETURN t;
END
$$;

CREATE OR REPLACE FUNCTION @schema@.is_withdrawn(t @schema@.turn, claimed uuid) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  RETURN t.tombs > t.moment AND EXISTS (
    SELECT FROM @schema@.tombstone b WHERE b.id = claimed AND b.until > t.moment);
END
$$;

-- A commit that grants nothing need not be durable: if it is lost, a lock stays held until its
-- lease ends, or a queue entry is shorter-lived. One that grants must be, whatever the role's
-- setting. A transaction of several operations is durable if one of them is.
CREATE OR REPLACE FUNCTION @schema@.commit_as(durable boolean) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF NOT durable THEN
    PERFORM set_config('synchronous_commit', 'off', true);
  ELSIF current_setting('synchronous_commit') = 'off' THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END
$$;
