/* Preloaded into a process, shifts the wall clock that it reads. CLOCK_STEPS_FILE holds the shift in seconds, as a
 * 64-bit integer in memory order; it may change while the process runs. The monotonic clocks stay as they are.
 *
 * `support.faults.clock_steps` compiles this and writes the file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("CLOCK_STEPS_FILE");
    int fd = file == NULL ? -1 : open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED) shift = found;
}

static int64_t seconds(void) { return shift == NULL ? 0 : *shift; }

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += seconds();
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    *at = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}
