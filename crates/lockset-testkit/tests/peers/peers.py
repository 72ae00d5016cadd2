"""Other people's locks on a Redis server, commanded line by line.

`redis-py` is the real library. The others put on the wire what their libraries put there: the same
form of value, the same commands, scripts of the same form.

An order is a line of words, and is answered by a line: `yes`, `no`, or the name of an error.

    acquire NAME MS       takes the lock at once or not at all; MS is its time to live, `-` for none
    wait NAME MS SECONDS  waits for it
    block NAME MS SECONDS the same, as the library itself waits (redis-py: it asks every 0.1 s)
    busy NAME MS HOLD     blocks, holds for HOLD ms and gives back, again and again, until killed
    extend NAME MS        gives it so much time from now on
    release NAME          gives it back
    count NAME FILE N     N times: waits for the lock, adds one to the number in FILE, gives it back
"""

import base64
import pathlib
import secrets
import sys
import time

import redis
from redis.exceptions import LockError
from redis.lock import Lock


class RedisPy:
    def __init__(self, client):
        self.client, self.locks = client, {}

    def acquire(self, name, ms):
        lock = Lock(self.client, name, timeout=ms and ms / 1000, blocking=False)
        taken = lock.acquire()
        if taken:
            self.locks[name] = lock
        return taken

    def block(self, name, ms, seconds):
        lock = Lock(self.client, name, timeout=ms / 1000)
        taken = lock.acquire(blocking=True, blocking_timeout=seconds)
        if taken:
            self.locks[name] = lock
        return taken

    def extend(self, name, ms):
        return self.locks[name].extend(ms / 1000, replace_ttl=True)

    def release(self, name):
        self.locks[name].release()
        return True


class Peer:
    """A lock by the book: what differs between libraries is the value and the form of a script."""

    extension = (
        'if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end '
        'return redis.call("PEXPIRE", KEYS[1], ARGV[2])'
    )
    ending = (
        'if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end '
        'return redis.call("DEL", KEYS[1])'
    )

    def __init__(self, client):
        self.client, self.values = client, {}

    def acquire(self, name, ms):
        value = self.value()
        taken = self.take(name, value, ms)
        if taken:
            self.values[name] = value
        return bool(taken)

    def take(self, name, value, ms):
        return self.client.set(name, value, nx=True, px=ms)

    def extend(self, name, ms):
        answer = self.client.eval(self.extension, 1, name, self.values[name], ms)
        return answer in (1, b"OK", "OK")

    def release(self, name):
        return self.client.eval(self.ending, 1, name, self.values[name]) == 1


class Redsync(Peer):
    # It tells a lock that is gone from one that is another's.
    ending = (
        'local now = redis.call("GET", KEYS[1]) '
        'if now == ARGV[1] then return redis.call("DEL", KEYS[1]) end '
        "if now == false then return -1 end return 0"
    )

    def value(self):
        return base64.b64encode(secrets.token_bytes(16))


class Redislock(Peer):
    # MSETNX, as it can take several keys; a repeat with the same token is let in.
    taking = (
        'if redis.call("MSETNX", KEYS[1], ARGV[1]) == 0 then '
        'local now = redis.call("GETRANGE", KEYS[1], 0, tonumber(ARGV[2]) - 1) '
        "if now ~= string.sub(ARGV[1], 1, tonumber(ARGV[2])) then return 0 end end "
        'redis.call("PEXPIRE", KEYS[1], ARGV[3]) return 1'
    )
    # It compares with MGET.
    ending = (
        'if redis.call("MGET", KEYS[1])[1] ~= ARGV[1] then return 0 end '
        'return redis.call("DEL", KEYS[1])'
    )

    def value(self):
        token = base64.urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=")
        return token + b"metadata: of any kind|\n"

    def take(self, name, value, ms):
        return self.client.eval(self.taking, 1, name, value, 22, ms)


class NodeRedlock(Peer):
    taking = (
        'for _, key in ipairs(KEYS) do if redis.call("EXISTS", key) == 1 then return 0 end end '
        'for _, key in ipairs(KEYS) do redis.call("SET", key, ARGV[1], "PX", ARGV[2]) end '
        "return #KEYS"
    )
    # It writes the value again.
    extension = (
        'if redis.call("GET", KEYS[1]) ~= ARGV[1] then return 0 end '
        'return redis.call("SET", KEYS[1], ARGV[1], "PX", ARGV[2])'
    )

    def value(self):
        return secrets.token_hex(16)

    def take(self, name, value, ms):
        return self.client.eval(self.taking, 1, name, value, ms)


class Rslock(Peer):
    extension = NodeRedlock.extension

    def value(self):
        # Raw bytes: not UTF-8, and with everything in them that could end a word or a line.
        return b"\xff\x00\r\n:|=" + secrets.token_bytes(13)


PEERS = {
    "redis-py": RedisPy,
    "redsync": Redsync,
    "bsm/redislock": Redislock,
    "node-redlock": NodeRedlock,
    "rslock": Rslock,
}


def wait(peer, name, ms, seconds):
    end = time.monotonic() + seconds
    while not peer.acquire(name, ms):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def busy(peer, name, ms, hold):
    while peer.block(name, ms, 60):
        time.sleep(hold / 1000)
        peer.release(name)
    return False


def count(peer, name, file, times):
    for _ in range(times):
        if not wait(peer, name, 10_000, 60):
            return False
        number = int(file.read_text())
        time.sleep(0.001)
        file.write_text(str(number + 1))
        peer.release(name)
        time.sleep(0.002)
    return True


def obey(peer, order):
    verb, name, *rest = order
    match verb:
        case "acquire":
            return peer.acquire(name, None if rest[0] == "-" else int(rest[0]))
        case "wait":
            return wait(peer, name, int(rest[0]), float(rest[1]))
        case "block":
            return peer.block(name, int(rest[0]), float(rest[1]))
        case "busy":
            return busy(peer, name, int(rest[0]), float(rest[1]))
        case "extend":
            return peer.extend(name, int(rest[0]))
        case "release":
            return peer.release(name)
        case "count":
            return count(peer, name, pathlib.Path(rest[0]), int(rest[1]))
    raise ValueError(verb)


def main(kind, port):
    peer = PEERS[kind](redis.Redis(port=int(port)))
    for line in sys.stdin:
        try:
            answer = "yes" if obey(peer, line.split()) else "no"
        except LockError as error:
            answer = type(error).__name__
        print(answer, flush=True)


main(*sys.argv[1:])
