"""kazoo's `Lock` recipe. A suspended connection counts as a loss, as its documentation asks for."""

from kazoo.client import KazooClient, KazooState

import peer


def connect(config, lost):
    hosts = config["url"].removeprefix("zk://").split("/")[0]
    client = KazooClient(hosts=hosts, timeout=config["ttl_ms"] / 1000)
    client.add_listener(lambda state: lost() if state != KazooState.CONNECTED else None)
    client.start(timeout=60)

    class Lock:
        def __init__(self, name):
            self.path = f"/torture/{name}"
            self.lock = client.Lock(self.path)

        def acquire(self, seconds):
            granted = self.lock.acquire(timeout=seconds)
            if granted:
                # The transaction number of the node is a fencing token.
                self.token = client.exists(f"{self.path}/{self.lock.node}").czxid
            return granted

        def release(self):
            self.lock.release()

    return Lock


peer.run(connect, renews=True)
