/* The interface: nets that are opened, run by any number of threads, and closed. */
#include "internal.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define ALIGNMENT 256

static _Thread_local char last_error[512];

/* What one run needs: memory, and the threads that do it. Kept for later runs. */
typedef struct block {
    struct block *next;
    void *pool;
    int64_t threads;
    uint8_t *memory;
    void **slots;
} block;

struct convoy_net {
    package package;
    program *programs;
    size_t program_count, memory_bytes, slot_count;
    cuda_device *device;  /* NULL: a net on a CPU */
    pthread_mutex_t lock; /* of what follows; on a GPU, of a run */
    block *blocks;
    int64_t threads;
};

convoy_status fail(convoy_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(last_error, sizeof last_error, format, values);
    va_end(values);
    for (char *c = last_error; *c; c++)
        if ((unsigned char)*c < 32 || *c == 127) *c = '?'; /* names may come from files, and a terminal obeys them */
    return status;
}

EXPORTED const char *convoy_last_error(void) { return last_error; }

static convoy_status load_programs(convoy_net *net, const char *path) {
    const json *list = json_get(net->package.manifest, "programs", JSON_LIST);
    parts from = {&net->package.files, net->package.kernels, net->package.kernel_count, net->package.weights,
                  net->package.weight_count};
    if (!list || !list->count) return fail(CONVOY_DAMAGED, "%s: it holds no program", path);
    net->programs = calloc(list->count, sizeof *net->programs);
    if (!net->programs) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory for its programs", path);
    for (const json *one = list->first; one; one = one->next) {
        const json *name = json_get(one, "program", JSON_TEXT);
        program *made = net->programs + net->program_count++;
        const char *member_name = name ? name->text : "";
        convoy_status status = net->device ? cuda_graph_load(made, net->device, &from, member_name) : program_load(made, &from, member_name);
        if (status) return status;
        size_t arena = (made->arena_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        made->arena_bytes = arena;
        if (arena + made->workspace_bytes > net->memory_bytes) net->memory_bytes = arena + made->workspace_bytes;
        if (made->slot_count + 1 > net->slot_count) net->slot_count = made->slot_count + 1;
    }
    return CONVOY_OK;
}

EXPORTED convoy_status convoy_open(const char *path, unsigned flags, convoy_net **net) {
    if (net) *net = NULL;
    if (!path || !net) return fail(CONVOY_INVALID_ARGUMENT, "convoy_open: a pointer is NULL");
    if (flags & ~(unsigned)CONVOY_TRUST) return fail(CONVOY_INVALID_ARGUMENT, "convoy_open: unknown flags %#x", flags);
    convoy_net *made = calloc(1, sizeof *made);
    if (!made) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", path);
    pthread_mutex_init(&made->lock, NULL);
    convoy_status status = package_open(&made->package, path, flags);
    if (!status && json_get(made->package.manifest, "cuda", JSON_OBJECT)) status = cuda_open(&made->device, &made->package, path);
    if (!status) status = load_programs(made, path);
    if (status)
        convoy_close(made);
    else
        *net = made;
    return status;
}

static void free_block(const convoy_net *net, block *one) {
    if (one->pool) net->package.pool_free(one->pool);
    free(one->memory);
    free(one->slots);
    free(one);
}

EXPORTED void convoy_close(convoy_net *net) {
    if (!net) return;
    for (block *one = net->blocks, *next; one; one = next) {
        next = one->next;
        free_block(net, one);
    }
    for (size_t i = 0; i < net->program_count; i++) {
        if (net->device) cuda_graph_close(net->programs + i, net->device);
        json_free(net->programs[i].memory);
    }
    free(net->programs);
    cuda_close(net->device);
    package_close(&net->package);
    pthread_mutex_destroy(&net->lock);
    free(net);
}

EXPORTED convoy_device convoy_net_device(const convoy_net *net) { return net && net->device ? CONVOY_GPU : CONVOY_CPU; }

EXPORTED convoy_status convoy_set_threads(convoy_net *net, int32_t threads) {
    if (!net || threads < 0 || threads > 256) return fail(CONVOY_INVALID_ARGUMENT, "convoy_set_threads: expected 0 to 256 threads, got %d", threads);
    pthread_mutex_lock(&net->lock);
    net->threads = threads;
    pthread_mutex_unlock(&net->lock);
    return CONVOY_OK;
}

EXPORTED size_t convoy_program_count(const convoy_net *net) { return net ? net->program_count : 0; }

static const program *program_at(const convoy_net *net, size_t index) {
    return net && index < net->program_count ? net->programs + index : NULL;
}

EXPORTED size_t convoy_input_count(const convoy_net *net, size_t index) {
    const program *p = program_at(net, index);
    return p ? p->input_count : 0;
}

EXPORTED size_t convoy_output_count(const convoy_net *net, size_t index) {
    const program *p = program_at(net, index);
    return p ? p->output_count : 0;
}

EXPORTED convoy_status convoy_input(const convoy_net *net, size_t index, size_t input, convoy_tensor_info *info) {
    const program *p = program_at(net, index);
    if (!p || !info || input >= p->input_count) return fail(CONVOY_INVALID_ARGUMENT, "convoy_input: no input %zu of program %zu", input, index);
    *info = p->inputs[input];
    return CONVOY_OK;
}

EXPORTED convoy_status convoy_output(const convoy_net *net, size_t index, size_t output, convoy_tensor_info *info) {
    const program *p = program_at(net, index);
    if (!p || !info || output >= p->output_count)
        return fail(CONVOY_INVALID_ARGUMENT, "convoy_output: no output %zu of program %zu", output, index);
    *info = p->outputs[output];
    return CONVOY_OK;
}

static bool fits(const convoy_tensor *given, const convoy_tensor_info *wanted) {
    if (given->dtype != wanted->dtype || given->rank != wanted->rank || (wanted->rank && !given->shape)) return false;
    return !wanted->rank || !memcmp(given->shape, wanted->shape, (size_t)wanted->rank * sizeof *wanted->shape);
}

static const char *const DTYPES[] = {"?", "fp64", "fp32", "fp16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool"};
static const size_t SIZES[] = {1, 8, 4, 2, 2, 8, 4, 2, 1, 1, 1};

/* A dtype and shape as text: `fp32[1,3,224,224]`. */
static const char *shown(char text[160], convoy_dtype dtype, int32_t rank, const int64_t *shape) {
    int at = snprintf(text, 160, "%s[", (unsigned)dtype <= CONVOY_BOOL ? DTYPES[dtype] : "?");
    for (int32_t i = 0; i < rank && i < 16 && shape && at < 130; i++) at += snprintf(text + at, 160 - (size_t)at, i ? ",%lld" : "%lld", (long long)shape[i]);
    snprintf(text + at, 160 - (size_t)at, "]");
    return text;
}

static convoy_status check_tensors(const char *kind, const convoy_tensor *given, size_t count, const convoy_tensor_info *wanted,
                                   size_t wanted_count) {
    char got[160], expected[160];
    if (count != wanted_count) return fail(CONVOY_INVALID_ARGUMENT, "%ss: got %zu, expected %zu", kind, count, wanted_count);
    for (size_t i = 0; i < count; i++) {
        if (!fits(given + i, wanted + i))
            return fail(CONVOY_INVALID_ARGUMENT, "%s %s: got %s, expected %s", kind, wanted[i].name,
                        shown(got, given[i].dtype, given[i].rank, given[i].shape),
                        shown(expected, wanted[i].dtype, wanted[i].rank, wanted[i].shape));
        if (wanted[i].size_bytes && (!given[i].data || (uintptr_t)given[i].data % SIZES[wanted[i].dtype]))
            return fail(CONVOY_INVALID_ARGUMENT, "%s %s: its data is NULL or not aligned to its dtype", kind, wanted[i].name);
    }
    return CONVOY_OK;
}

/* The program whose inputs have these shapes and dtypes; the first one if none has. */
static const program *program_for(const convoy_net *net, const convoy_tensor *inputs, size_t count) {
    for (size_t i = 0; i < net->program_count; i++) {
        const program *p = net->programs + i;
        bool right = count == p->input_count;
        for (size_t k = 0; right && k < count; k++) right = fits(inputs + k, p->inputs + k);
        if (right) return p;
    }
    return net->programs;
}

static int64_t threads_allowed(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

/* A block that no other run uses; NULL without memory. */
static block *take_block(convoy_net *net, size_t most_threads) {
    pthread_mutex_lock(&net->lock);
    block *found = net->blocks;
    int64_t threads = net->threads;
    if (found) net->blocks = found->next;
    pthread_mutex_unlock(&net->lock);
    if (!found) {
        found = calloc(1, sizeof *found);
        if (!found) return NULL;
        size_t size = (net->memory_bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
        found->memory = aligned_alloc(ALIGNMENT, size);
        found->slots = calloc(net->slot_count, sizeof *found->slots);
        if (!found->memory || !found->slots) {
            free_block(net, found);
            return NULL;
        }
    }
    if (!threads) threads = threads_allowed();
    if (threads > (int64_t)most_threads) threads = (int64_t)most_threads;
    if (threads != found->threads) {
        if (found->pool) net->package.pool_free(found->pool);
        found->pool = net->package.pool_new(threads); /* NULL: this thread does all */
        found->threads = threads;
    }
    return found;
}

static void return_block(convoy_net *net, block *one) {
    pthread_mutex_lock(&net->lock);
    one->next = net->blocks;
    net->blocks = one;
    pthread_mutex_unlock(&net->lock);
}

/* The program that fits a call; NULL, and a status, if none does. */
static const program *checked_program(const convoy_net *net, const convoy_tensor *inputs, size_t input_count, const convoy_tensor *outputs,
                                      size_t output_count, convoy_status *status) {
    if (!net || (!inputs && input_count) || (!outputs && output_count)) {
        *status = fail(CONVOY_INVALID_ARGUMENT, "convoy_run: a pointer is NULL");
        return NULL;
    }
    const program *p = program_for(net, inputs, input_count);
    *status = check_tensors("input", inputs, input_count, p->inputs, p->input_count);
    if (!*status) *status = check_tensors("output", outputs, output_count, p->outputs, p->output_count);
    return *status ? NULL : p;
}

static convoy_status run_on_cpu(convoy_net *net, const program *p, const convoy_tensor *inputs, const convoy_tensor *outputs) {
    block *mine = take_block(net, p->threads);
    if (!mine) return fail(CONVOY_OUT_OF_MEMORY, "convoy_run: no memory for %zu bytes of inner values", net->memory_bytes);
    for (size_t i = 0; i < p->slot_count; i++) {
        const place *at = p->slots + i;
        mine->slots[i] = at->kind == ARENA ? mine->memory + at->offset : (at->kind == INPUT ? inputs : outputs)[at->offset].data;
    }
    mine->slots[p->slot_count] = mine->memory + p->arena_bytes;
    net->package.pool_run(mine->pool, p->launches, (int64_t)p->launch_count, mine->slots);
    for (size_t i = 0; i < p->copy_count; i++)
        memcpy(outputs[p->copies[i].output].data, mine->slots[p->copies[i].slot], p->outputs[p->copies[i].output].size_bytes);
    return_block(net, mine);
    return CONVOY_OK;
}

static convoy_status run_on_gpu(convoy_net *net, const program *p, const convoy_tensor *inputs, const convoy_tensor *outputs,
                                bool stream_given, void *stream) {
    pthread_mutex_lock(&net->lock);
    convoy_status status = cuda_graph_run(p, net->device, inputs, outputs, stream_given, stream);
    pthread_mutex_unlock(&net->lock);
    return status;
}

EXPORTED convoy_status convoy_run(convoy_net *net, const convoy_tensor *inputs, size_t input_count, const convoy_tensor *outputs,
                                  size_t output_count) {
    convoy_status status;
    const program *p = checked_program(net, inputs, input_count, outputs, output_count, &status);
    if (!p) return status;
    return net->device ? run_on_gpu(net, p, inputs, outputs, false, NULL) : run_on_cpu(net, p, inputs, outputs);
}

EXPORTED convoy_status convoy_run_on_stream(convoy_net *net, const convoy_tensor *inputs, size_t input_count, const convoy_tensor *outputs,
                                            size_t output_count, void *stream) {
    convoy_status status;
    const program *p = checked_program(net, inputs, input_count, outputs, output_count, &status);
    if (!p) return status;
    if (!net->device) return fail(CONVOY_INVALID_ARGUMENT, "convoy_run_on_stream: the net runs on a CPU: call convoy_run");
    return run_on_gpu(net, p, inputs, outputs, true, stream);
}
