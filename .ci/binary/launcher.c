/*
 * The single binary `disco`: a launcher that carries the whole program and the default model.
 *
 * The first start of a version unpacks the program into the user's data folder; every start becomes that program with
 * execv, so that process number, arguments, descriptors and signals are the program's own. A start costs ten system
 * calls more than it would without the launcher. Nothing is unpacked at each start, as other one-file programs do.
 *
 *   DATA/disco/program/.lock      flock(LOCK_EX) while something is unpacked or removed there; a file, since NFS locks no
 *                                 folder that way
 *   DATA/disco/program/VERSION    flock(LOCK_SH) as long as a program that was started from it runs
 *   DATA/disco/program/.new       being unpacked
 *
 * VERSION appears by a rename, so it is whole or not there. The versions that no longer run are removed when another
 * one has been unpacked. `--model-bytes` writes the model to stdout: that is how disco_daemon/models/default.py gets it.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#ifdef __APPLE__
#include <mach-o/dyld.h>
#define DATA "Library/Application Support"
#else
#define DATA ".local/share"
#endif

#ifndef PATH_MAX
#define PATH_MAX 4096
#endif

#define PROGRAM "disco"                 /* the file in VERSION that is started */
#define EXECUTABLE "DISCO_EXECUTABLE"   /* as disco_daemon/system/program.py has it, and the next one too */
#define MODEL "--model-bytes"
#define MAGIC "disco1\0"                /* with the zero at its end 8 bytes */
#define SPARE (16u << 20)               /* bytes that stay free on the disk */
#define N_OPEN 16                       /* descriptors while a folder is removed */

extern const uint8_t disco_program[], disco_program_end[], disco_model[], disco_model_end[];

/* binary/pack.py writes both, in this machine's byte order. */
struct head {
    char magic[8];
    char version[40];
    uint32_t n_entries;
    uint32_t unused;
    uint64_t bytes; /* of all files unpacked */
};

struct entry {
    uint16_t kind, name_bytes;
    uint32_t adler;  /* of the file unpacked */
    uint64_t size, packed; /* the same where a file is not compressed */
};

enum { A_FILE, AN_EXECUTABLE, A_LINK };

/* ---- saying what is wrong ------------------------------------------------------------------------------------- */

static void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

static void die(const char *format, ...) {
    va_list words;
    va_start(words, format);
    fputs("disco: ", stderr);
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
    exit(1);
}

#define DAMAGED "this file is damaged or not whole: get it again"

static void joined(char *out, const char *folder, const char *name) {
    if (snprintf(out, PATH_MAX, "%s/%s", folder, name) >= PATH_MAX) die("the path %s/%s is too long", folder, name);
}

/* ---- what is carried ------------------------------------------------------------------------------------------ */

static uint32_t adler32(const uint8_t *in, size_t n) {
    uint32_t a = 1, b = 0;
    while (n > 0) {
        size_t some = n < 5552 ? n : 5552; /* as many as cannot overflow */
        n -= some;
        while (some-- > 0) {
            a += *in++;
            b += a;
        }
        a %= 65521;
        b %= 65521;
    }
    return b << 16 | a;
}

static int longer(const uint8_t **in, const uint8_t *end, size_t *length) {
    uint8_t more;
    do {
        if (*in == end) return -1;
        more = *(*in)++;
        *length += more;
    } while (more == 255);
    return 0;
}

/* One block of LZ4 (lz4_Block_format.md of its project), which must fill `out` to the byte. 0, or -1 if it does not. */
static int lz4(const uint8_t *in, size_t n, uint8_t *out, size_t room) {
    const uint8_t *end = in + n;
    uint8_t *at = out, *full = out + room;
    while (in < end) {
        uint8_t token = *in++;
        size_t length = token >> 4, back;
        if (length == 15 && longer(&in, end, &length)) return -1;
        if (length > (size_t)(end - in) || length > (size_t)(full - at)) return -1;
        memcpy(at, in, length);
        at += length;
        in += length;
        if (in == end) break; /* the last sequence ends with its literals */
        if (end - in < 2) return -1;
        back = (size_t)in[0] | (size_t)in[1] << 8;
        in += 2;
        length = token & 15;
        if (length == 15 && longer(&in, end, &length)) return -1;
        length += 4;
        if (back == 0 || back > (size_t)(at - out) || length > (size_t)(full - at)) return -1;
        if (back >= length) {
            memcpy(at, at - back, length);
            at += length;
        } else { /* it repeats what it has just written */
            while (length-- > 0) {
                *at = *(at - back);
                at++;
            }
        }
    }
    return at == full ? 0 : -1;
}

