/* A package's file in memory: a zip file of the profile in docs/reference/package.md, every field checked. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_SIZE 0xFFFFFFFEu
#define MOST_MEMBERS 4096
enum { LOCAL = 30, ENTRY = 46, END = 22, ALIGNMENT = 64, SHARED = 24 };

static uint32_t u16(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8; }
static uint32_t u32(const uint8_t *p) { return u16(p) | u16(p + 2) << 16; }

uint32_t crc32_of(const uint8_t *data, size_t size) {
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static convoy_status map(archive *a, const char *path) {
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat found;
    convoy_status status = CONVOY_OK;
    if (file < 0) return fail(CONVOY_CANNOT_READ, "%s: %s", path, strerror(errno));
    if (fstat(file, &found))
        status = fail(CONVOY_CANNOT_READ, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(found.st_mode))
        status = fail(CONVOY_CANNOT_READ, "%s: not a regular file", path);
    else if (found.st_size < END || (uint64_t)found.st_size > MOST_SIZE)
        status = fail(CONVOY_DAMAGED, "%s: no .convoy package: it has %lld bytes", path, (long long)found.st_size);
    else {
        a->size = (size_t)found.st_size;
        void *at = mmap(NULL, a->size, PROT_READ, MAP_PRIVATE, file, 0);
        if (at == MAP_FAILED)
            status = fail(CONVOY_CANNOT_READ, "%s: %s", path, strerror(errno));
        else
            a->bytes = at;
    }
    close(file);
    return status;
}

/* The member of a directory's entry; false if its local header says something else. */
static bool member_of(const archive *a, const uint8_t *entry, size_t local, size_t end, member *found) {
    const uint8_t *header = a->bytes + local;
    if (local + LOCAL > end || u32(header) != 0x04034b50 || memcmp(header + 4, entry + 6, SHARED)) return false;
    size_t length = u16(entry + 28), offset = local + LOCAL + length + u16(header + 28);
    size_t size = u32(entry + 24);
    bool plain = u16(entry + 6) == 10 && !u16(entry + 8) && !u16(entry + 10) && u32(entry + 20) == size;
    if (!plain || offset % ALIGNMENT || offset > end || size > end - offset) return false;
    if (memcmp(header + LOCAL, entry + ENTRY, length)) return false;
    *found = (member){(const char *)entry + ENTRY, length, a->bytes + offset, size, u32(entry + 16)};
    return true;
}

static bool read_directory(archive *a) {
    size_t end = a->size - END;
    const uint8_t *last = a->bytes + end;
    size_t count = u16(last + 10), size = u32(last + 12), start = u32(last + 16);
    if (u32(last) != 0x06054b50 || u32(last + 4) || u16(last + 8) != count || u16(last + 20)) return false;
    if (!count || count > MOST_MEMBERS || size > end || start != end - size) return false;
    a->members = calloc(count, sizeof *a->members);
    if (!a->members) return false;
    size_t at = start, next = 0;
    for (; a->count < count; a->count++) {
        const uint8_t *entry = a->bytes + at;
        if (at + ENTRY > end || at + ENTRY + u16(entry + 28) > end || u32(entry) != 0x02014b50 || u16(entry + 4) != 10)
            return false;
        for (int i = 30; i < 42; i++)
            if (entry[i]) return false; /* extra field, comment, disk, attributes */
        if (u32(entry + 42) != next || !member_of(a, entry, next, start, a->members + a->count)) return false;
        const member *made = a->members + a->count;
        next = (size_t)(made->data - a->bytes) + made->size;
        at += ENTRY + made->name_length;
    }
    return at == end && next == start;
}

convoy_status archive_open(archive *a, const char *path) {
    convoy_status status = map(a, path);
    if (status) return status;
    if (read_directory(a)) return CONVOY_OK;
    return fail(CONVOY_DAMAGED, "%s: no whole .convoy package: its archive is damaged; copy or export it again", path);
}

void archive_close(archive *a) {
    if (a->bytes) munmap(a->bytes, a->size);
    free(a->members);
    *a = (archive){0};
}

const member *archive_find(const archive *a, const char *name) {
    size_t length = strlen(name);
    for (size_t i = 0; i < a->count; i++)
        if (a->members[i].name_length == length && !memcmp(a->members[i].name, name, length)) return a->members + i;
    return NULL;
}
