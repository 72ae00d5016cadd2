// The Node peers: redlock, redis-semaphore. The protocol is in ../README.md.
//
// usage: driver.js PEER ADDRESS TTL_MS
"use strict";

const readline = require("node:readline");
const Redis = require("ioredis");

const [peer, address, ttlText] = process.argv.slice(2);
const ttl = Number(ttlText);
// Everything on one connection per server, as the READMEs of both show.
const clients = address.split(",").map((one) => new Redis(`redis://${one}`));

// Each answers name => { acquire, release }; acquire waits as long as it takes.
const peers = {
  redlock() {
    const Redlock = require("redlock");
    // Its defaults, but a waiter does not give up after ten tries.
    const redlock = new Redlock(clients, { retryCount: -1 });
    return (name) => {
      let lock;
      return {
        acquire: async () => (lock = await redlock.lock(name, ttl)),
        release: () => lock.unlock(),
      };
    };
  },
  "redis-semaphore"() {
    const { Mutex, RedlockMutex } = require("redis-semaphore");
    const options = { lockTimeout: ttl, acquireTimeout: 2 ** 30 };
    return (name) =>
      clients.length === 1
        ? new Mutex(clients[0], name, options)
        : new RedlockMutex(clients, name, options);
  },
};

const lockNamed = peers[peer]();
const range = (count) => [...Array(count).keys()];
const now = () => process.hrtime.bigint();
const say = (text) => process.stdout.write(`${text}\n`);
let held = [];
let stamps = [];

async function countUntil(lock, until) {
  let count = 0;
  while (now() < until) {
    await lock.acquire();
    await lock.release();
    count += 1;
  }
  return count;
}

const orders = {
  async cycles(prefix, tasks, millis) {
    const locks = range(tasks).map((task) => lockNamed(`${prefix}/${task}`));
    const start = now();
    const until = start + BigInt(millis) * 1000000n;
    const counts = await Promise.all(locks.map((lock) => countUntil(lock, until)));
    say(`cycles ${counts.reduce((sum, count) => sum + count, 0)} ${now() - start}`);
  },
  async hold(prefix, count) {
    const locks = range(count).map((number) => lockNamed(`${prefix}/${number}`));
    await Promise.all(locks.map((lock) => lock.acquire()));
    held.push(...locks);
    say("held");
  },
  async free() {
    for (const lock of held.splice(0)) await lock.release();
  },
  async take(name, waiters, each) {
    const mine = (stamps = []);
    const turns = range(waiters).map(async () => {
      const lock = lockNamed(name);
      for (let turn = 0; turn < each; turn += 1) {
        await lock.acquire();
        const granted = now();
        mine.push([granted, now()]);
        await lock.release();
      }
    });
    say("queued");
    Promise.all(turns).then(() => say("done"));
  },
  show() {
    say([...stamps.map((stamp) => stamp.join(" ")), "end"].join("\n"));
  },
  wait(prefix, names, tasks) {
    for (const number of range(names)) {
      for (const _ of range(tasks)) {
        lockNamed(`${prefix}/${number}`)
          .acquire()
          .then(() => {
            throw new Error("the lock was granted");
          });
      }
    }
    say("queued");
  },
  async contend(name, tasks, millis) {
    const until = now() + BigInt(millis) * 1000000n;
    const counts = range(tasks).map(() => countUntil(lockNamed(name), until));
    say(`counts ${(await Promise.all(counts)).join(" ")}`);
  },
};

const version = () => require(`./node_modules/${peer}/package.json`).version;

Promise.all(clients.map((client) => client.ping())).then(() => {
  say(`ready ${version()}`);
  const lines = readline.createInterface({ input: process.stdin });
  let before = Promise.resolve();
  lines.on("line", (line) => {
    const [order, ...words] = line.split(" ");
    const args = words.map((word) => (/^\d+$/.test(word) ? Number(word) : word));
    before = before.then(() => orders[order](...args));
  });
  lines.on("close", () => process.exit(0));
});
