"""A program that knows nothing of Lockset but SQL, commanded line by line.

    python fence.py postgres URL
    python fence.py sqlite FILE

An order is a line, and is answered by a line: `yes`, or `no` and the reason.

    admit TOKEN COUNT    checks the token 'orders=TOKEN' and writes COUNT, in one transaction
    set TOKEN COUNT      writes COUNT to a table with a trigger; TOKEN is `name=token`, `-` for none
"""

import sqlite3
import sys

RAISE = """
    INSERT INTO {table} AS mark (resource, lock, token) VALUES ('stock', 'orders', {one})
    ON CONFLICT (resource, lock) DO UPDATE SET token = excluded.token
    WHERE mark.token <= excluded.token
    RETURNING token
"""


class Rejected(Exception):
    pass


class Postgres:
    def __init__(self, url):
        import psycopg

        self.db = psycopg.connect(url)

    def admit(self, token, count):
        with self.db.transaction():
            self.db.execute("SELECT lockset_fence.admit('stock', 'orders', %s)", [int(token)])
            self.db.execute("UPDATE stock SET count = %s", [int(count)])

    def set(self, token, count):
        with self.db.transaction():
            if token != "-":
                self.db.execute("SELECT set_config('lockset.token', %s, true)", [token])
            self.db.execute("UPDATE guarded SET count = %s", [int(count)])


class Sqlite:
    def __init__(self, path):
        self.db = sqlite3.connect(path)

    def admit(self, token, count):
        with self.db:
            statement = RAISE.format(table="lockset_fence_marks", one="?")
            if not self.db.execute(statement, [int(token)]).fetchall():
                raise Rejected("stale")
            self.db.execute("UPDATE plain SET count = ?", [int(count)])

    def set(self, token, count):
        with self.db:
            if token == "-":
                self.db.execute("UPDATE stock SET count = ?", [int(count)])
            else:
                statement = "UPDATE stock SET count = ?, fence_token = ?"
                self.db.execute(statement, [int(count), token])


def main():
    kinds = {"postgres": Postgres, "sqlite": Sqlite}
    client = kinds[sys.argv[1]](sys.argv[2])
    for line in sys.stdin:
        order, token, count = line.split()
        try:
            getattr(client, order)(token, count)
            print("yes", flush=True)
        except Exception as error:
            code = getattr(error, "sqlstate", None) or type(error).__name__
            print("no", code, str(error).splitlines()[0], flush=True)


main()
