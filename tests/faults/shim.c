/* Faults for LD_PRELOAD: calls to libc on paths below one directory that fail, fall short, kill, or are written down.
 *
 * Nothing happens until `faults_arm` is called. A call that the fault does not come to is passed on as it is. What a
 * library asks of the kernel without libc is not seen.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
/* the next library's function of this name, found once */
#define REAL(name)                                          \
    ({                                                      \
        static __typeof__(&name) found;                     \
        if (!found) found = dlsym(RTLD_NEXT, #name);        \
        found;                                              \
    })

enum call {
    OPEN, READ, WRITE, TRUNCATE, ALLOCATE, SYNC, SYNCDIR, CLOSE, RENAME, EXCHANGE, LINK, UNLINK, MKDIR, RMDIR, LOCK,
    STAT, LIST
};
enum kind { NOTHING, ERROR, LATE, SHORT, SIGNAL, TORN, CUT, SWAP, JOURNAL };
enum change { CREATED, WROTE, RESIZED, SYNCED, RENAMED, EXCHANGED, LINKED, UNLINKED };

static struct {
    bool armed;
    char below[PATH_MAX], other[PATH_MAX];
    enum kind kind;
    int number;
    long at;
    bool forever;
    unsigned calls;
    int journal;
} fault;
static atomic_long seen;
static struct {
    atomic_long fired;
    int call;
    char path[PATH_MAX];
} *last; /* shared with all that is forked */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    last = mmap(NULL, sizeof *last, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

EXPORT long faults_fired(void) { return atomic_load(&last->fired); }
EXPORT int faults_call(void) { return last->call; }
EXPORT const char *faults_path(void) { return last->path; }

EXPORT int faults_arm(const char *below, int kind, int number, long at, int forever, unsigned calls,
                      const char *other) {
    snprintf(fault.below, sizeof fault.below, "%s", below);
    snprintf(fault.other, sizeof fault.other, "%s", other);
    fault.kind = kind;
    fault.number = number;
    fault.at = at;
    fault.forever = forever;
    fault.calls = calls;
    atomic_store(&seen, 0);
    if (kind == JOURNAL) {
        fault.journal = REAL(open)(other, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        if (fault.journal < 0) return errno;
    }
    fault.armed = true;
    return 0;
}

/* -- where a call is ---------------------------------------------------------------------------------------------- */

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlink, link, buffer, PATH_MAX - 1);
    buffer[length < 0 ? 0 : length] = 0;
    return buffer;
}

static const char *path_at(int directory, const char *path, char *buffer) {
    char parent[PATH_MAX];
    if (path[0] == '/') return path;
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, parent, sizeof parent) < 0) parent[0] = 0;
    } else {
        path_of(directory, parent);
    }
    if (snprintf(buffer, PATH_MAX, "%s/%s", parent, path) >= PATH_MAX) buffer[0] = 0;
    return buffer;
}

static bool is_below(const char *path) {
    size_t length = strlen(fault.below);
    return !strncmp(path, fault.below, length) && (path[length] == '/' || path[length] == 0);
}

/* -- what comes to it --------------------------------------------------------------------------------------------- */

static bool comes(enum call call, const char *path, const char *other) {
    if (!fault.armed || !(fault.calls & 1u << call) || !(is_below(path) || is_below(other))) return false;
    long number = atomic_fetch_add(&seen, 1) + 1;
    if (number < fault.at || (number > fault.at && !fault.forever)) return false;
    atomic_fetch_add(&last->fired, 1);
    if (number == fault.at) {
        last->call = call;
        snprintf(last->path, sizeof last->path, "%s", path);
    }
    return true;
}

static void raise_signal(void) { syscall(SYS_kill, syscall(SYS_getpid), fault.number); }

static void act_before(const char *path) {
    struct stat now;
    if (fault.kind == SIGNAL) {
        raise_signal();
    } else if (fault.kind == CUT && !REAL(stat)(path, &now)) {
        syscall(SYS_truncate, path, now.st_size / 2);
    } else if (fault.kind == SWAP) {
        syscall(SYS_renameat2, AT_FDCWD, fault.below, AT_FDCWD, fault.other, RENAME_EXCHANGE);
    }
}

/* Do `real`, or fail with `failed`, as the fault has it. */
#define MAYBE(call, path, other, failed, real)                                  \
    ({                                                                          \
        __typeof__(real) result;                                                \
        if (!comes(call, path, other)) {                                        \
            result = real;                                                      \
        } else if (fault.kind == ERROR && (call) != CLOSE) {                    \
            errno = fault.number;                                               \
            result = failed;                                                    \
        } else {                                                                \
            act_before(path);                                                   \
            result = real;                                                      \
            if (fault.kind == TORN) raise_signal();                             \
            if (fault.kind == LATE || fault.kind == ERROR) {                    \
                errno = fault.number;                                           \
                result = failed;                                                \
            }                                                                   \
        }                                                                       \
        result;                                                                 \
    })

