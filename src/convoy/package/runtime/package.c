/* Opens a package: its manifest, the sums of its members, what it needs, its weights and its library. */
#include "internal.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

/* Most nets that are open at once. */
enum { MOST_SLASHES = 3000 };

static convoy_status damaged(const char *path, const char *what) {
    return fail(CONVOY_DAMAGED, "%s: no whole .convoy package: %s; copy or export it again", path, what);
}

static convoy_status read_manifest(package *p, const char *path) {
    const member *file = archive_find(&p->files, "manifest.json");
    int64_t version;
    if (!file || crc32_of(file->data, file->size) != file->crc) return damaged(path, "its manifest is missing or damaged");
    p->manifest = json_parse(file->data, file->size, &p->manifest_memory);
    const json *format = json_get(p->manifest, "format", JSON_TEXT);
    if (!format || strcmp(format->text, "convoy package")) return damaged(path, "its manifest is none");
    if (!json_count(p->manifest, "version", INT64_MAX, &version)) return damaged(path, "its manifest has no version");
    if (version != CONVOY_PACKAGE_VERSION)
        return fail(CONVOY_OTHER_VERSION, "%s: version %lld, this runtime reads version %d", path, (long long)version,
                    CONVOY_PACKAGE_VERSION);
    return CONVOY_OK;
}