static struct head header(void) {
    struct head head;
    if ((size_t)(disco_program_end - disco_program) < sizeof head) die(DAMAGED);
    memcpy(&head, disco_program, sizeof head);
    if (memcmp(head.magic, MAGIC, sizeof head.magic) || !memchr(head.version, 0, sizeof head.version)) die(DAMAGED);
    return head;
}

static int write_all(int file, const uint8_t *bytes, size_t n) {
    while (n > 0) {
        ssize_t done = write(file, bytes, n < INT_MAX / 2 ? n : INT_MAX / 2);
        if (done < 0 && errno != EINTR) return -1;
        if (done > 0) {
            bytes += done;
            n -= (size_t)done;
        }
    }
    return 0;
}

static int send_model(void) {
    if (write_all(1, disco_model, (size_t)(disco_model_end - disco_model))) die("%s", strerror(errno));
    return 0;
}

/* ---- the folder ----------------------------------------------------------------------------------------------- */

#define ELSEWHERE "; to have it elsewhere, set XDG_DATA_HOME"

static void data_folder(char *out) {
    const char *chosen = getenv("XDG_DATA_HOME"), *home = getenv("HOME");
    char base[PATH_MAX];
    if (chosen && *chosen == '/') {
        joined(base, chosen, "disco/program");
    } else {
        if (!home || *home != '/') {
            const struct passwd *user = getpwuid(getuid());
            home = user ? user->pw_dir : NULL;
        }
        if (!home || *home != '/') die("HOME is not set, so there is no place to unpack the program" ELSEWHERE);
        joined(base, home, DATA "/disco/program");
    }
    memcpy(out, base, sizeof base);
}

/* Makes all folders on the way to `path`, which is not changed in the end; with `whole`, `path` too. */
static int make_folders(char *path, int whole) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        int failed;
        *slash = 0;
        failed = mkdir(path, 0700) && errno != EEXIST;
        *slash = '/';
        if (failed) return -1;
    }
    return whole && mkdir(path, 0700) && errno != EEXIST ? -1 : 0;
}

static int remove_one(const char *path, const struct stat *stat, int kind, struct FTW *at) {
    (void)stat;
    (void)kind;
    (void)at;
    return remove(path);
}

static int remove_all(const char *path) {
    int failed = nftw(path, remove_one, N_OPEN, FTW_DEPTH | FTW_PHYS);
    return failed && errno != ENOENT ? -1 : 0;
}

static int open_locked(const char *path, int flags, int how) {
    int file = open(path, flags, 0600);
    if (file < 0) return -1;
    while (flock(file, how)) {
        if (errno != EINTR) {
            close(file);
            return -1;
        }
    }
    return file;
}

/* Locks the version's folder for as long as this process and what it becomes live. -1 if it is not there, or not whole.
 * The descriptor stays open over execv; the program's own children do not inherit it. */
static int hold(const char *folder) {
    char program[PATH_MAX];
    struct stat held, named;
    int file = open_locked(folder, O_RDONLY | O_DIRECTORY, LOCK_SH);
    if (file < 0) return -1;
    joined(program, folder, PROGRAM);
    if (!fstat(file, &held) && !stat(folder, &named) && held.st_dev == named.st_dev && held.st_ino == named.st_ino &&
        !access(program, X_OK))
        return file;
    close(file); /* somebody removed it before the lock was ours */
    return -1;
}

/* ---- unpacking ------------------------------------------------------------------------------------------------ */

static int damaged(void) {
    errno = EBADMSG;
    return -1;
}

static int unpack_one(const struct entry *entry, const uint8_t *data, char *path) {
    const uint8_t *bytes = data;
    uint8_t *room = NULL;
    int file, failed;
    if (make_folders(path, 0)) return -1;
    if (entry->kind == A_LINK) {
        char to[PATH_MAX];
        if (entry->size >= sizeof to) return damaged();
        memcpy(to, data, entry->size);
        to[entry->size] = 0;
        return symlink(to, path);
    }
    if (entry->packed != entry->size) {
        bytes = room = malloc(entry->size + 1);
        if (!room) return -1;
        if (lz4(data, entry->packed, room, entry->size)) return damaged();
    }
    if (adler32(bytes, entry->size) != entry->adler) return damaged();
    file = open(path, O_WRONLY | O_CREAT | O_EXCL, entry->kind == AN_EXECUTABLE ? 0755 : 0644);
    failed = file < 0 || write_all(file, bytes, entry->size);
    if (file >= 0 && close(file)) failed = 1;
    free(room);
    return failed ? -1 : 0;
}

