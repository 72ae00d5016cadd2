"""`pg_advisory_lock` of a session. It has neither lease nor token: it lasts as long as the
connection, and a client that does not use its connection does not learn of its end."""

import zlib

import psycopg

import peer


def connect(config, lost):
    state = {"connection": None}

    def connection():
        if state["connection"] is None or state["connection"].closed:
            state["connection"] = psycopg.connect(config["url"], autocommit=True)
        return state["connection"]

    class Lock:
        def __init__(self, name):
            self.key = zlib.crc32(name.encode())

        def acquire(self, seconds):
            self.connection = connection()
            self.connection.execute(f"SET lock_timeout = {int(seconds * 1000)}")
            try:
                self.connection.execute("SELECT pg_advisory_lock(%s)", [self.key])
            except psycopg.errors.LockNotAvailable:
                return False
            return True

        def release(self):
            self.connection.execute("SELECT pg_advisory_unlock(%s)", [self.key])

    return Lock


peer.run(connect, renews=True)
