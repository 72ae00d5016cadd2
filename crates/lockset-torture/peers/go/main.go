// Locks of Go libraries in the fault test: `peers redsync|etcd|rueidislock CONFIG`.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

type config struct {
	Process   string
	URL       string
	Locks     []struct{ Name string }
	TTLMillis int `json:"ttl_ms"`
	Registers int
	File      string
}

func (c config) ttl() time.Duration { return time.Duration(c.TTLMillis) * time.Millisecond }

// held is a granted lock.
type held struct {
	token      *uint64
	validUntil *int64
	// Closed when the lock is known to be lost, where the library tells.
	lost    <-chan struct{}
	release func() error
}

// locks acquires a lock by its name within a time.
type locks func(name string, limit time.Duration) (*held, error)

// The monotonic clock of the machine, which the standard library does not show.
func now() int64 {
	var time syscall.Timespec
	const monotonic = 1
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, monotonic, uintptr(unsafe.Pointer(&time)), 0)
	return time.Nano()
}

type recorder struct {
	by   string
	file *os.File
}

func (r recorder) record(event string, op int, fields map[string]any) {
	line := map[string]any{"at": now(), "by": r.by, "event": event, "op": op}
	for key, value := range fields {
		line[key] = value
	}
	text, _ := json.Marshal(line)
	if _, err := r.file.Write(append(text, '\n')); err != nil {
		panic(err)
	}
}

type registers struct {
	stream net.Conn
	lines  *bufio.Reader
}

func (r registers) ask(words ...any) []string {
	fmt.Fprintln(r.stream, words...)
	line, _ := r.lines.ReadString('\n')
	return strings.Fields(line)
}

func main() {
	var c config
	if err := json.Unmarshal([]byte(os.Args[2]), &c); err != nil {
		panic(err)
	}
	var acquire locks
	renews := true
	switch os.Args[1] {
	case "redsync":
		acquire, renews = redsyncLocks(c), false
	case "rueidislock":
		acquire = rueidisLocks(c)
	case "etcd":
		acquire = etcdLocks(c)
	}
	file, err := os.OpenFile(c.File, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		panic(err)
	}
	stream, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", c.Registers))
	if err != nil {
		panic(err)
	}
	var stopping atomic.Bool
	go func() {
		io.Copy(io.Discard, os.Stdin)
		stopping.Store(true)
	}()
	log, data := recorder{c.Process, file}, registers{stream, bufio.NewReader(stream)}
	for op := 1; !stopping.Load(); op++ {
		holdOnce(c, log, data, op, acquire, renews)
		time.Sleep(time.Duration(rand.Intn(20)) * time.Millisecond)
	}
}

func holdOnce(c config, log recorder, data registers, op int, acquire locks, renews bool) {
	name := c.Locks[rand.Intn(len(c.Locks))].Name
	log.record("ask", op, map[string]any{"name": name, "mode": "exclusive"})
	lock, err := acquire(name, 2*c.ttl())
	if err != nil {
		log.record("failed", op, map[string]any{"error": err.Error()})
		time.Sleep(100 * time.Millisecond)
		return
	}
	log.record("enter", op, map[string]any{"token": lock.token, "valid_until": lock.validUntil})
	over := make(chan struct{})
	go func() {
		select {
		case <-lock.lost:
			log.record("lost", op, map[string]any{"reason": "told"})
		case <-over:
		}
	}()
	work(c, log, data, op, name, lock.token, renews)
	log.record("exit", op, nil)
	close(over)
	if err := lock.release(); err != nil {
		log.record("released", op, map[string]any{"error": err.Error()})
	} else {
		log.record("released", op, map[string]any{"error": nil})
	}
}

func work(c config, log recorder, data registers, op int, name string, token *uint64, renews bool) {
	kinds, shown := []string{"plain"}, "-"
	if token != nil {
		kinds, shown = append(kinds, "fenced"), strconv.FormatUint(*token, 10)
	}
	read := map[string][]string{}
	for _, kind := range kinds {
		read[kind] = data.ask("read", kind, name, shown)
	}
	part := rand.Float64()
	switch dice := rand.Intn(40); {
	case dice == 0 && renews:
		time.Sleep(time.Duration(float64(c.ttl()) * (0.8 + 0.5*part)))
	case dice < 5:
		time.Sleep(time.Duration(float64(c.ttl()) * (0.1 + 0.3*part)))
	default:
		time.Sleep(time.Duration(30*part) * time.Millisecond)
	}
	for _, kind := range kinds {
		value := fmt.Sprintf("%s-%d-%s", c.Process, op, kind)
		log.record("write", op, map[string]any{"register": kind, "value": value})
		outcome := "rejected"
		if was := read[kind]; len(was) == 3 {
			counter, _ := strconv.Atoi(was[2])
			reply := data.ask("write", kind, name, shown, was[1], counter+1, value)
			if len(reply) == 1 && reply[0] == "ok" {
				outcome = "acknowledged"
			}
		}
		fields := map[string]any{"register": kind, "value": value, "outcome": outcome}
		log.record("wrote", op, fields)
	}
}
