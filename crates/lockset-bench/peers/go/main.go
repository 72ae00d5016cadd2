// The Go peers: redsync, redislock, rueidislock, etcd's concurrency. The protocol is in ../README.md.
//
// usage: driver PEER ADDRESS TTL_MS
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"golang.org/x/sys/unix"
)

// A lock waits as long as it takes and returns how to release it.
type lock func() (release func())

// A peer makes locks by name.
type peer func(name string) lock

var ctx = context.Background()

// How many goroutines take locks side by side for `hold`.
const sideBySide = 16

func goRedis(address string) *redis.Client {
	// A waiter needs a connection while it asks, and the pool must not make it queue for one.
	return redis.NewClient(&redis.Options{Addr: address, PoolSize: 64, PoolTimeout: time.Minute})
}

func redsyncPeer(address string, ttl time.Duration) peer {
	var pools []redsyncredis.Pool
	for _, one := range strings.Split(address, ",") {
		pools = append(pools, goredis.NewPool(goRedis(one)))
	}
	rs := redsync.New(pools...)
	return func(name string) lock {
		return func() func() {
			// It gives up after 32 tries by default; a waiter here goes on.
			mutex := rs.NewMutex(name, redsync.WithExpiry(ttl))
			for mutex.Lock() != nil {
			}
			return func() { must(mutex.Unlock()) }
		}
	}
}

func redislockPeer(address string, ttl time.Duration) peer {
	locker := redislock.New(goRedis(address))
	return func(name string) lock {
		return func() func() {
			// The strategy of its README.
			options := &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
			for {
				held, err := locker.Obtain(ctx, name, ttl, options)
				if err == redislock.ErrNotObtained {
					continue
				}
				must(0, err)
				return func() { must(0, held.Release(ctx)) }
			}
		}
	}
}

func rueidislockPeer(address string, ttl time.Duration) peer {
	// As its README: a majority of one key, because there is one server, and NoLoopTracking, because
	// the server is newer than 7.0.5.
	locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption:   rueidis.ClientOption{InitAddress: []string{address}},
		KeyMajority:    1,
		KeyValidity:    ttl,
		NoLoopTracking: true,
	})
	must(0, err)
	return func(name string) lock {
		return func() func() {
			_, cancel, err := locker.WithContext(ctx, name)
			must(0, err)
			return cancel
		}
	}
}

func etcdPeer(address string, ttl time.Duration) peer {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{address}, DialTimeout: 5 * time.Second})
	must(0, err)
	seconds := concurrency.WithTTL(int(ttl.Seconds()))
	// A session is who holds: two waiters for one name need two. They are used again by later orders.
	var sessions []*concurrency.Session
	used := map[string]int{}
	begin = func() { clear(used) }
	return func(name string) lock {
		place := used[name]
		used[name]++
		if place == len(sessions) {
			session, err := concurrency.NewSession(client, seconds)
			sessions = append(sessions, must(session, err))
		}
		mutex := concurrency.NewMutex(sessions[place], "/go/"+name)
		return func() func() {
			must(0, mutex.Lock(ctx))
			return func() { must(0, mutex.Unlock(ctx)) }
		}
	}
}

// Called when no lock of an earlier order is in use any more.
var begin = func() {}

var peers = map[string]struct {
	module  string
	connect func(string, time.Duration) peer
}{
	"redsync":          {"github.com/go-redsync/redsync/v4", redsyncPeer},
	"redislock":        {"github.com/bsm/redislock", redislockPeer},
	"rueidislock":      {"github.com/redis/rueidis", rueidislockPeer},
	"etcd-concurrency": {"go.etcd.io/etcd/client/v3", etcdPeer},
}

type stamp struct{ granted, released int64 }

type driver struct {
	peer   peer
	held   []func()
	stamps []stamp
	output sync.Mutex
}

func (d *driver) say(format string, args ...any) {
	d.output.Lock()
	defer d.output.Unlock()
	fmt.Printf(format+"\n", args...)
}

