/* Stands between a broker and the C library, by LD_PRELOAD: makes calls on files
 * below one folder fail, as a test asks for in shared memory, and notes what was
 * synced, so that the test can tell what a power cut may leave. Sets the wall clock
 * as well.
 *
 * RINGMAIN_SHIM_FOLDER   the folder
 * RINGMAIN_SHIM_CONTROL  a file of the size of `struct control`
 * RINGMAIN_SHIM_LOG      what was made, synced and renamed, a line each
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { WRITE, SYNC, OPEN, RENAME, RESERVE, READ, UNLINK, KINDS };

struct control {
    /* The kind of call that fails, after how many more, how often, and how. */
    _Atomic int kind;
    _Atomic int error; /* an errno; 0: a write is cut short */
    _Atomic long after;
    _Atomic long times;
    /* How often calls of each kind were made, and failed. */
    _Atomic long calls[KINDS];
    _Atomic long failed;
    /* Seconds that the wall clock is wrong by. */
    _Atomic long clock;
};

static struct control *control;
static char folder[4096];
static size_t folder_len;
static int log_fd = -1;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("RINGMAIN_SHIM_FOLDER");
    const char *shared = getenv("RINGMAIN_SHIM_CONTROL");
    const char *log = getenv("RINGMAIN_SHIM_LOG");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    if (!path || !shared || !log) return;
    int fd = real_open(shared, O_RDWR | O_CLOEXEC);
    void *at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    log_fd = real_open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || at == MAP_FAILED || log_fd < 0) abort();
    folder_len = strlen(path);
    memcpy(folder, path, folder_len + 1);
    control = at;
}

static int is_ours(const char *path) {
    return control && path && strncmp(path, folder, folder_len) == 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = control ? readlink(link, path, 4095) : -1;
    if (len < 0) return 0;
    path[len] = 0;
    return is_ours(path);
}

static void note(const char *format, ...) {
    int error = errno;
    char line[9000];
    va_list arguments;
    va_start(arguments, format);
    int len = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    ssize_t (*real_write)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    if (len > 0 && real_write(log_fd, line, len) != len) abort();
    errno = error;
}

/* Whether this call is to fail. */
static int fails(enum kind kind) {
    atomic_fetch_add(&control->calls[kind], 1);
    if (atomic_load(&control->kind) != (int)kind) return 0;
    if (atomic_load(&control->times) <= 0) return 0;
    if (atomic_fetch_sub(&control->after, 1) > 0) return 0;
    if (atomic_fetch_sub(&control->times, 1) <= 0) return 0;
    atomic_fetch_add(&control->failed, 1);
    errno = atomic_load(&control->error);
    return 1;
}

static int fd_fails(int fd, enum kind kind) {
    char path[4096];
    return path_of(fd, path) && fails(kind);
}

/* A write that fails: not at all, or after a half. */
static ssize_t half(int fd, const void *bytes, size_t len, off64_t at) {
    ssize_t (*real_write)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    ssize_t (*real_pwrite)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    if (errno != 0 || len < 2) return -1;
    return at < 0 ? real_write(fd, bytes, len / 2) : real_pwrite(fd, bytes, len / 2, at);
}

ssize_t write(int fd, const void *bytes, size_t len) {
    REAL(write);
    return fd_fails(fd, WRITE) ? half(fd, bytes, len, -1) : real(fd, bytes, len);
}

ssize_t pwrite64(int fd, const void *bytes, size_t len, off64_t at) {
    REAL(pwrite64);
    return fd_fails(fd, WRITE) ? half(fd, bytes, len, at) : real(fd, bytes, len, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t len, off_t at) {
    REAL(pwrite);
    return fd_fails(fd, WRITE) ? half(fd, bytes, len, at) : real(fd, bytes, len, at);
}

ssize_t pread64(int fd, void *bytes, size_t len, off64_t at) {
    REAL(pread64);
    return fd_fails(fd, READ) ? -1 : real(fd, bytes, len, at);
}

ssize_t pread(int fd, void *bytes, size_t len, off_t at) {
    REAL(pread);
    return fd_fails(fd, READ) ? -1 : real(fd, bytes, len, at);
}

static int synced(int fd, int (*real)(int)) {
    char path[4096];
    struct stat before;
    if (!path_of(fd, path)) return real(fd);
    if (fails(SYNC)) {
        note("F %s\n", path);
        return -1;
    }
    /* What is written while the call runs may be synced, or not. */
    int found = fstat(fd, &before);
    int outcome = real(fd);
    if (outcome == 0 && found == 0) {
        if (S_ISDIR(before.st_mode)) note("D %s\n", path);
        else note("S %s %lld\n", path, (long long)before.st_size);
    }
    return outcome;
}

int fsync(int fd) {
    REAL(fsync);
    return synced(fd, real);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return synced(fd, real);
}

static int opened(const char *path, int flags, mode_t mode, const char *name) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if (!is_ours(path)) return real(path, flags, mode);
    if (fails(OPEN)) return -1;
    int is_new = (flags & O_CREAT) && access(path, F_OK) != 0;
    int fd = real(path, flags, mode);
    if (is_new && fd >= 0) note("C %s\n", path);
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments); \
    }

int open(const char *path, int flags, ...) {
    MODE(flags);
    return opened(path, flags, mode, "open");
}

int open64(const char *path, int flags, ...) {
    MODE(flags);
    return opened(path, flags, mode, "open64");
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (is_ours(to) && fails(RENAME)) return -1;
    int outcome = real(from, to);
    if (outcome == 0 && is_ours(to)) note("R %s %s\n", from, to);
    return outcome;
}

int unlink(const char *path) {
    REAL(unlink);
    if (is_ours(path) && fails(UNLINK)) return -1;
    int outcome = real(path);
    if (outcome == 0 && is_ours(path)) note("U %s\n", path);
    return outcome;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(clock_gettime);
    int outcome = real(clock, time);
    if (clock == CLOCK_REALTIME && control) time->tv_sec += atomic_load(&control->clock);
    return outcome;
}

int ftruncate(int fd, off_t len) {
    REAL(ftruncate);
    return fd_fails(fd, RESERVE) ? -1 : real(fd, len);
}

int ftruncate64(int fd, off64_t len) {
    REAL(ftruncate64);
    return fd_fails(fd, RESERVE) ? -1 : real(fd, len);
}

int fallocate(int fd, int mode, off_t at, off_t len) {
    REAL(fallocate);
    return fd_fails(fd, RESERVE) ? -1 : real(fd, mode, at, len);
}

int fallocate64(int fd, int mode, off64_t at, off64_t len) {
    REAL(fallocate64);
    return fd_fails(fd, RESERVE) ? -1 : real(fd, mode, at, len);
}
