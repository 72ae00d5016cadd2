import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.IntFunction;
import java.util.stream.Collectors;
import java.util.stream.IntStream;

import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * The Java peers: Redisson, Curator. The protocol is in ../README.md.
 *
 * <p>usage: java Driver PEER ADDRESS TTL_MS
 */
public final class Driver {
    /** A lock belongs to the thread that took it, with both libraries. */
    interface Lock {
        void acquire() throws Exception;

        void release() throws Exception;
    }

    /** How many threads take locks side by side for `hold`. */
    private static final int SIDE_BY_SIDE = 8;

    private final Function<String, Lock> locks;
    private volatile CountDownLatch freed = new CountDownLatch(1);
    private final List<Thread> holders = new ArrayList<>();
    private List<long[]> stamps = new ArrayList<>();

    private Driver(Function<String, Lock> locks) {
        this.locks = locks;
    }

    static Function<String, Lock> redisson(String address, int ttl) {
        Config config = new Config();
        // Without a lease time of its own a lock is kept by the watchdog, as the docs advise.
        config.setLockWatchdogTimeout(ttl);
        config.useSingleServer().setAddress("redis://" + address);
        RedissonClient client = Redisson.create(config);
        return name -> {
            RLock lock = client.getLock(name);
            return new Lock() {
                public void acquire() {
                    lock.lock();
                }

                public void release() {
                    lock.unlock();
                }
            };
        };
    }

    static Function<String, Lock> curator(String address, int ttl) {
        CuratorFramework client = CuratorFrameworkFactory.newClient(
                address, ttl, 15_000, new ExponentialBackoffRetry(1000, 3));
        client.start();
        return name -> {
            InterProcessMutex mutex =
                    new InterProcessMutex(client, "/curator/" + name.replace('/', '-'));
            return new Lock() {
                public void acquire() throws Exception {
                    mutex.acquire();
                }

                public void release() throws Exception {
                    mutex.release();
                }
            };
        };
    }

    private void cycles(String prefix, int tasks, int millis) throws Exception {
        List<Lock> each = named(prefix, tasks);
        long start = System.nanoTime();
        long until = start + TimeUnit.MILLISECONDS.toNanos(millis);
        long count = together(tasks, task -> () -> countUntil(each.get(task), until)).stream()
                .mapToLong(Long::longValue).sum();
        say("cycles " + count + " " + (System.nanoTime() - start));
    }

    private void contend(String name, int tasks, int millis) throws Exception {
        long until = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(millis);
        List<Long> counts = together(tasks, task -> () -> countUntil(locks.apply(name), until));
        say("counts " + counts.stream().map(String::valueOf).collect(Collectors.joining(" ")));
    }

    /** The threads that took the locks also release them. */
    private void hold(String prefix, int count) throws Exception {
        List<Lock> each = named(prefix, count);
        CountDownLatch held = new CountDownLatch(Math.min(count, SIDE_BY_SIDE));
        freed = new CountDownLatch(1);
        CountDownLatch release = freed;
        for (int part = 0; part < Math.min(count, SIDE_BY_SIDE); part++) {
            int first = part;
            holders.add(start(() -> {
                for (int number = first; number < count; number += SIDE_BY_SIDE) {
                    each.get(number).acquire();
                }
                held.countDown();
                release.await();
                for (int number = first; number < count; number += SIDE_BY_SIDE) {
                    each.get(number).release();
                }
                return null;
            }));
        }
        held.await();
        say("held");
    }

    private void take(String name, int waiters, int each) throws Exception {
        List<long[]> mine = new ArrayList<>();
        stamps = mine;
        CountDownLatch begun = new CountDownLatch(waiters);
        List<Thread> threads = new ArrayList<>();
        for (int waiter = 0; waiter < waiters; waiter++) {
            threads.add(start(() -> {
                Lock lock = locks.apply(name);
                begun.countDown();
                for (int turn = 0; turn < each; turn++) {
                    lock.acquire();
                    long granted = System.nanoTime();
                    synchronized (mine) {
                        mine.add(new long[] {granted, System.nanoTime()});
                    }
                    lock.release();
                }
                return null;
            }));
        }
        begun.await();
        say("queued");
        start(() -> {
            for (Thread thread : threads) {
                thread.join();
            }
            say("done");
            return null;
        });
    }

    private void show() {
        StringBuilder text = new StringBuilder();
        for (long[] stamp : stamps) {
            text.append(stamp[0]).append(' ').append(stamp[1]).append('\n');
        }
        say(text + "end");
    }

    private void await(String prefix, int names, int tasks) {
        for (int number = 0; number < names; number++) {
            String name = prefix + "/" + number;
            for (int task = 0; task < tasks; task++) {
                start(() -> {
                    locks.apply(name).acquire();
                    throw new IllegalStateException("the lock was granted");
                });
            }
        }
        say("queued");
    }

    private List<Lock> named(String prefix, int count) {
        return IntStream.range(0, count).mapToObj(n -> locks.apply(prefix + "/" + n)).toList();
    }

    private static long countUntil(Lock lock, long until) throws Exception {
        long count = 0;
        for (; System.nanoTime() < until; count++) {
            lock.acquire();
            lock.release();
        }
        return count;
    }

    private static List<Long> together(int count, IntFunction<Callable<Long>> work)
            throws Exception {
        long[] results = new long[count];
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            int own = number;
            Callable<Long> one = work.apply(number);
            threads.add(start(() -> {
                results[own] = one.call();
                return null;
            }));
        }
        for (Thread thread : threads) {
            thread.join();
        }
        return IntStream.range(0, count).mapToObj(number -> results[number]).toList();
    }

    /** A thread that failed ends the process, so that nothing waits for it. */
    private static Thread start(Callable<Void> work) {
        Thread thread = new Thread(null, () -> {
            try {
                work.call();
            } catch (Exception error) {
                error.printStackTrace();
                Runtime.getRuntime().halt(1);
            }
        }, "driver", 256 * 1024);
        thread.setDaemon(true);
        thread.start();
        return thread;
    }

    private static synchronized void say(String text) {
        System.out.println(text);
        System.out.flush();
    }

    public static void main(String[] args) throws Exception {
        int ttl = Integer.parseInt(args[2]);
        boolean isRedisson = args[0].equals("redisson");
        Driver driver = new Driver(isRedisson ? redisson(args[1], ttl) : curator(args[1], ttl));
        Class<?> library = isRedisson ? Redisson.class : InterProcessMutex.class;
        String jar = library.getProtectionDomain().getCodeSource().getLocation().getPath();
        say("ready " + jar.replaceAll(".*-([0-9.]+)\\.jar", "$1"));
        BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
        for (String line = orders.readLine(); line != null; line = orders.readLine()) {
            driver.obey(line.split(" "));
        }
        Runtime.getRuntime().halt(0);
    }

    private void obey(String[] words) throws Exception {
        switch (words[0]) {
            case "cycles" -> cycles(words[1], number(words[2]), number(words[3]));
            case "hold" -> hold(words[1], number(words[2]));
            case "free" -> freed.countDown();
            case "take" -> take(words[1], number(words[2]), number(words[3]));
            case "show" -> show();
            case "wait" -> await(words[1], number(words[2]), number(words[3]));
            case "contend" -> contend(words[1], number(words[2]), number(words[3]));
            default -> throw new IllegalArgumentException("no such order: " + words[0]);
        }
    }

    private static int number(String word) {
        return Integer.parseInt(word);
    }
}