func together(count int, work func(number int)) {
	var all sync.WaitGroup
	for number := range count {
		all.Add(1)
		go func() {
			defer all.Done()
			work(number)
		}()
	}
	all.Wait()
}

func (d *driver) cycles(prefix string, tasks, millis int) {
	begin()
	locks := make([]lock, tasks)
	for task := range locks {
		locks[task] = d.peer(fmt.Sprintf("%s/%d", prefix, task))
	}
	var count atomic.Int64
	start := now()
	until := start + int64(millis)*1e6
	together(tasks, func(task int) {
		for now() < until {
			locks[task]()()
			count.Add(1)
		}
	})
	d.say("cycles %d %d", count.Load(), now()-start)
}

func (d *driver) hold(prefix string, count int) {
	held, locks := make([]func(), count), make([]lock, count)
	for number := range locks {
		locks[number] = d.peer(fmt.Sprintf("%s/%d", prefix, number))
	}
	together(min(count, sideBySide), func(part int) {
		for number := part; number < count; number += sideBySide {
			held[number] = locks[number]()
		}
	})
	d.held = append(d.held, held...)
	d.say("held")
}

func (d *driver) free() {
	for _, release := range d.held {
		release()
	}
	d.held = nil
	begin()
}

func (d *driver) take(name string, waiters, each int) {
	d.stamps = nil
	var all, begun sync.WaitGroup
	var guard sync.Mutex
	locks := make([]lock, waiters)
	for number := range locks {
		locks[number] = d.peer(name)
	}
	for _, lock := range locks {
		all.Add(1)
		begun.Add(1)
		go func() {
			defer all.Done()
			begun.Done()
			for range each {
				release := lock()
				granted := now()
				guard.Lock()
				d.stamps = append(d.stamps, stamp{granted, now()})
				guard.Unlock()
				release()
			}
		}()
	}
	begun.Wait()
	d.say("queued")
	go func() {
		all.Wait()
		d.say("done")
	}()
}

func (d *driver) show() {
	for _, one := range d.stamps {
		d.say("%d %d", one.granted, one.released)
	}
	d.say("end")
}

func (d *driver) wait(prefix string, names, tasks int) {
	for number := range names {
		for range tasks {
			lock := d.peer(fmt.Sprintf("%s/%d", prefix, number))
			go func() {
				lock()
				panic("the lock was granted")
			}()
		}
	}
	d.say("queued")
}

func (d *driver) contend(name string, tasks, millis int) {
	begin()
	counts := make([]string, tasks)
	locks := make([]lock, tasks)
	for task := range locks {
		locks[task] = d.peer(name)
	}
	until := now() + int64(millis)*1e6
	together(tasks, func(task int) {
		count := 0
		for ; now() < until; count++ {
			locks[task]()()
		}
		counts[task] = strconv.Itoa(count)
	})
	d.say("counts %s", strings.Join(counts, " "))
}

// The clock of all processes; Go's own monotonic time begins with the process.
func now() int64 {
	var time unix.Timespec
	must(0, unix.ClockGettime(unix.CLOCK_MONOTONIC, &time))
	return time.Nano()
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, one := range info.Deps {
		if one.Path == module {
			return one.Version
		}
	}
	return "unknown"
}

func main() {
	chosen := peers[os.Args[1]]
	ttl := time.Duration(must(strconv.Atoi(os.Args[3]))) * time.Millisecond
	d := &driver{peer: chosen.connect(os.Args[2], ttl)}
	d.say("ready %s", version(chosen.module))
	orders := bufio.NewScanner(os.Stdin)
	for orders.Scan() {
		words := strings.Fields(orders.Text())
		number := func(place int) int { return must(strconv.Atoi(words[place])) }
		switch words[0] {
		case "cycles":
			d.cycles(words[1], number(2), number(3))
		case "hold":
			d.hold(words[1], number(2))
		case "free":
			d.free()
		case "take":
			d.take(words[1], number(2), number(3))
		case "show":
			d.show()
		case "wait":
			d.wait(words[1], number(2), number(3))
		case "contend":
			d.contend(words[1], number(2), number(3))
		default:
			panic("no such order: " + words[0])
		}
	}
}
