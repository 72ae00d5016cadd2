"""kazoo in a process of its own: an order is a JSON list of words on one line, the answer is JSON.

    zookeeper.py HOSTS [USER:PASSWORD]
"""

import json
import socket
import struct
import sys
import threading
import time
import uuid

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, LockTimeout, NoNodeError, NotEmptyError
from kazoo.protocol.serialization import Create2
from kazoo.recipe.lock import Lock, ReadLock, WriteLock
from kazoo.security import OPEN_ACL_UNSAFE


class Curator:
    """Curator's InterProcessMutex and InterProcessReadWriteLock, as far as others can see them."""

    def __init__(self, client, path, markers, own):
        self.client, self.path, self.markers, self.own = client, path, markers, own
        self.node = None

    def key(self, name):
        for marker in self.markers:
            before, found, after = name.rpartition(marker)
            name = after if found else name
        return name

    def before(self, me):
        """Whom it waits for: the one before it, or for a reader the first writer before it."""
        names = sorted(self.client.get_children(self.path), key=self.key)
        index = names.index(me)
        if self.own == "__READ__":
            names = [name for name in names[:index] if "__WRIT__" in name]
            return names[0] if names else None
        return names[index - 1] if index else None

    def acquire(self, blocking=True, timeout=None):
        self.client.ensure_path(self.path)
        mine = f"{self.path}/_c_{uuid.uuid4()}-{self.own}"
        self.node = self.client.create(mine, b"127.0.0.1", ephemeral=True, sequence=True)
        me = self.node.rpartition("/")[2]
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            other = self.before(me)
            if other is None:
                return True
            gone = threading.Event()
            try:
                self.client.get(f"{self.path}/{other}", watch=lambda _: gone.set())
            except NoNodeError:
                continue
            left = None if end is None else end - time.monotonic()
            if not blocking or not gone.wait(left):
                self.release()
                return False

    def release(self):
        self.client.delete(self.node)
        return True

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


def curator(markers, own):
    return lambda client, path, identifier=None: Curator(client, path, markers, own)


KINDS = {
    "lock": Lock,
    "read": ReadLock,
    "write": WriteLock,
    "curator mutex": curator(["lock-"], "lock-"),
    "curator read": curator(["__READ__", "__WRIT__"], "__READ__"),
    "curator write": curator(["__READ__", "__WRIT__"], "__WRIT__"),
}


class CreateContainer(Create2):
    """Which kazoo does not have."""

    type = 19


def password_of(session):
    """ZooKeeper makes it from the session's number, with Java's random numbers."""
    state = ((session ^ 0xB3415C00) ^ 0x5DEECE66D) & ((1 << 48) - 1)
    password = b""
    for _ in range(4):
        state = (state * 0x5DEECE66D + 0xB) & ((1 << 48) - 1)
        password += (state >> 16).to_bytes(4, "little")
    return password


class Peer:
    def __init__(self, hosts, login):
        auth = [("digest", login)] if login else None
        self.client = KazooClient(hosts=hosts, timeout=4.0, auth_data=auth)
        self.client.start(timeout=20)
        self.locks = {}

    def children(self, path):
        try:
            return sorted(self.client.get_children(path))
        except NoNodeError:
            return None

    def stat(self, path):
        stat = self.client.exists(path)
        return stat and {
            "czxid": stat.czxid,
            "owner": stat.ephemeralOwner,
            "version": stat.version,
            "cversion": stat.cversion,
            "children": stat.numChildren,
        }

    def data(self, path):
        try:
            return self.client.get(path)[0].decode("utf-8", "replace")
        except NoNodeError:
            return None

    def set(self, path, data):
        self.client.set(path, data.encode())

    def create(self, path, kind, data=""):
        if kind == "container":
            request = CreateContainer(path, data.encode(), OPEN_ACL_UNSAFE, 4)
            result = self.client.handler.async_result()
            self.client._call(request, result)
            return result.get()[0]
        how = {
            "persistent": {},
            "ephemeral": {"ephemeral": True},
            "sequential": {"ephemeral": True, "sequence": True},
        }[kind]
        return self.client.create(path, data.encode(), makepath=True, **how)

    def delete(self, path):
        """Again and again, if others make new nodes in it meanwhile."""
        while True:
            try:
                self.client.delete(path, recursive=True)
                return True
            except NotEmptyError:
                continue
            except NoNodeError:
                return False

    def acl(self, path):
        try:
            acls, _ = self.client.get_acls(path)
        except NoNodeError:
            return None
        return [[acl.id.scheme, acl.id.id, acl.perms] for acl in acls]

    def end_session(self, session):
        """Takes the session over and closes it in one breath: its owner comes back at once."""
        session = int(session)
        connect = struct.pack("!iqiqi16s?", 0, 0, 4000, session, 16, password_of(session), False)
        close = struct.pack("!ii", 1, -11)
        host, port = self.client.hosts[0]
        with socket.create_connection((host, port), timeout=10) as connection:
            for packet in (connect, close):
                connection.sendall(struct.pack("!i", len(packet)) + packet)
            while connection.recv(4096):
                pass

    def acquire(self, kind, path, patience):
        """Takes the lock: at once (0), within so many seconds, or without an end (-1)."""
        lock = KINDS[kind](self.client, path, identifier="kazoo")
        seconds = float(patience)
        try:
            if seconds == 0:
                taken = lock.acquire(blocking=False)
            else:
                taken = lock.acquire(timeout=seconds if seconds > 0 else None)
        except LockTimeout:
            taken = False
        if taken:
            self.locks[kind, path] = lock
        return taken

    def release(self, kind, path):
        return bool(self.locks.pop((kind, path)).release())

    def node(self, kind, path):
        """The node of a lock that is held."""
        return self.locks[kind, path].node

    def count(self, kind, path, file, times):
        """Reads a number and writes the next one so many times, each time under the lock."""
        for _ in range(int(times)):
            with KINDS[kind](self.client, path):
                with open(file, encoding="ascii") as counter:
                    number = int(counter.read())
                with open(file, "w", encoding="ascii") as counter:
                    counter.write(str(number + 1))
        return True

    def contenders(self, path, number):
        """So many children as Curator's mutex makes them, one after the other."""
        made = [
            self.client.create_async(
                f"{path}/_c_{index:08x}-0000-4000-8000-000000000000-lock-",
                b"",
                ephemeral=True,
                sequence=True,
            )
            for index in range(int(number))
        ]
        return [one.get() for one in made]


def main():
    peer = Peer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    speaking = threading.Lock()
    for line in sys.stdin:
        order, *words = json.loads(line)
        try:
            answer = getattr(peer, order)(*words)
        except KazooException as error:
            answer = {"error": type(error).__name__}
        with speaking:
            print(json.dumps(answer), flush=True)


main()
