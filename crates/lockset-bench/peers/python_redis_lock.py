"""python-redis-lock as a peer: does on stdin's word what the benchmark's own children do.

`take NAME WAITERS EACH` starts threads that lock and release NAME, EACH times each, and answers
`queued` when all have begun and `done` when all have ended; `show` then answers one line for each
grant, `granted released`, in nanoseconds of CLOCK_MONOTONIC, and `end`.
"""

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


def main():
    # Waiting in BLPOP outlasts any timeout of the socket.
    pool = redis.ConnectionPool(port=int(sys.argv[1]), socket_timeout=None)
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
