package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/go-redsync/redsync/v4"
	redispool "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// A mutex of redsync tells until when it is valid; nothing renews it.
func redsyncLocks(c config) locks {
	hosts := strings.Split(strings.Split(strings.TrimPrefix(c.URL, "redlock://"), "?")[0], ",")
	var pools []redispool.Pool
	for _, host := range hosts {
		pools = append(pools, goredis.NewPool(redis.NewClient(&redis.Options{Addr: host})))
	}
	sync := redsync.New(pools...)
	return func(name string, limit time.Duration) (*held, error) {
		mutex := sync.NewMutex(name, redsync.WithExpiry(c.ttl()))
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := mutex.LockContext(ctx); err != nil {
			return nil, err
		}
		valid := now() + int64(time.Until(mutex.Until()))
		release := func() error {
			ok, err := mutex.Unlock()
			if err == nil && !ok {
				err = fmt.Errorf("not unlocked")
			}
			return err
		}
		return &held{validUntil: &valid, release: release}, nil
	}
}

// rueidislock cancels a context when the lock is lost, and renews by itself.
func rueidisLocks(c config) locks {
	host := strings.TrimPrefix(c.URL, "redis://")
	locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption:   rueidis.ClientOption{InitAddress: []string{host}},
		KeyMajority:    1,
		KeyValidity:    c.ttl(),
		NoLoopTracking: true,
	})
	if err != nil {
		panic(err)
	}
	return func(name string, limit time.Duration) (*held, error) {
		// The context of a granted lock must not end with the time to wait for it.
		ctx, cancel := context.WithCancel(context.Background())
		timer := time.AfterFunc(limit, cancel)
		lost, release, err := locker.WithContext(ctx, name)
		if !timer.Stop() && err == nil {
			release()
			err = context.DeadlineExceeded
		}
		if err != nil {
			cancel()
			return nil, err
		}
		free := func() error { release(); cancel(); return nil }
		return &held{lost: lost.Done(), release: free}, nil
	}
}

// The create revision of the key of a `concurrency.Mutex` is a fencing token.
func etcdLocks(c config) locks {
	hosts := strings.Split(strings.Split(strings.TrimPrefix(c.URL, "etcd://"), "/")[0], ",")
	client, err := clientv3.New(clientv3.Config{Endpoints: hosts, DialTimeout: 5 * time.Second})
	if err != nil {
		panic(err)
	}
	ttl := concurrency.WithTTL(int(c.ttl().Seconds()))
	var session *concurrency.Session
	return func(name string, limit time.Duration) (*held, error) {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if session != nil {
			select {
			case <-session.Done():
				session = nil
			default:
			}
		}
		if session == nil {
			fresh, err := concurrency.NewSession(client, ttl)
			if err != nil {
				return nil, err
			}
			session = fresh
		}
		mutex := concurrency.NewMutex(session, "/torture/"+name)
		if err := mutex.Lock(ctx); err != nil {
			return nil, err
		}
		got, err := client.Get(ctx, mutex.Key())
		if err != nil || len(got.Kvs) == 0 {
			return nil, fmt.Errorf("the key of the lock is gone: %v", err)
		}
		token := uint64(got.Kvs[0].CreateRevision)
		release := func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			defer cancel()
			return mutex.Unlock(ctx)
		}
		return &held{token: &token, lost: session.Done(), release: release}, nil
	}
}
