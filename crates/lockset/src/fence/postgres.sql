-- The marks of Lockset's fence in PostgreSQL 13 or later. docs/fencing-sql.md explains their use.
--
-- Install:  psql --single-transaction -v ON_ERROR_STOP=1 -f postgres.sql
-- It may be run again. `PostgresFence::new` runs it if the tables are missing.
--
-- A write presents a token in one of these forms:
--   SELECT lockset_fence.admit('stock', 'orders/42', 17);     in the transaction of the write
--   SET LOCAL lockset.token = 'orders/42=17';                 for tables with a trigger
--   a column of the row                                       for tables with a row trigger
--
-- Errors, by SQLSTATE. Nothing may be written after any of them:
--   LF001  the token is stale: another client has held the lock since
--   LF002  the token or a name is not valid
--   LF003  no token was given
--   LF004  the token belongs to another lock than the one that protects the table

-- Two clients may install at the same moment; IF NOT EXISTS alone fails then.
SELECT pg_catalog.pg_advisory_xact_lock(5515243001970783844);

DO $$
DECLARE
  found integer;
BEGIN
  IF to_regclass('lockset_fence.version') IS NOT NULL THEN
    SELECT max(v.version) INTO found FROM lockset_fence.version v;
    IF found > 1 THEN
      RAISE EXCEPTION 'lockset: the tables of the fence have version %, this file has 1', found
        USING ERRCODE = 'LF002', HINT = 'Use a newer version of Lockset.';
    END IF;
  END IF;
END
$$;

CREATE SCHEMA IF NOT EXISTS lockset_fence;

CREATE TABLE IF NOT EXISTS lockset_fence.marks (
  resource text COLLATE "C" NOT NULL,
  lock text COLLATE "C" NOT NULL,
  token bigint NOT NULL CHECK (token >= 1),
  PRIMARY KEY (resource, lock),
  CHECK (octet_length(resource) BETWEEN 1 AND 255),
  CHECK (octet_length(lock) BETWEEN 1 AND 255)
);

-- Created last, because its presence says that the rest is there. One row.
CREATE TABLE IF NOT EXISTS lockset_fence.version (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  version integer NOT NULL
);
INSERT INTO lockset_fence.version (version) VALUES (1) ON CONFLICT DO NOTHING;

-- Admits a write to `resource`, which the lock `lock` protects, or raises LF001. It runs with the
-- rights of its owner, so that a writer who may only call it cannot lower a mark.
CREATE OR REPLACE FUNCTION lockset_fence.admit(resource text, lock text, token bigint)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  seen bigint;
BEGIN
  IF admit.token IS NULL OR admit.token < 1 THEN
    RAISE EXCEPTION 'lockset: the token % is not valid', coalesce(admit.token::text, 'NULL')
      USING ERRCODE = 'LF002', HINT = 'It is a whole number from 1 to 9223372036854775807.';
  END IF;
  IF (octet_length(admit.resource) BETWEEN 1 AND 255) IS NOT TRUE
    OR (octet_length(admit.lock) BETWEEN 1 AND 255) IS NOT TRUE THEN
    RAISE EXCEPTION 'lockset: the name of the resource or of the lock is not valid'
      USING ERRCODE = 'LF002', HINT = 'A name has 1 to 255 bytes.';
  END IF;
  -- An equal token is written again: the row stays locked until the end of the transaction, and no
  -- greater token is admitted before that.
  INSERT INTO lockset_fence.marks AS mark (resource, lock, token)
    VALUES (admit.resource, admit.lock, admit.token)
    ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token
    WHERE mark.token <= excluded.token;
  IF NOT FOUND THEN
    SELECT mark.token INTO seen FROM lockset_fence.marks mark
      WHERE mark.resource = admit.resource AND mark.lock = admit.lock;
    RAISE EXCEPTION
      'lockset: the write to "%" was rejected: token % of the lock "%" is stale, % was seen',
      admit.resource, admit.token, admit.lock, seen
      USING ERRCODE = 'LF001', HINT = 'Give up the work and take the lock again.';
  END IF;
END
$$;

-- Admits a write with a token of the text form `name=token`. In the name, %41 stands for A.
CREATE OR REPLACE FUNCTION lockset_fence.admit_text(resource text, lock text, presented text)
RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  parts text[];
  name text;