/* Do `real`, which moves bytes and of which `part` moves half. */
#define MAYBE_PART(call, path, nbytes, part, real)                              \
    ({                                                                          \
        ssize_t moved;                                                          \
        if ((fault.kind == SHORT || fault.kind == TORN) && (nbytes) > 1) {      \
            if (comes(call, path, "")) {                                        \
                moved = part;                                                   \
                if (fault.kind == TORN) raise_signal();                         \
            } else {                                                            \
                moved = real;                                                   \
            }                                                                   \
        } else if (fault.kind == SHORT) {                                       \
            moved = real;                                                       \
        } else {                                                                \
            moved = MAYBE(call, path, "", -1, real);                            \
        }                                                                       \
        moved;                                                                  \
    })

/* -- the journal -------------------------------------------------------------------------------------------------- */

static void put(const void *data, size_t nbytes) {
    while (nbytes) {
        long done = syscall(SYS_write, fault.journal, data, nbytes);
        if (done <= 0) abort();
        data = (const char *)data + done;
        nbytes -= done;
    }
}

static bool is_noted(const char *path, const char *other) {
    return fault.armed && fault.kind == JOURNAL && (is_below(path) || is_below(other));
}

/* A record: change, node, offset, and the sizes of the path, the other path and the data; then these. */
static void note(enum change change, int64_t node, int64_t offset, const char *path, const char *other,
                 const void *data, size_t nbytes) {
    if (!is_noted(path, other)) return;
    int64_t head[] = {change, node, offset, strlen(path), strlen(other), nbytes};
    int before = errno;
    pthread_mutex_lock(&writing);
    put(head, sizeof head);
    put(path, strlen(path));
    put(other, strlen(other));
    put(data, nbytes);
    pthread_mutex_unlock(&writing);
    errno = before;
}

static int64_t node_of(int fd) {
    struct stat now;
    return REAL(fstat)(fd, &now) ? 0 : (int64_t)now.st_ino;
}

static int64_t node_at(const char *path) {
    struct stat now;
    return REAL(lstat)(path, &now) ? 0 : (int64_t)now.st_ino;
}

static bool is_there(const char *path) {
    struct stat now;
    int before = errno;
    bool there = !REAL(lstat)(path, &now);
    errno = before;
    return there;
}

/* -- opening ------------------------------------------------------------------------------------------------------ */

static void note_open(int fd, const char *path, int flags, bool existed) {
    if (fd < 0) return;
    if ((flags & O_CREAT) && !existed) note(CREATED, node_of(fd), 0, path, "", "", 0);
    if ((flags & O_TRUNC) && existed) note(RESIZED, node_of(fd), 0, path, "", "", 0);
}

static int open_at(int directory, const char *name, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = fault.armed ? path_at(directory, name, buffer) : name;
    bool existed = fault.kind == JOURNAL && is_there(path);
    int fd = MAYBE(OPEN, path, "", -1, REAL(openat)(directory, name, flags, mode));
    note_open(fd, path, flags, existed);
    return fd;
}

#define MODE                                                     \
    mode_t mode = 0;                                             \
    if (flags & (O_CREAT | __O_TMPFILE)) {                       \
        va_list rest;                                            \
        va_start(rest, flags);                                   \
        mode = va_arg(rest, mode_t);                             \
        va_end(rest);                                            \
    }

