"""The Python peers: redis-py, python-redis-lock, kazoo. The protocol is in ../README.md.

usage: driver.py PEER ADDRESS TTL_MS
"""

import os
import sys
import threading
import time
from importlib.metadata import version


def redis_pool(address):
    import redis

    host, port = address.split(":")
    # Waiting in BLPOP outlasts any timeout of the socket, and every waiter needs a connection.
    return redis.ConnectionPool(
        host=host, port=int(port), socket_timeout=None, max_connections=20_000
    )


def redis_py(address, ttl):
    import redis

    client = redis.Redis(connection_pool=redis_pool(address))
    # Its own defaults: asks again every 0.1 s, does not renew. What one thread takes for `hold`,
    # another one releases.
    return version("redis"), lambda name: client.lock(name, timeout=ttl, thread_local=False)


def python_redis_lock(address, ttl):
    import redis
    import redis_lock

    client = redis.StrictRedis(connection_pool=redis_pool(address))
    expire = max(1, round(ttl))
    return version("python-redis-lock"), lambda name: redis_lock.Lock(client, name, expire=expire)


def kazoo(address, ttl):
    from kazoo.client import KazooClient

    client = KazooClient(hosts=address, timeout=ttl)
    client.start()
    return version("kazoo"), lambda name: client.Lock("/kazoo/" + name.replace("/", "-"))


PEERS = {"redis-py": redis_py, "python-redis-lock": python_redis_lock, "kazoo": kazoo}
# How many threads take locks side by side for `hold`.
SIDE_BY_SIDE = 8


def together(count, work):
    """Runs work(0) … work(count - 1), a thread each, and returns what they return."""
    results = [None] * count

    def run(number):
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Driver:
    def __init__(self, lock):
        self.lock = lock
        self.held = []
        self.stamps = []

    def cycles(self, prefix, tasks, millis):
        locks = [self.lock(f"{prefix}/{task}") for task in range(tasks)]
        start = time.monotonic_ns()
        until = start + millis * 1_000_000

        def work(task):
            lock, count = locks[task], 0
            while time.monotonic_ns() < until:
                lock.acquire()
                lock.release()
                count += 1
            return count

        count = sum(together(tasks, work))
        say(f"cycles {count} {time.monotonic_ns() - start}")

    def hold(self, prefix, count):
        locks = [self.lock(f"{prefix}/{number}") for number in range(count)]

        def work(part):
            for lock in locks[part::SIDE_BY_SIDE]:
                lock.acquire()

        together(min(count, SIDE_BY_SIDE), work)
        self.held += locks
        say("held")

    def free(self):
        for lock in self.held:
            lock.release()
        self.held = []

    def take(self, name, waiters, each):
        self.stamps = stamps = []

        def wait():
            lock = self.lock(name)
            for _ in range(each):
                lock.acquire()
                granted = time.monotonic_ns()
                stamps.append((granted, time.monotonic_ns()))
                lock.release()

        threads = [threading.Thread(target=wait) for _ in range(waiters)]
        for thread in threads:
            thread.start()
        say("queued")

        def finish():
            for thread in threads:
                thread.join()
            say("done")

        threading.Thread(target=finish).start()

    def show(self):
        lines = [f"{granted} {released}" for granted, released in self.stamps]
        say("\n".join(lines + ["end"]))

    def wait(self, prefix, names, tasks):
        def work(number):
            self.lock(f"{prefix}/{number}").acquire()
            raise RuntimeError("the lock was granted")

        for number in range(names):
            for _ in range(tasks):
                threading.Thread(target=work, args=(number,), daemon=True).start()
        say("queued")

    def contend(self, name, tasks, millis):
        until = time.monotonic_ns() + millis * 1_000_000

        def work(_):
            lock, count = self.lock(name), 0
            while time.monotonic_ns() < until:
                lock.acquire()
                lock.release()
                count += 1
            return count

        say("counts " + " ".join(str(count) for count in together(tasks, work)))


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def fail(args):
    """A thread that failed ends the process, so that nothing waits for it."""
    print(f"{args.exc_type.__name__}: {args.exc_value}", file=sys.stderr)
    os._exit(1)


def main():
    threading.excepthook = fail
    threading.stack_size(512 * 1024)
    peer, address, ttl = sys.argv[1:]
    release, lock = PEERS[peer](address, int(ttl) / 1000)
    driver = Driver(lock)
    say(f"ready {release}")
    for line in sys.stdin:
        order, *args = line.split()
        getattr(driver, order)(*(int(arg) if arg.isdigit() else arg for arg in args))
    os._exit(0)


main()
