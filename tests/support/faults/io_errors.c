/* Preloaded into a process, makes its system calls on some files fail, stall or be forgotten, as a bad disk would.
 *
 * IO_ERRORS_UNDER: only files whose path begins with this text are concerned.
 * IO_ERRORS_ORDERS: a file that may come, change and go while the process runs. Each line of it is
 *
 *     CALLS ERRNO SKIP TIMES DELAY_MS NAME
 *
 * CALLS is `sync` (fsync, fdatasync), `write`, `read` or `truncate`, on files called NAME, without folder (*: on any).
 * The first SKIP such calls since the file of orders was made pass, the next TIMES (-1: all) wait DELAY_MS and then fail
 * with ERRNO; with ERRNO 0 they succeed after the delay. DELAY_MS may be two numbers with a hyphen between them: each
 * call waits for a time drawn from there.
 * Each affected call adds a line to the file IO_ERRORS_ORDERS with `.log` behind its name.
 *
 * IO_ERRORS_DISK, if set, is a folder for what would be found after a power cut: one file per file, named by its inode
 * number. What is written gets there with the next successful flush of the file. With a failed flush it is forgotten:
 * Linux counts pages as clean after it has reported once that they could not be written, so that a later flush succeeds
 * and brings nothing to the disk.
 *
 * `support.faults.io_errors` compiles this and writes the orders.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_ORDERS 8

struct order {
    char calls[16], name[256];
    int error;
    long skip, times, delay_ms, most_ms;
    long seen;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct order orders[MOST_ORDERS];
static int order_count;
static struct stat loaded; /* the orders file as it was read last */

/* Whether orders may be about the file; its name without folder is written to `name`, unless that is NULL. */
static int concerned(int fd, char *name) {
    const char *under = getenv("IO_ERRORS_UNDER");
    char link[64], path[4096];
    if (under == NULL || *under == 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (strncmp(path, under, strlen(under)) != 0) return 0;
    if (name != NULL) {
        const char *slash = strrchr(path, '/');
        snprintf(name, 256, "%.255s", slash == NULL ? path : slash + 1);
    }
    return 1;
}

static void load_orders(const char *file) {
    struct stat now;
    if (stat(file, &now) != 0) {
        order_count = 0;
        memset(&loaded, 0, sizeof loaded);
        return;
    }
    if (now.st_ino == loaded.st_ino && now.st_mtim.tv_nsec == loaded.st_mtim.tv_nsec &&
        now.st_mtim.tv_sec == loaded.st_mtim.tv_sec)
        return;
    char text[2048];
    int fd = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t length = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (length < 0) return;
    text[length] = 0;
    loaded = now;
    order_count = 0;
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line && order_count < MOST_ORDERS; line = strtok_r(NULL, "\n", &rest)) {
        struct order *one = &orders[order_count];
        char delay[48];
        memset(one, 0, sizeof *one);
        if (sscanf(line, "%15s %d %ld %ld %47s %255s", one->calls, &one->error, &one->skip, &one->times, delay,
                   one->name) != 6)
            continue;
        if (sscanf(delay, "%ld-%ld", &one->delay_ms, &one->most_ms) < 2) one->most_ms = one->delay_ms;
        order_count++;
    }
}

static void note(const char *file, const char *calls, int error) {
    char name[4096], line[64];
    snprintf(name, sizeof name, "%s.log", file);
    int length = snprintf(line, sizeof line, "%s %d\n", calls, error);
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, length);
    syscall(SYS_close, fd);
}

/* A delay of an order, in milliseconds: another one each time, and in another process another row of them. */
static long drawn(const struct order *one) {
    static unsigned state;
    if (state == 0) state = (unsigned)getpid() | 1;
    if (one->most_ms <= one->delay_ms) return one->delay_ms;
    return one->delay_ms + rand_r(&state) % (one->most_ms - one->delay_ms + 1);
}

/* What is to happen to this call: 0 to let it pass, else the errno that it fails with. */
static int verdict(const char *calls, int fd) {
    const char *file = getenv("IO_ERRORS_ORDERS");
    int kept = errno, error = 0;
    long delay_ms = 0;
    char name[256];
    if (file == NULL || !concerned(fd, name)) {
        errno = kept;
        return 0;
    }
    pthread_mutex_lock(&lock);
    load_orders(file);
    for (int i = 0; i < order_count; i++) {
        struct order *one = &orders[i];
        if (strcmp(one->calls, calls) != 0 || (strcmp(one->name, "*") != 0 && strcmp(one->name, name) != 0)) continue;
        long place = one->seen++;
        if (place < one->skip || (one->times >= 0 && place >= one->skip + one->times)) continue;
        error = one->error;
        delay_ms = drawn(one);
        note(file, calls, error);
        break;
    }
    pthread_mutex_unlock(&lock);
    if (delay_ms > 0) {
        struct timespec pause = {delay_ms / 1000, (delay_ms % 1000) * 1000000L};
        nanosleep(&pause, NULL);
    }
    errno = kept;
    return error;
}