EXPORT int open(const char *name, int flags, ...) { MODE return open_at(AT_FDCWD, name, flags, mode); }
EXPORT int open64(const char *name, int flags, ...) { MODE return open_at(AT_FDCWD, name, flags, mode); }
EXPORT int openat(int at, const char *name, int flags, ...) { MODE return open_at(at, name, flags, mode); }
EXPORT int openat64(int at, const char *name, int flags, ...) { MODE return open_at(at, name, flags, mode); }
EXPORT int creat(const char *name, mode_t mode) {
    return open_at(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

static FILE *open_stream(const char *name, const char *mode) {
    char buffer[PATH_MAX];
    const char *path = fault.armed ? path_at(AT_FDCWD, name, buffer) : name;
    bool existed = fault.kind == JOURNAL && is_there(path);
    FILE *stream = MAYBE(OPEN, path, "", NULL, REAL(fopen)(name, mode));
    if (stream && mode[0] == 'w') note_open(fileno(stream), path, O_CREAT | O_TRUNC, existed);
    return stream;
}
EXPORT FILE *fopen(const char *name, const char *mode) { return open_stream(name, mode); }
EXPORT FILE *fopen64(const char *name, const char *mode) { return open_stream(name, mode); }

EXPORT int close(int fd) {
    char path[PATH_MAX] = "";
    if (fault.armed) path_of(fd, path);
    return MAYBE(CLOSE, path, "", -1, REAL(close)(fd));
}

/* -- reading and writing ------------------------------------------------------------------------------------------ */

#define HALF(nbytes) (((nbytes) + 1) / 2)
#define PATH_OF(fd)            \
    char path[PATH_MAX] = "";  \
    if (fault.armed) path_of(fd, path)

static size_t total(const struct iovec *parts, int count) {
    size_t nbytes = 0;
    for (int i = 0; i < count; i++) nbytes += parts[i].iov_len;
    return nbytes;
}

/* The first half of the first part that holds anything. */
static struct iovec first_half(const struct iovec *parts, int count) {
    for (int i = 0; i < count; i++)
        if (parts[i].iov_len) return (struct iovec){parts[i].iov_base, HALF(parts[i].iov_len)};
    return (struct iovec){NULL, 0};
}

EXPORT ssize_t read(int fd, void *data, size_t nbytes) {
    PATH_OF(fd);
    return MAYBE_PART(READ, path, nbytes, REAL(read)(fd, data, HALF(nbytes)), REAL(read)(fd, data, nbytes));
}
static ssize_t read_at(int fd, void *data, size_t nbytes, off_t offset) {
    PATH_OF(fd);
    return MAYBE_PART(READ, path, nbytes, REAL(pread)(fd, data, HALF(nbytes), offset),
                      REAL(pread)(fd, data, nbytes, offset));
}
EXPORT ssize_t pread(int fd, void *data, size_t nbytes, off_t offset) { return read_at(fd, data, nbytes, offset); }
EXPORT ssize_t pread64(int fd, void *data, size_t nbytes, off64_t offset) { return read_at(fd, data, nbytes, offset); }

static ssize_t read_parts(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    PATH_OF(fd);
    struct iovec half = first_half(parts, count);
    return MAYBE_PART(READ, path, total(parts, count), REAL(preadv2)(fd, &half, 1, offset, flags),
                      REAL(preadv2)(fd, parts, count, offset, flags));
}
EXPORT ssize_t readv(int fd, const struct iovec *parts, int count) { return read_parts(fd, parts, count, -1, 0); }
EXPORT ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    return read_parts(fd, parts, count, offset, 0);
}
EXPORT ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return read_parts(fd, parts, count, offset, 0);
}
EXPORT ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return read_parts(fd, parts, count, offset, flags);
}
EXPORT ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return read_parts(fd, parts, count, offset, flags);
}

static off_t here(int fd) { return fault.kind == JOURNAL ? lseek(fd, 0, SEEK_CUR) : 0; }

static ssize_t noted(ssize_t done, int fd, const char *path, const void *data, off_t offset) {
    if (done > 0) note(WROTE, node_of(fd), offset, path, "", data, done);
    return done;
}

EXPORT ssize_t write(int fd, const void *data, size_t nbytes) {
    PATH_OF(fd);
    off_t offset = here(fd);
    return noted(MAYBE_PART(WRITE, path, nbytes, REAL(write)(fd, data, HALF(nbytes)), REAL(write)(fd, data, nbytes)),
                 fd, path, data, offset);
}
static ssize_t write_at(int fd, const void *data, size_t nbytes, off_t offset) {
    PATH_OF(fd);
    return noted(MAYBE_PART(WRITE, path, nbytes, REAL(pwrite)(fd, data, HALF(nbytes), offset),
                            REAL(pwrite)(fd, data, nbytes, offset)),
                 fd, path, data, offset);
}
EXPORT ssize_t pwrite(int fd, const void *data, size_t nbytes, off_t offset) {
    return write_at(fd, data, nbytes, offset);
}
EXPORT ssize_t pwrite64(int fd, const void *data, size_t nbytes, off64_t offset) {
    return write_at(fd, data, nbytes, offset);
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    PATH_OF(fd);
    struct iovec half = first_half(parts, count);
    off_t begin = offset < 0 ? here(fd) : offset;
    ssize_t done = MAYBE_PART(WRITE, path, total(parts, count), REAL(pwritev2)(fd, &half, 1, offset, flags),
                              REAL(pwritev2)(fd, parts, count, offset, flags));
    for (ssize_t i = 0, left = done; i < count && left > 0; left -= parts[i].iov_len, i++) {
        ssize_t size = (ssize_t)parts[i].iov_len < left ? (ssize_t)parts[i].iov_len : left;
        noted(size, fd, path, parts[i].iov_base, begin + done - left);
    }
    return done;
}
EXPORT ssize_t writev(int fd, const struct iovec *parts, int count) { return write_parts(fd, parts, count, -1, 0); }
EXPORT ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return write_parts(fd, parts, count, offset, 0);
}
EXPORT ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return write_parts(fd, parts, count, offset, 0);
}
EXPORT ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    return write_parts(fd, parts, count, offset, flags);
}
EXPORT ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return write_parts(fd, parts, count, offset, flags);
}

