/* Preloaded into a process, it shifts the time of day by WRONG_CLOCK seconds, and nothing else:
   neither the monotonic clock nor how long anything sleeps. Each synchronization of a file with
   the disk takes 200 ms more while there is a file SLOW_DISK. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
    static long seconds;
    static int known;
    if (!known) {
        const char *given = getenv("WRONG_CLOCK");
        seconds = given ? atol(given) : 0;
        known = 1;
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(now, zone);
    if (!result) now->tv_sec += offset();
    return result;
}

time_t time(time_t *written) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (written) *written = now.tv_sec;
    return now.tv_sec;
}

/* Its limit is a time of day, which the caller has taken from the wrong clock. */
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict limit) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec true_limit = {limit->tv_sec - offset(), limit->tv_nsec};
    return real(semaphore, &true_limit);
}

static int synchronized(const char *name, int file) {
    const char *slow = getenv("SLOW_DISK");
    struct timespec more = {0, 200000000};
    if (slow && !access(slow, F_OK)) nanosleep(&more, NULL);
    return ((int (*)(int)) dlsym(RTLD_NEXT, name))(file);
}

int fsync(int file) { return synchronized("fsync", file); }

int fdatasync(int file) { return synchronized("fdatasync", file); }
