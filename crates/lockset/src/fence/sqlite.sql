-- The marks of Lockset's fence in SQLite 3.35 or later. docs/fencing-sql.md explains their use.
--
-- Install:  sqlite3 FILE < sqlite.sql
-- It may be run again. `SqliteFence::new` runs it if the tables are missing.

CREATE TABLE IF NOT EXISTS main.lockset_fence_marks (
  resource TEXT NOT NULL
    CHECK (typeof(resource) = 'text' AND length(CAST(resource AS BLOB)) BETWEEN 1 AND 255),
  lock TEXT NOT NULL
    CHECK (typeof(lock) = 'text' AND length(CAST(lock AS BLOB)) BETWEEN 1 AND 255),
  token INTEGER NOT NULL CHECK (typeof(token) = 'integer' AND token >= 1),
  PRIMARY KEY (resource, lock)
) WITHOUT ROWID;

-- Created last, because its row says that the rest is there. One row.
CREATE TABLE IF NOT EXISTS main.lockset_fence_version (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  version INTEGER NOT NULL
);
INSERT OR IGNORE INTO main.lockset_fence_version (one, version) VALUES (1, 1);