/* The journal cannot see what these would copy inside the kernel, so there they are not to be had, which is allowed. */
static ssize_t send(int out, int in, off_t *offset, size_t nbytes) {
    PATH_OF(out);
    if (is_noted(path, "")) {
        errno = EINVAL;
        return -1;
    }
    return MAYBE_PART(WRITE, path, nbytes, REAL(sendfile)(out, in, offset, HALF(nbytes)),
                      REAL(sendfile)(out, in, offset, nbytes));
}
EXPORT ssize_t sendfile(int out, int in, off_t *offset, size_t nbytes) { return send(out, in, offset, nbytes); }
EXPORT ssize_t sendfile64(int out, int in, off64_t *offset, size_t nbytes) { return send(out, in, offset, nbytes); }

/* -- sizes, and what is on the disk ------------------------------------------------------------------------------- */

static int resized(int failed, int fd, const char *path, off_t size) {
    if (!failed) note(RESIZED, node_of(fd), size, path, "", "", 0);
    return failed;
}
static int resize(int fd, off_t size) {
    PATH_OF(fd);
    return resized(MAYBE(TRUNCATE, path, "", -1, REAL(ftruncate)(fd, size)), fd, path, size);
}
EXPORT int ftruncate(int fd, off_t size) { return resize(fd, size); }
EXPORT int ftruncate64(int fd, off64_t size) { return resize(fd, size); }

static int allocate(int fd, off_t offset, off_t nbytes) {
    PATH_OF(fd);
    return resized(MAYBE(ALLOCATE, path, "", fault.number, REAL(posix_fallocate)(fd, offset, nbytes)), fd, path,
                   offset + nbytes);
}
EXPORT int posix_fallocate(int fd, off_t offset, off_t nbytes) { return allocate(fd, offset, nbytes); }
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t nbytes) { return allocate(fd, offset, nbytes); }

static int synced(int failed, int fd, const char *path) {
    if (!failed) note(SYNCED, node_of(fd), 0, path, "", "", 0);
    return failed;
}
static enum call sync_of(int fd) {
    struct stat now;
    return !REAL(fstat)(fd, &now) && S_ISDIR(now.st_mode) ? SYNCDIR : SYNC;
}
EXPORT int fsync(int fd) {
    PATH_OF(fd);
    return synced(MAYBE(sync_of(fd), path, "", -1, REAL(fsync)(fd)), fd, path);
}
EXPORT int fdatasync(int fd) {
    PATH_OF(fd);
    return synced(MAYBE(SYNC, path, "", -1, REAL(fdatasync)(fd)), fd, path);
}

/* -- names -------------------------------------------------------------------------------------------------------- */

static int named(int failed, enum change change, const char *path, const char *other) {
    /* of what is created, an offset of 1 says that it is a directory */
    if (!failed) note(change, node_at(change == CREATED ? path : other), change == CREATED, path, other, "", 0);
    return failed;
}

static int move(int from, const char *a, int to, const char *b, unsigned flags) {
    char first[PATH_MAX], second[PATH_MAX];
    const char *path = fault.armed ? path_at(from, a, first) : a, *other = fault.armed ? path_at(to, b, second) : b;
    return named(MAYBE(flags & RENAME_EXCHANGE ? EXCHANGE : RENAME, path, other, -1, REAL(renameat2)(from, a, to, b, flags)),
                 flags & RENAME_EXCHANGE ? EXCHANGED : RENAMED, path, other);
}
EXPORT int rename(const char *a, const char *b) { return move(AT_FDCWD, a, AT_FDCWD, b, 0); }
EXPORT int renameat(int from, const char *a, int to, const char *b) { return move(from, a, to, b, 0); }
EXPORT int renameat2(int from, const char *a, int to, const char *b, unsigned flags) {
    return move(from, a, to, b, flags);
}

