/* Shared by the runtime's files. Nothing here is part of the interface. */
#ifndef CONVOY_INTERNAL_H
#define CONVOY_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>

#include "convoy.h"

#define HIDDEN __attribute__((visibility("hidden")))
#define MOST_TENSORS 64 /* of a launch */

/* Remember why a call fails; returns `status`. */
HIDDEN convoy_status fail(convoy_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* --- archive.c: the file in memory ------------------------------------------------------------------------------------- */

typedef struct {
    const char *name; /* in the directory; not terminated */
    size_t name_length;
    const uint8_t *data;
    size_t size;
    uint32_t crc;
} member;

typedef struct {
    uint8_t *bytes;
    size_t size;
    member *members;
    size_t count;
} archive;

HIDDEN convoy_status archive_open(archive *a, const char *path);
HIDDEN void archive_close(archive *a);
HIDDEN const member *archive_find(const archive *a, const char *name);
HIDDEN uint32_t crc32_of(const uint8_t *data, size_t size);

/* --- sha256.c ---------------------------------------------------------------------------------------------------------- */

HIDDEN void sha256(const uint8_t *data, size_t size, uint8_t digest[32]);

/* --- json.c: a tree of values, in memory of its own --------------------------------------------------------------------- */

typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_INTEGER, JSON_NUMBER, JSON_TEXT, JSON_LIST, JSON_OBJECT } json_kind;

typedef struct json {
    json_kind kind;
    const char *key; /* in an object; NULL elsewhere */
    const char *text;
    int64_t integer;
    double number;
    size_t count; /* values of a list or object */
    struct json *first, *next;
} json;

typedef struct json_memory json_memory;

/* NULL for text that is no JSON, or for lack of memory. Free the memory when the tree is of no more use. */
HIDDEN const json *json_parse(const uint8_t *text, size_t size, json_memory **memory);
HIDDEN void json_free(json_memory *memory);
HIDDEN void *json_take(json_memory **memory, size_t count, size_t size); /* zeroed; lives as long as the tree; NULL if there is none */
HIDDEN const json *json_get(const json *object, const char *key, json_kind kind); /* NULL if there is none of this kind */
HIDDEN bool json_count(const json *object, const char *key, int64_t most, int64_t *value);
HIDDEN bool json_item(const json *list, size_t index, int64_t least, int64_t most, int64_t *value); /* an integer of a list, by its place */

/* --- program.c: a program, ready to run --------------------------------------------------------------------------------- */

typedef void kernel(const void *settings, void *const *tensors);

/* As in team.c, which a package's library holds. */
typedef struct {
    const void *fixed;
    int64_t slot; /* -1: fixed */
} operand;

typedef struct {
    kernel *call;
    const void *settings;
    const operand *operands;
    int64_t count;
} launch;

typedef enum { INPUT, OUTPUT, ARENA } place_kind;

typedef struct {
    place_kind kind;
    size_t offset; /* index of an input or output, or bytes in the arena */
    size_t size;
} place;

typedef struct {
    size_t slot, output;
} final_copy;

typedef struct {
    convoy_tensor_info *inputs, *outputs;
    size_t input_count, output_count;
    place *slots;
    size_t slot_count; /* the workspace's pointer stands behind them */
    launch *launches;
    size_t launch_count;
    final_copy *copies;
    size_t copy_count;
    size_t arena_bytes, workspace_bytes, threads;
    struct cuda_graph *graph; /* of a package for a GPU; the members from `slots` on are of one for a CPU */
    json_memory *memory;      /* holds everything above */
} program;

typedef struct {
    const char *name;
    const void *data;
    size_t size;
} weight;

typedef struct {
    const archive *files;
    kernel *const *kernels;
    size_t kernel_count;
    const weight *weights; /* sorted by name */
    size_t weight_count;
} parts;

HIDDEN convoy_status program_load(program *p, const parts *from, const char *member_name);
HIDDEN convoy_tensor_info *read_tensors(program *p, const json *list, size_t *count); /* inputs or outputs; NULL if one is wrong */
HIDDEN const weight *find_weight(const parts *from, const char *name);

/* --- package.c: manifest, sums, weights and library ---------------------------------------------------------------------- */

typedef struct {
    archive files;
    json_memory *manifest_memory, *weights_memory;
    const json *manifest;
    void *library;
    kernel **kernels;
    size_t kernel_count;
    weight *weights;
    size_t weight_count;
    void *(*pool_new)(int64_t threads);
    void (*pool_free)(void *pool);
    void (*pool_run)(void *pool, const launch *launches, int64_t count, void *const *slots);
} package;

HIDDEN convoy_status package_open(package *p, const char *path, unsigned flags);
HIDDEN void package_close(package *p);

/* --- cuda_device.c, cuda_graph.c: packages for a GPU ----------------------------------------------------------------------- */

typedef struct cuda_device cuda_device;

/* Open the driver, take the device's primary context and load the package's kernels. Close it in any case. */
HIDDEN convoy_status cuda_open(cuda_device **device, const package *p, const char *path);
HIDDEN void cuda_close(cuda_device *device);

/* Read a program, give it memory, and make its graph. `cuda_graph_close` frees it, also after a failure. */
HIDDEN convoy_status cuda_graph_load(program *p, cuda_device *device, const parts *from, const char *member_name);
HIDDEN void cuda_graph_close(program *p, cuda_device *device);

/* Copy inputs, launch, copy outputs. With `stream_given` the tensors lie on the device, and the work is only queued on `stream`. */
HIDDEN convoy_status cuda_graph_run(const program *p, cuda_device *device, const convoy_tensor *inputs, const convoy_tensor *outputs,
                                    bool stream_given, void *stream);

#endif