/* Writes everything below `folder`. 0, or -1 and errno. */
static int unpack_into(const char *folder, const struct head *head) {
    const uint8_t *in = disco_program + sizeof *head;
    for (uint32_t i = 0; i < head->n_entries; i++) {
        struct entry entry;
        char name[PATH_MAX], path[PATH_MAX];
        size_t left = (size_t)(disco_program_end - in);
        if (left < sizeof entry) return damaged();
        memcpy(&entry, in, sizeof entry);
        in += sizeof entry;
        left -= sizeof entry;
        if (entry.name_bytes >= sizeof name || entry.name_bytes > left) return damaged();
        memcpy(name, in, entry.name_bytes);
        name[entry.name_bytes] = 0;
        in += entry.name_bytes;
        left -= entry.name_bytes;
        if (entry.packed > left) return damaged();
        joined(path, folder, name);
        if (unpack_one(&entry, in, path)) return -1;
        in += entry.packed;
    }
    return 0;
}

/* So that what a rename makes appear is on the disk, whatever happens to the machine's power. */
static void settle(int folder) {
#ifdef __linux__
    if (!syncfs(folder)) return;
#else
    (void)folder;
#endif
    sync();
}

/* Removes every folder beside `keep` that nobody holds. What cannot be removed stays: it does no harm. */
static void tidy(const char *base, const char *keep) {
    DIR *folder = opendir(base);
    const struct dirent *found;
    while (folder && (found = readdir(folder))) {
        char path[PATH_MAX];
        int held;
        if (!strcmp(found->d_name, ".") || !strcmp(found->d_name, "..") || !strcmp(found->d_name, keep)) continue;
        joined(path, base, found->d_name);
        held = open_locked(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, LOCK_EX | LOCK_NB);
        if (held < 0) continue;
        remove_all(path);
        close(held);
    }
    if (folder) closedir(folder);
}

/* Puts this version's folder in place, unless somebody else was quicker; its lock as of `hold`. */
static int unpack(char *base, const char *target, const struct head *head) {
    char fresh[PATH_MAX], lock[PATH_MAX];
    struct statvfs disk;
    int place, held;
    if (make_folders(base, 1)) die("cannot make the folder %s: %s" ELSEWHERE, base, strerror(errno));
    joined(lock, base, ".lock");
    place = open_locked(lock, O_RDWR | O_CREAT | O_CLOEXEC, LOCK_EX); /* until execv, or the end of this process */
    if (place < 0) die("cannot lock %s: %s" ELSEWHERE, lock, strerror(errno));
    if ((held = hold(target)) >= 0) return held;
    joined(fresh, base, ".new");
    if (remove_all(fresh) || remove_all(target)) die("cannot clear %s: %s", base, strerror(errno));
    if (!statvfs(base, &disk) && (uint64_t)disk.f_bavail * disk.f_frsize < head->bytes + SPARE)
        die("no room in %s: %u MB are needed" ELSEWHERE, base, (unsigned)((head->bytes + SPARE) / 1000000));
    if (isatty(2)) fprintf(stderr, "disco: unpacking version %s, once\n", head->version);
    if (mkdir(fresh, 0700) || unpack_into(fresh, head) || (settle(place), rename(fresh, target))) {
        int why = errno;
        remove_all(fresh);
        if (why == EBADMSG) die(DAMAGED);
        die("cannot unpack into %s: %s" ELSEWHERE, base, strerror(why));
    }
    if ((held = hold(target)) < 0) die("cannot use %s: %s" ELSEWHERE, target, strerror(errno));
    tidy(base, head->version);
    return held;
}

/* ---- the start ------------------------------------------------------------------------------------------------ */

static void find_self(char *out) {
    char found[PATH_MAX];
#ifdef __APPLE__
    uint32_t room = sizeof found;
    if (_NSGetExecutablePath(found, &room)) die("the path of this file is too long");
#else
    ssize_t n = readlink("/proc/self/exe", found, sizeof found - 1);
    if (n < 0) die("cannot read /proc/self/exe: %s", strerror(errno));
    found[n] = 0;
#endif
    if (!realpath(found, out)) memcpy(out, found, sizeof found); /* removed since: the name is all there is */
}

int main(int argc, char **argv) {
    char self[PATH_MAX], base[PATH_MAX], target[PATH_MAX], program[PATH_MAX];
    struct head head;
    if (argc == 2 && !strcmp(argv[1], MODEL)) return send_model();
    head = header();
    find_self(self);
    data_folder(base);
    joined(target, base, head.version);
    joined(program, target, PROGRAM);
    if (hold(target) < 0 && unpack(base, target, &head) < 0) return 1;
    if (setenv(EXECUTABLE, self, 1)) die("%s", strerror(errno));
    argv[0] = program;
    execv(program, argv);
    die("cannot start %s: %s", program, strerror(errno));
}