static int link_at(int from, const char *a, int to, const char *b, int flags) {
    char first[PATH_MAX], second[PATH_MAX];
    const char *path = fault.armed ? path_at(from, a, first) : a, *other = fault.armed ? path_at(to, b, second) : b;
    return named(MAYBE(LINK, path, other, -1, REAL(linkat)(from, a, to, b, flags)), LINKED, path, other);
}
EXPORT int link(const char *a, const char *b) { return link_at(AT_FDCWD, a, AT_FDCWD, b, 0); }
EXPORT int linkat(int from, const char *a, int to, const char *b, int flags) { return link_at(from, a, to, b, flags); }

static int unlink_at(int at, const char *name, int flags) {
    char buffer[PATH_MAX];
    const char *path = fault.armed ? path_at(at, name, buffer) : name;
    return named(MAYBE(flags & AT_REMOVEDIR ? RMDIR : UNLINK, path, "", -1, REAL(unlinkat)(at, name, flags)),
                 UNLINKED, path, "");
}
EXPORT int unlink(const char *name) { return unlink_at(AT_FDCWD, name, 0); }
EXPORT int rmdir(const char *name) { return unlink_at(AT_FDCWD, name, AT_REMOVEDIR); }
EXPORT int unlinkat(int at, const char *name, int flags) { return unlink_at(at, name, flags); }

static int make_directory(int at, const char *name, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = fault.armed ? path_at(at, name, buffer) : name;
    return named(MAYBE(MKDIR, path, "", -1, REAL(mkdirat)(at, name, mode)), CREATED, path, "");
}
EXPORT int mkdir(const char *name, mode_t mode) { return make_directory(AT_FDCWD, name, mode); }
EXPORT int mkdirat(int at, const char *name, mode_t mode) { return make_directory(at, name, mode); }

/* -- the rest ----------------------------------------------------------------------------------------------------- */

EXPORT int flock(int fd, int operation) {
    PATH_OF(fd);
    return MAYBE(LOCK, path, "", -1, REAL(flock)(fd, operation));
}

#define STAT_AT(at, name, real)                                          \
    char buffer[PATH_MAX];                                               \
    const char *path = fault.armed ? path_at(at, name, buffer) : (name); \
    return MAYBE(STAT, path, "", -1, real)

EXPORT int stat(const char *name, struct stat *now) { STAT_AT(AT_FDCWD, name, REAL(stat)(name, now)); }
EXPORT int stat64(const char *name, struct stat64 *now) { STAT_AT(AT_FDCWD, name, REAL(stat64)(name, now)); }
EXPORT int lstat(const char *name, struct stat *now) { STAT_AT(AT_FDCWD, name, REAL(lstat)(name, now)); }
EXPORT int lstat64(const char *name, struct stat64 *now) { STAT_AT(AT_FDCWD, name, REAL(lstat64)(name, now)); }
EXPORT int fstatat(int at, const char *name, struct stat *now, int flags) {
    STAT_AT(at, name, REAL(fstatat)(at, name, now, flags));
}
EXPORT int fstatat64(int at, const char *name, struct stat64 *now, int flags) {
    STAT_AT(at, name, REAL(fstatat64)(at, name, now, flags));
}
EXPORT int fstat(int fd, struct stat *now) {
    PATH_OF(fd);
    return MAYBE(STAT, path, "", -1, REAL(fstat)(fd, now));
}
EXPORT int fstat64(int fd, struct stat64 *now) {
    PATH_OF(fd);
    return MAYBE(STAT, path, "", -1, REAL(fstat64)(fd, now));
}
EXPORT int statvfs(const char *name, struct statvfs *now) { STAT_AT(AT_FDCWD, name, REAL(statvfs)(name, now)); }
EXPORT int statvfs64(const char *name, struct statvfs64 *now) { STAT_AT(AT_FDCWD, name, REAL(statvfs64)(name, now)); }

EXPORT DIR *opendir(const char *name) {
    char buffer[PATH_MAX];
    const char *path = fault.armed ? path_at(AT_FDCWD, name, buffer) : name;
    return MAYBE(LIST, path, "", NULL, REAL(opendir)(name));
}
EXPORT DIR *fdopendir(int fd) {
    PATH_OF(fd);
    return MAYBE(LIST, path, "", NULL, REAL(fdopendir)(fd));
}
EXPORT struct dirent *readdir(DIR *directory) {
    PATH_OF(dirfd(directory));
    return MAYBE(LIST, path, "", NULL, REAL(readdir)(directory));
}
EXPORT struct dirent64 *readdir64(DIR *directory) {
    PATH_OF(dirfd(directory));
    return MAYBE(LIST, path, "", NULL, REAL(readdir64)(directory));
}
