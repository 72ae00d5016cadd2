"""What all Python peers share: the history, the registers, and the loop of a client.

A peer calls `run(connect, renews)`. `connect(config, lost)` returns a function that makes a lock by
its name; a lock has `acquire(seconds)`, which returns whether it was granted, `release()`, and may
have `token` and `valid_until` (nanoseconds of the monotonic clock). `lost()` is called when the
library tells that locks may be lost. `renews` says whether a lock is renewed while it is held: only
then is it held for longer than its lease.
"""

import json
import os
import random
import socket
import sys
import threading
import time


def now():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Recorder:
    def __init__(self, config):
        self.by = config["process"]
        self.held = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self.file = os.open(config["file"], flags, 0o644)

    def lost(self):
        if self.held:
            self.record("lost", op=self.held, reason="told")

    def record(self, event, at=None, **fields):
        line = {"at": at or now(), "by": self.by, "event": event, **fields}
        os.write(self.file, (json.dumps(line) + "\n").encode())


class Registers:
    def __init__(self, port):
        self.stream = socket.create_connection(("127.0.0.1", port))
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines = self.stream.makefile("r")

    def ask(self, *words):
        self.stream.sendall((" ".join(map(str, words)) + "\n").encode())
        return self.lines.readline().split()


def work(config, recorder, registers, op, name, lock, renews):
    token = getattr(lock, "token", None)
    kinds = ["plain"] + (["fenced"] if token is not None else [])
    shown = "-" if token is None else token
    read = {kind: registers.ask("read", kind, name, shown) for kind in kinds}
    ttl = config["ttl_ms"] / 1000
    dice = random.randrange(40)
    if dice == 0 and renews:
        time.sleep(ttl * random.uniform(0.8, 1.3))
    elif dice < 5:
        time.sleep(ttl * random.uniform(0.1, 0.4))
    else:
        time.sleep(random.uniform(0, 0.03))
    for kind in kinds:
        value = f"{config['process']}-{op}-{kind}"
        recorder.record("write", op=op, register=kind, value=value)
        outcome = "rejected"
        if read[kind][0] == "ok":
            _, snapshot, counter = read[kind]
            words = ["write", kind, name, shown, snapshot, int(counter) + 1, value]
            outcome = "acknowledged" if registers.ask(*words) == ["ok"] else "rejected"
        recorder.record("wrote", op=op, register=kind, value=value, outcome=outcome)


def hold_once(config, recorder, registers, op, locks, renews):
    name = random.choice(config["locks"])["name"]
    recorder.record("ask", op=op, name=name, mode="exclusive")
    try:
        lock = locks(name)
        granted = lock.acquire(2 * config["ttl_ms"] / 1000)
    except Exception as error:
        recorder.record("failed", op=op, error=repr(error))
        time.sleep(0.1)
        return
    if not granted:
        recorder.record("failed", op=op, error="not in time")
        return
    fields = {"token": getattr(lock, "token", None)}
    fields["valid_until"] = getattr(lock, "valid_until", None)
    recorder.record("enter", op=op, **fields)
    recorder.held = op
    work(config, recorder, registers, op, name, lock, renews)
    recorder.held = None
    recorder.record("exit", op=op)
    try:
        lock.release()
        recorder.record("released", op=op, error=None)
    except Exception as error:
        recorder.record("released", op=op, error=repr(error))


def run(connect, renews):
    config = json.loads(sys.argv[1])
    recorder = Recorder(config)
    stopping = threading.Event()

    def watch_input():
        while sys.stdin.read(1):
            pass
        stopping.set()

    threading.Thread(target=watch_input, daemon=True).start()
    locks = connect(config, recorder.lost)
    registers = Registers(config["registers"])
    op = 0
    while not stopping.is_set():
        op += 1
        hold_once(config, recorder, registers, op, locks, renews)
        time.sleep(random.uniform(0, 0.02))
    os._exit(0)