/* ---- what a power cut would leave */

struct change {
    off_t at;
    off_t size; /* -1: the file was cut to `at` bytes */
};

struct file {
    ino_t inode;
    struct change *changes;
    int count, room;
    struct file *next;
};

static struct file *unflushed;

static struct file *file_of(ino_t inode) {
    struct file *one = unflushed;
    while (one != NULL && one->inode != inode) one = one->next;
    if (one == NULL) {
        one = calloc(1, sizeof *one);
        one->inode = inode;
        one->next = unflushed;
        unflushed = one;
    }
    return one;
}

static int watched(int fd, struct stat *found) {
    return getenv("IO_ERRORS_DISK") != NULL && concerned(fd, NULL) && fstat(fd, found) == 0 && S_ISREG(found->st_mode);
}

static void changed(int fd, off_t at, off_t size) {
    int kept = errno;
    struct stat found;
    if (watched(fd, &found)) {
        pthread_mutex_lock(&lock);
        struct file *one = file_of(found.st_ino);
        if (one->count == one->room) {
            one->room = one->room * 2 + 16;
            one->changes = realloc(one->changes, one->room * sizeof *one->changes);
        }
        one->changes[one->count++] = (struct change){at, size};
        pthread_mutex_unlock(&lock);
    }
    errno = kept;
}

static void copy(int from, int to, off_t at, off_t size) {
    char data[65536];
    while (size > 0) {
        ssize_t length = syscall(SYS_pread64, from, data, size < (off_t)sizeof data ? size : (off_t)sizeof data, at);
        if (length <= 0 || syscall(SYS_pwrite64, to, data, length, at) != length) return;
        at += length;
        size -= length;
    }
}

static void flushed(int fd, int succeeded) {
    int kept = errno;
    struct stat found;
    if (watched(fd, &found)) {
        char name[4096], link[64];
        snprintf(name, sizeof name, "%s/%lu", getenv("IO_ERRORS_DISK"), (unsigned long)found.st_ino);
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        pthread_mutex_lock(&lock);
        struct file *one = file_of(found.st_ino);
        if (succeeded && one->count > 0) {
            int from = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
            int to = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
            for (int i = 0; i < one->count; i++) {
                struct change *each = &one->changes[i];
                if (each->size >= 0) {
                    copy(from, to, each->at, each->size);
                } else if (syscall(SYS_ftruncate, to, each->at) != 0) {
                    abort();
                }
            }
            syscall(SYS_close, from);
            syscall(SYS_close, to);
        }
        one->count = 0;
        pthread_mutex_unlock(&lock);
    }
    errno = kept;
}

/* ---- the calls */

#define REAL(type, name, ...)                                     \
    static type (*real)(__VA_ARGS__);                             \
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name)

#define FAIL(calls, fd)                     \
    do {                                    \
        int error = verdict(calls, fd);     \
        if (error != 0) {                   \
            errno = error;                  \
            return -1;                      \
        }                                   \
    } while (0)

int fsync(int fd) {
    REAL(int, fsync, int);
    int error = verdict("sync", fd);
    int result = error == 0 ? real(fd) : -1;
    if (error != 0) errno = error;
    flushed(fd, result == 0);
    return result;
}

int fdatasync(int fd) {
    REAL(int, fdatasync, int);
    int error = verdict("sync", fd);
    int result = error == 0 ? real(fd) : -1;
    if (error != 0) errno = error;
    flushed(fd, result == 0);
    return result;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    FAIL("write", fd);
    ssize_t done = real(fd, data, size);
    if (done > 0) changed(fd, lseek(fd, 0, SEEK_CUR) - done, done);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
    FAIL("write", fd);
    ssize_t done = real(fd, data, size, at);
    if (done > 0) changed(fd, at, done);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    FAIL("write", fd);
    ssize_t done = real(fd, data, size, at);
    if (done > 0) changed(fd, at, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    FAIL("write", fd);
    ssize_t done = real(fd, parts, count);
    if (done > 0) changed(fd, lseek(fd, 0, SEEK_CUR) - done, done);
    return done;
}

ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    FAIL("read", fd);
    return real(fd, data, size);
}

ssize_t pread(int fd, void *data, size_t size, off_t at) {
    REAL(ssize_t, pread, int, void *, size_t, off_t);
    FAIL("read", fd);
    return real(fd, data, size, at);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    REAL(ssize_t, pread64, int, void *, size_t, off64_t);
    FAIL("read", fd);
    return real(fd, data, size, at);
}

int ftruncate(int fd, off_t size) {
    REAL(int, ftruncate, int, off_t);
    FAIL("truncate", fd);
    int result = real(fd, size);
    if (result == 0) changed(fd, size, -1);
    return result;
}

int ftruncate64(int fd, off64_t size) {
    REAL(int, ftruncate64, int, off64_t);
    FAIL("truncate", fd);
    int result = real(fd, size);
    if (result == 0) changed(fd, size, -1);
    return result;
}
