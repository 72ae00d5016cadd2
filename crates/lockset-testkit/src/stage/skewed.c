/* Makes the wall clock of a server jump while it runs: loaded before all else (LD_PRELOAD), it adds
 * the microseconds that stand in the file LOCKSET_SKEW, as a 64-bit integer, to what the kernel
 * says. Only CLOCK_REALTIME is changed. By raw system calls, because the functions of the library
 * are the ones that are replaced. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t skew(void) {
    static volatile int64_t *micros;
    if (!micros) {
        const char *path = getenv("LOCKSET_SKEW");
        int file = path ? open(path, O_RDONLY) : -1;
        if (file < 0) return 0;
        void *page = mmap(NULL, sizeof *micros, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (page == MAP_FAILED) return 0;
        micros = page;
    }
    return *micros;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int outcome = (int)syscall(SYS_clock_gettime, clock, now);
    if (outcome == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t nanos = now->tv_sec * 1000000000LL + now->tv_nsec + skew() * 1000;
        now->tv_sec = nanos / 1000000000LL;
        now->tv_nsec = nanos % 1000000000LL;
    }
    return outcome;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact) != 0) return -1;
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
