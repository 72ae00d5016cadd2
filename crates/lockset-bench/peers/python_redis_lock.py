"""python-redis-lock as a peer: does on stdin's word what the benchmark's own children do.

`take NAME WAITERS EACH` starts threads that lock and release NAME, EACH times each, and answers
`queued` when all have begun and `done` when all have ended; `show` then answers one line for each
grant, `granted released`, in nanoseconds of CLOCK_MONOTONIC, and `end`.
"""

import os
import sys
import threading
import time

import redis
import redis_lock


def take_turns(pool, name, waiters, each):
    stamps = []

    def wait():
        client = redis.StrictRedis(connection_pool=pool)
        lock = redis_lock.Lock(client, name, expire=30)
        for _ in range(each):
            lock.acquire()
            granted = time.monotonic_ns()
            stamps.append((granted, time.monotonic_ns()))
            lock.release()

    threads = [threading.Thread(target=wait) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    print("queued", flush=True)
    for thread in threads:
        thread.join()
    print("done", flush=True)
    return stamps


def fail(args):
    """A waiter that failed ends the process, so that nobody waits for it."""
    print(f"python-redis-lock: {args.exc_type.__name__}: {args.exc_value}", file=sys.stderr)
    os._exit(1)


def main():
    # Waiting in BLPOP outlasts any timeout of the socket, and every waiter needs a connection.
    port = int(sys.argv[1])
    pool = redis.ConnectionPool(port=port, socket_timeout=None, max_connections=10_000)
    threading.excepthook = fail
    stamps = []
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *args = line.split()
        if verb == "take":
            stamps = take_turns(pool, args[0], int(args[1]), int(args[2]))
        elif verb == "show":
            print("\n".join(f"{granted} {released}" for granted, released in stamps))
            print("end", flush=True)


main()
