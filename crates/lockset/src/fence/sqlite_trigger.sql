-- Triggers that reject a write to a table of SQLite if its token is stale, missing or not valid,
-- whichever program makes it. Replace `stock` by your table and `orders` by the name of the lock
-- that protects it. sqlite.sql comes first.
--
-- A writer puts the token into the column `fence_token` with each INSERT and each UPDATE. The
-- triggers store NULL there, so that an UPDATE without a token is recognised.

ALTER TABLE stock ADD COLUMN fence_token INTEGER;

CREATE TRIGGER stock_fence_insert BEFORE INSERT ON stock
BEGIN
  SELECT RAISE(ABORT, 'lockset: no token was given: set the column fence_token')
    WHERE NEW.fence_token IS NULL;
  SELECT RAISE(ABORT, 'lockset: the token is not valid')
    WHERE typeof(NEW.fence_token) <> 'integer' OR NEW.fence_token < 1;
  SELECT RAISE(ABORT, 'lockset: the token is stale: take the lock again')
    FROM lockset_fence_marks
    WHERE resource = 'stock' AND lock = 'orders' AND token > NEW.fence_token;
  INSERT INTO lockset_fence_marks (resource, lock, token)
    VALUES ('stock', 'orders', NEW.fence_token)
    ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token;
END;

-- OLD.fence_token is set only in the update by the triggers below.
CREATE TRIGGER stock_fence_update BEFORE UPDATE ON stock WHEN OLD.fence_token IS NULL
BEGIN
  SELECT RAISE(ABORT, 'lockset: no token was given: set the column fence_token')
    WHERE NEW.fence_token IS NULL;
  SELECT RAISE(ABORT, 'lockset: the token is not valid')
    WHERE typeof(NEW.fence_token) <> 'integer' OR NEW.fence_token < 1;
  SELECT RAISE(ABORT, 'lockset: the token is stale: take the lock again')
    FROM lockset_fence_marks
    WHERE resource = 'stock' AND lock = 'orders' AND token > NEW.fence_token;
  INSERT INTO lockset_fence_marks (resource, lock, token)
    VALUES ('stock', 'orders', NEW.fence_token)
    ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token;
END;

CREATE TRIGGER stock_fence_inserted AFTER INSERT ON stock WHEN NEW.fence_token IS NOT NULL
BEGIN
  UPDATE stock SET fence_token = NULL WHERE rowid = NEW.rowid;
END;

CREATE TRIGGER stock_fence_updated AFTER UPDATE ON stock WHEN NEW.fence_token IS NOT NULL
BEGIN
  UPDATE stock SET fence_token = NULL WHERE rowid = NEW.rowid;
END;

-- A DELETE has no new row to put a token into. Mark rows as deleted with an UPDATE instead.
CREATE TRIGGER stock_fence_delete BEFORE DELETE ON stock
BEGIN
  SELECT RAISE(ABORT, 'lockset: a DELETE cannot give a token: mark the row as deleted instead');
END;