static convoy_status check_sums(const package *p, const char *path) {
    const json *sums = json_get(p->manifest, "sums", JSON_OBJECT);
    if (!sums || sums->count + 1 != p->files.count) return damaged(path, "its manifest lists other members");
    for (const json *sum = sums->first; sum; sum = sum->next) {
        const member *file = archive_find(&p->files, sum->key);
        uint8_t digest[32];
        char text[65];
        if (!file || sum->kind != JSON_TEXT) return damaged(path, "its manifest lists other members");
        sha256(file->data, file->size, digest);
        for (int i = 0; i < 32; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
        if (strcmp(text, sum->text)) return fail(CONVOY_DAMAGED, "%s: member %s is damaged; copy or export the package again", path, sum->key);
    }
    return CONVOY_OK;
}

/* The processor's features as /proc/cpuinfo names them, between spaces; NULL if it does not. */
static char *processor_features(void) {
    FILE *file = fopen("/proc/cpuinfo", "re");
    char *line = NULL;
    size_t size = 0;
    if (!file) return NULL;
    while (getline(&line, &size, file) > 0)
        if (!strncmp(line, "flags", 5) || !strncmp(line, "Features", 8)) {
            for (char *c = line; *c; c++)
                if (*c == '\n' || *c == '\t') *c = ' ';
            fclose(file);
            return line;
        }
    free(line);
    fclose(file);
    return NULL;
}

static convoy_status check_needs(const package *p, const char *path) {
    const json *needs = json_get(p->manifest, "needs", JSON_OBJECT), *flags = json_get(needs, "flags", JSON_LIST);
    const json *system = json_get(needs, "system", JSON_TEXT), *machine = json_get(needs, "machine", JSON_TEXT);
    const json *isa = json_get(needs, "isa", JSON_TEXT);
    struct utsname here;
    if (!system || !machine || !flags || !isa || uname(&here)) return damaged(path, "its manifest does not say what it needs");
    if (strcasecmp(system->text, here.sysname) || strcmp(machine->text, here.machine))
        return fail(CONVOY_OTHER_MACHINE, "%s: made for %s on %s, this is %s on %s", path, system->text, machine->text, here.sysname,
                    here.machine);
    convoy_status status = CONVOY_OK;
    char *features = flags->count ? processor_features() : NULL;
    for (const json *flag = flags->first; flag && !status; flag = flag->next) {
        char word[64];
        if (flag->kind != JSON_TEXT || strlen(flag->text) > 60)
            status = damaged(path, "its manifest does not say what it needs");
        else {
            snprintf(word, sizeof word, " %s ", flag->text);
            if (!features || !strstr(features, word))
                status = fail(CONVOY_OTHER_MACHINE, "%s: made for a processor with %s, this one lacks %s", path, isa->text, flag->text);
        }
    }
    free(features);
    return status;
}

static int by_name(const void *a, const void *b) { return strcmp(((const weight *)a)->name, ((const weight *)b)->name); }

static convoy_status read_weights(package *p, const char *path) {
    const json *name = json_get(p->manifest, "weights", JSON_TEXT);
    const member *file = name ? archive_find(&p->files, name->text) : NULL;
    uint64_t length = 0;
    if (!file || file->size < 8) return damaged(path, "it has no weights");
    for (int i = 0; i < 8; i++) length |= (uint64_t)file->data[i] << 8 * i;
    if (length > file->size - 8) return damaged(path, "its weights are cut");
    size_t start = 8 + (size_t)length, size = file->size - start;
    const json *header = json_parse(file->data + 8, (size_t)length, &p->weights_memory);
    if (!header || header->kind != JSON_OBJECT) return damaged(path, "its weights have no header");
    p->weights = calloc(header->count + 1, sizeof *p->weights);
    if (!p->weights) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory for %zu weights", path, header->count);
    for (const json *one = header->first; one; one = one->next) {
        const json *offsets = json_get(one, "data_offsets", JSON_LIST);
        const json *begin = offsets && offsets->count == 2 ? offsets->first : NULL;
        if (!begin || begin->kind != JSON_INTEGER || begin->next->kind != JSON_INTEGER) return damaged(path, "a weight has no place");
        int64_t first = begin->integer, last = begin->next->integer;
        if (first < 0 || last < first || (uint64_t)last > size) return damaged(path, "a weight lies outside");
        p->weights[p->weight_count++] = (weight){one->key, file->data + start + first, (size_t)(last - first)};
    }
    qsort(p->weights, p->weight_count, sizeof *p->weights, by_name);
    return CONVOY_OK;
}

/* Load the library from a file in memory: its member is no file that the loader can open.
 *
 * While a library is open, the loader takes its name for it, and descriptors' numbers return: further slashes make a name that is free. */
static convoy_status load_library(package *p, const char *path) {
    const json *name = json_get(p->manifest, "library", JSON_TEXT);
    const member *file = name ? archive_find(&p->files, name->text) : NULL;
    char opened[MOST_SLASHES + 64], slashes[MOST_SLASHES + 1] = "/";
    if (!file) return fail(CONVOY_NOT_PORTABLE, "%s: it holds no compiled code: export it with --portable", path);
    int memory = memfd_create("convoy-package", MFD_CLOEXEC);
    if (memory < 0) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory for its code", path);
    for (size_t done = 0; done < file->size;) {
        ssize_t now = write(memory, file->data + done, file->size - done);
        if (now <= 0) {
            close(memory);
            return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory for its code", path);
        }
        done += (size_t)now;
    }
    for (size_t count = 1; count < MOST_SLASHES; count++) {
        snprintf(opened, sizeof opened, "/proc/self/fd%s%d", slashes, memory);
        void *taken = dlopen(opened, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (!taken) break;
        dlclose(taken);
        slashes[count] = '/';
    }
    p->library = dlopen(opened, RTLD_NOW | RTLD_LOCAL);
    close(memory);
    if (!p->library) return fail(CONVOY_OTHER_MACHINE, "%s: its code cannot be loaded here: %s", path, dlerror());
    return CONVOY_OK;
}

static convoy_status find_kernels(package *p, const char *path) {
    const json *list = json_get(p->manifest, "kernels", JSON_LIST);
    p->kernels = list ? calloc(list->count + 1, sizeof *p->kernels) : NULL;
    if (!p->kernels) return damaged(path, "its manifest lists no kernels");
    for (const json *one = list->first; one; one = one->next) {
        const json *function = json_get(one, "function", JSON_TEXT);
        void *found = function ? dlsym(p->library, function->text) : NULL;
        if (!found) return damaged(path, "its library lacks a kernel");
        for (int i = 0; i < p->kernel_count; i++)
            if (!memcmp(p->kernels + i, &found, sizeof found)) return damaged(path, "its manifest names a kernel twice");
        memcpy(p->kernels + p->kernel_count++, &found, sizeof found); /* ISO C has no cast between them */
    }
    struct {
        const char *name;
        void *to;
    } team[] = {{"convoy_pool_new", &p->pool_new}, {"convoy_pool_free", &p->pool_free}, {"convoy_pool_run", &p->pool_run}};
    for (int i = 0; i < 3; i++) {
        void *found = dlsym(p->library, team[i].name);
        if (!found) return damaged(path, "its library lacks a function");
        memcpy(team[i].to, &found, sizeof found);
    }
    return CONVOY_OK;
}

convoy_status package_open(package *p, const char *path, unsigned flags) {
    convoy_status status = archive_open(&p->files, path);
    if (status || (status = read_manifest(p, path)) || (status = check_sums(p, path)) || (status = check_needs(p, path))) return status;
    if (!json_get(p->manifest, "portable", JSON_TRUE))
        return fail(CONVOY_NOT_PORTABLE, "%s: some of its steps need Python: export it with --portable", path);
    if (!(flags & CONVOY_TRUST))
        return fail(CONVOY_NOT_TRUSTED, "%s: it holds compiled code: pass CONVOY_TRUST if you trust the person who made it", path);
    if (json_get(p->manifest, "cuda", JSON_OBJECT)) return read_weights(p, path);
    if ((status = load_library(p, path)) || (status = find_kernels(p, path))) return status;
    return read_weights(p, path);
}

void package_close(package *p) {
    if (p->library) dlclose(p->library);
    free(p->kernels);
    free(p->weights);
    json_free(p->manifest_memory);
    json_free(p->weights_memory);
    archive_close(&p->files);
}