BEGIN
  -- A setting that was set in an earlier transaction of the session is empty, not absent.
  IF coalesce(presented, '') = '' THEN
    RAISE EXCEPTION 'lockset: the write to "%" was rejected: no token was given', resource
      USING ERRCODE = 'LF003', HINT = 'SET LOCAL lockset.token = ''name=token'' before it.';
  END IF;
  parts := regexp_match(presented, '^(.+)=0*([1-9][0-9]{0,18})$');
  IF parts IS NULL OR parts[2]::numeric > 9223372036854775807 THEN
    RAISE EXCEPTION 'lockset: the fencing token "%" is not valid', left(presented, 300)
      USING ERRCODE = 'LF002',
        HINT = 'It has the form name=token, with a token from 1 to 9223372036854775807.';
  END IF;
  SELECT convert_from(string_agg(
      CASE WHEN piece[1] ~ '^%..$' THEN decode(substr(piece[1], 2), 'hex')
           ELSE convert_to(piece[1], 'UTF8') END, ''::bytea ORDER BY place), 'UTF8')
    INTO name
    FROM regexp_matches(parts[1], '%[0-9A-Fa-f]{2}|[^%]+|%', 'g')
      WITH ORDINALITY AS pieces(piece, place);
  IF lock IS NOT NULL AND lock <> name THEN
    RAISE EXCEPTION
      'lockset: the write to "%" was rejected: it is protected by the lock "%", and the token is one of "%"',
      resource, lock, name USING ERRCODE = 'LF004';
  END IF;
  PERFORM lockset_fence.admit(resource, name, parts[2]::bigint);
END
$$;

-- A trigger for tables whose writers say SET LOCAL lockset.token. Arguments: the resource, and
-- where one lock protects the whole table, its name. A statement trigger is the better choice: it
-- is called once for each statement and before any row is locked.
--   CREATE TRIGGER fence BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON stock
--     FOR EACH STATEMENT EXECUTE FUNCTION lockset_fence.check_session('stock', 'orders');
CREATE OR REPLACE FUNCTION lockset_fence.check_session()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM lockset_fence.admit_text(
    TG_ARGV[0], TG_ARGV[1], current_setting('lockset.token', true));
  IF TG_LEVEL = 'ROW' AND TG_OP = 'DELETE' THEN
    RETURN OLD;
  END IF;
  RETURN NEW;
END
$$;

-- A trigger for tables whose writers put the token into a column of the row. Arguments: the
-- resource, the column with the name of the lock, the column with the token. The token is stored
-- as NULL, so that an UPDATE without one is recognised. The lock of a row cannot be changed: its
-- holders would no longer be checked. A DELETE has no new row: it needs SET LOCAL lockset.token.
-- TRUNCATE calls no row trigger: it needs a statement trigger with check_session.
--   CREATE TRIGGER fence BEFORE INSERT OR UPDATE OR DELETE ON invoices
--     FOR EACH ROW EXECUTE FUNCTION lockset_fence.check_row('invoices', 'lock', 'fence_token');
CREATE OR REPLACE FUNCTION lockset_fence.check_row()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  fields jsonb := CASE TG_OP WHEN 'DELETE' THEN to_jsonb(OLD) ELSE to_jsonb(NEW) END;
  lock text;
  token text;
  old_lock text;
BEGIN
  IF TG_NARGS <> 3 OR NOT fields ?& ARRAY[TG_ARGV[1], TG_ARGV[2]] THEN
    RAISE EXCEPTION 'lockset: the trigger "%" needs a resource and two columns of "%"',
      TG_NAME, TG_TABLE_NAME USING ERRCODE = 'LF002';
  END IF;
  lock := fields ->> TG_ARGV[1];
  token := fields ->> TG_ARGV[2];
  IF TG_OP = 'DELETE' THEN
    PERFORM lockset_fence.admit_text(
      TG_ARGV[0], coalesce(lock, ''), current_setting('lockset.token', true));
    RETURN OLD;
  END IF;
  IF token IS NULL OR lock IS NULL THEN
    RAISE EXCEPTION 'lockset: the write to "%" was rejected: no token was given', TG_ARGV[0]
      USING ERRCODE = 'LF003', HINT = format('Set the columns %I and %I.', TG_ARGV[1], TG_ARGV[2]);
  END IF;
  IF TG_OP = 'UPDATE' THEN
    old_lock := to_jsonb(OLD) ->> TG_ARGV[1];
    IF old_lock <> lock THEN
      RAISE EXCEPTION
        'lockset: the write to "%" was rejected: it is protected by the lock "%", and the token is one of "%"',
        TG_ARGV[0], old_lock, lock USING ERRCODE = 'LF004';
    END IF;
  END IF;
  IF token !~ '^[0-9]{1,19}$' OR token::numeric > 9223372036854775807 THEN
    RAISE EXCEPTION 'lockset: the token % is not valid', left(token, 40)
      USING ERRCODE = 'LF002', HINT = 'It is a whole number from 1 to 9223372036854775807.';
  END IF;
  PERFORM lockset_fence.admit(TG_ARGV[0], lock, token::bigint);
  RETURN jsonb_populate_record(NEW, jsonb_build_object(TG_ARGV[2], NULL));
END
$$;

-- They run with their owner's rights: only roles that are named may call them or attach them.
REVOKE ALL ON FUNCTION lockset_fence.admit(text, text, bigint) FROM PUBLIC;
REVOKE ALL ON FUNCTION lockset_fence.admit_text(text, text, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION lockset_fence.check_session() FROM PUBLIC;
REVOKE ALL ON FUNCTION lockset_fence.check_row() FROM PUBLIC;
