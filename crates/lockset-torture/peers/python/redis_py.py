"""redis-py's `Lock`, with a timeout, as its documentation shows it. It is not renewed."""

import redis

import peer


def connect(config, lost):
    client = redis.Redis.from_url(config["url"], socket_timeout=2)
    timeout = config["ttl_ms"] / 1000

    class Lock:
        def __init__(self, name):
            self.lock = client.lock(name, timeout=timeout)

        def acquire(self, seconds):
            return self.lock.acquire(blocking_timeout=seconds)

        def release(self):
            self.lock.release()

    return Lock


peer.run(connect, renews=False)
