-- The stored format, version 1, of the local engine: run once, on an empty file, in one
-- transaction with its application_id and user_version.

-- One table, so that an uncontended acquisition dirties one page. A name's own row has seq 0; its
-- claims follow in queue order, and the holders always precede the waiters.
CREATE TABLE lock (
    name     TEXT    NOT NULL,
    seq      INTEGER NOT NULL,
    token    INTEGER NOT NULL DEFAULT 0, -- own row: the fence. Claim: its token, 0 while it waits.
    -- The name's own row only.
    version  INTEGER NOT NULL DEFAULT 0, -- the last version the cell had, also if it was removed
    value    BLOB,                       -- what the cell holds; NULL: there is no cell
    -- Claims only.
    id       BLOB,                       -- 16 bytes
    mode     TEXT,                       -- 'exclusive', 'shared' or 'take/limit'
    ttl      INTEGER,                    -- nanoseconds
    floor    INTEGER,                    -- the caller's own lower bound of the token
    expires  INTEGER,                    -- nanoseconds since boot; NULL while it waits
    revoked  INTEGER,                    -- 1: the running lease is the last
    detached INTEGER,                    -- 1: once held, the lease alone ends it
    seen     INTEGER,                    -- while it waits: the last heartbeat of its client
    process  TEXT,                       -- 'pid namespace:pid:start time'
    inbox    TEXT,                       -- the socket in the inbox folder for its messages
    by       TEXT,
    note     TEXT,
    PRIMARY KEY (name, seq)
) WITHOUT ROWID;

-- The watches: to which inbox a change of a name is reported.
CREATE TABLE watcher (
    id       INTEGER PRIMARY KEY,
    inbox    TEXT    NOT NULL,
    exact    INTEGER NOT NULL, -- 1: scope is a name. 0: scope is a prefix.
    scope    TEXT    NOT NULL
);

-- One row: up to which name idle names have been removed.
CREATE TABLE home (swept TEXT NOT NULL);
INSERT INTO home VALUES ('');
