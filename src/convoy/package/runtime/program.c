/* A program of a package: inputs, outputs, where values lie, and launches, every index checked (docs/reference/package.md). */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define MOST_BYTES ((int64_t)1 << 40)
#define MOST_THREADS 1024

static const char *const DTYPES[] = {"", "fp64", "fp32", "fp16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool"};
static const size_t SIZES[] = {0, 8, 4, 2, 2, 8, 4, 2, 1, 1, 1};

typedef struct {
    program *p;
    const parts *from;
} loader;

bool json_item(const json *list, size_t index, int64_t least, int64_t most, int64_t *value) {
    if (!list || list->kind != JSON_LIST) return false;
    const json *one = list->first;
    while (one && index--) one = one->next;
    if (!one || one->kind != JSON_INTEGER || one->integer < least || one->integer > most) return false;
    *value = one->integer;
    return true;
}

static bool read_tensor(program *p, const json *data, convoy_tensor_info *info) {
    const json *name = json_get(data, "name", JSON_TEXT), *dtype = json_get(data, "dtype", JSON_TEXT);
    const json *shape = json_get(data, "shape", JSON_LIST), *layout = json_get(data, "layout", JSON_TEXT);
    if (!name || !dtype || !shape || !layout || shape->count > 16) return false;
    int64_t *sides = json_take(&p->memory, shape->count, sizeof *sides);
    int64_t elements = 1;
    size_t i = 0;
    if (!sides) return false;
    for (const json *side = shape->first; side; side = side->next) {
        if (side->kind != JSON_INTEGER || side->integer < 0 || side->integer > MOST_BYTES) return false;
        sides[i++] = side->integer;
        if (side->integer && elements > MOST_BYTES / side->integer) return false;
        elements *= side->integer;
    }
    for (int kind = CONVOY_FP64; kind <= CONVOY_BOOL; kind++)
        if (!strcmp(dtype->text, DTYPES[kind])) info->dtype = (convoy_dtype)kind;
    if (!info->dtype) return false;
    info->name = name->text;
    const bool images = !strcmp(layout->text, "nhwc"), volumes = !strcmp(layout->text, "ndhwc");
    info->layout = images || volumes ? CONVOY_CHANNELS_LAST : CONVOY_CONTIGUOUS;
    if ((images && i != 4) || (volumes && i != 5)) return false;
    info->rank = (int32_t)i;
    info->shape = sides;
    info->size_bytes = (size_t)elements * SIZES[info->dtype];
    return true;
}

convoy_tensor_info *read_tensors(program *p, const json *list, size_t *count) {
    convoy_tensor_info *made = list ? json_take(&p->memory, list->count, sizeof *made) : NULL;
    if (!made) return NULL;
    for (const json *one = list->first; one; one = one->next)
        if (!read_tensor(p, one, made + (*count)++)) return NULL;
    return made;
}

static bool read_slots(loader *l, const json *list) {
    program *p = l->p;
    if (!list || !(p->slots = json_take(&p->memory, list->count, sizeof *p->slots))) return false;
    for (const json *one = list->first; one; one = one->next) {
        place *made = p->slots + p->slot_count++;
        int64_t offset, size;
        if (one->kind != JSON_LIST || one->count != 3 || one->first->kind != JSON_TEXT) return false;
        if (!json_item(one, 1, 0, MOST_BYTES, &offset) || !json_item(one, 2, 0, MOST_BYTES, &size)) return false;
        const char *kind = one->first->text;
        made->offset = (size_t)offset;
        made->size = (size_t)size;
        if (!strcmp(kind, "arena")) {
            made->kind = ARENA;
            if (made->offset + made->size > p->arena_bytes) return false;
        } else {
            made->kind = strcmp(kind, "input") ? OUTPUT : INPUT;
            size_t count = made->kind == INPUT ? p->input_count : p->output_count;
            if ((made->kind == OUTPUT && strcmp(kind, "output")) || made->offset >= count) return false;
            const convoy_tensor_info *all = made->kind == INPUT ? p->inputs : p->outputs;
            if (all[made->offset].size_bytes < made->size) return false;
        }
    }
    return true;
}

static bool read_copies(loader *l, const json *list) {
    program *p = l->p;
    if (!list || !(p->copies = json_take(&p->memory, list->count, sizeof *p->copies))) return false;
    for (const json *one = list->first; one; one = one->next) {
        int64_t slot, output;
        if (!json_item(one, 0, 0, (int64_t)p->slot_count - 1, &slot)) return false;
        if (!json_item(one, 1, 0, (int64_t)p->output_count - 1, &output)) return false;
        if (p->slots[slot].size != p->outputs[output].size_bytes) return false;
        p->copies[p->copy_count++] = (final_copy){(size_t)slot, (size_t)output};
    }
    return true;
}

static int by_name(const void *a, const void *b) { return strcmp(((const weight *)a)->name, ((const weight *)b)->name); }

const weight *find_weight(const parts *from, const char *name) {
    weight wanted = {name, NULL, 0};
    return bsearch(&wanted, from->weights, from->weight_count, sizeof wanted, by_name);
}

/* Where a pointer of a launch comes from. */
static bool read_operand(loader *l, const json *step, const json *data, operand *made) {
    *made = (operand){NULL, -1};
    if (data->kind == JSON_NULL) return true;
    int64_t index;
    if (data->kind != JSON_LIST || data->count != 2 || data->first->kind != JSON_TEXT) return false;
    if (!json_item(data, 1, 0, 1 << 20, &index)) return false;
    const char *kind = data->first->text;
    if (!strcmp(kind, "workspace")) {
        made->slot = (int64_t)l->p->slot_count;
        return true;
    }
    if (!strcmp(kind, "constant")) {
        const json *names = json_get(step, "constants", JSON_LIST), *name = names ? names->first : NULL;
        while (name && index--) name = name->next;
        if (!name || name->kind != JSON_TEXT) return false;
        const weight *found = find_weight(l->from, name->text);
        if (found) made->fixed = found->data;
        return found;
    }
    bool is_arg = !strcmp(kind, "arg");
    if (!is_arg && strcmp(kind, "result")) return false;
    return json_item(json_get(step, is_arg ? "args" : "results", JSON_LIST), (size_t)index, 0, (int64_t)l->p->slot_count - 1, &made->slot);
}

static bool read_launch(loader *l, const json *step, const json *data, launch *made) {
    const json *words = json_get(data, "settings", JSON_LIST), *calls = json_get(data, "calls", JSON_LIST);
    const json *tensors = json_get(data, "tensors", JSON_LIST);
    int64_t number, word, most = (int64_t)l->from->kernel_count - 1;
    if (!words || !calls || !tensors || tensors->count > MOST_TENSORS) return false;
    if (!json_count(data, "kernel", most, &number)) return false;
    int64_t *settings = json_take(&l->p->memory, words->count, sizeof *settings);
    operand *operands = json_take(&l->p->memory, tensors->count, sizeof *operands);
    if (!settings || !operands) return false;
    size_t i = 0;
    for (const json *one = words->first; one; one = one->next) {
        if (one->kind != JSON_INTEGER) return false;
        settings[i++] = one->integer;
    }
    *made = (launch){l->from->kernels[number], settings, operands, (int64_t)tensors->count};
    for (const json *one = calls->first; one; one = one->next) {
        if (!json_item(one, 0, 0, (int64_t)words->count - 1, &word) || !json_item(one, 1, 0, most, &number)) return false;
        settings[word] = (int64_t)(intptr_t)l->from->kernels[number];
    }
    i = 0;
    for (const json *one = tensors->first; one; one = one->next)
        if (!read_operand(l, step, one, operands + i++)) return false;
    return true;
}

static bool read_steps(loader *l, const json *list) {
    program *p = l->p;
    if (!list || !(p->launches = json_take(&p->memory, list->count, sizeof *p->launches))) return false;
    for (const json *step = list->first; step; step = step->next) {
        const json *data = json_get(step, "launch", JSON_OBJECT);
        if (!data || !read_launch(l, step, data, p->launches + p->launch_count++)) return false;
    }
    return true;
}

convoy_status program_load(program *p, const parts *from, const char *member_name) {
    const member *file = archive_find(from->files, member_name);
    const json *data = file ? json_parse(file->data, file->size, &p->memory) : NULL;
    loader l = {p, from};
    int64_t arena, workspace, threads;
    if (!data) return fail(CONVOY_DAMAGED, "%s: no program", member_name);
    bool right = json_count(data, "arena_bytes", MOST_BYTES, &arena) && json_count(data, "threads", MOST_THREADS, &threads) &&
                 json_count(data, "workspace_bytes", MOST_BYTES, &workspace);
    if (right) {
        p->arena_bytes = (size_t)arena;
        p->workspace_bytes = (size_t)workspace;
        p->threads = (size_t)threads;
        right = (p->inputs = read_tensors(p, json_get(data, "inputs", JSON_LIST), &p->input_count)) &&
                (p->outputs = read_tensors(p, json_get(data, "outputs", JSON_LIST), &p->output_count)) &&
                read_slots(&l, json_get(data, "slots", JSON_LIST)) && read_copies(&l, json_get(data, "copies", JSON_LIST)) &&
                read_steps(&l, json_get(data, "steps", JSON_LIST));
    }
    return right ? CONVOY_OK : fail(CONVOY_DAMAGED, "%s: a field is missing or wrong; export the package again", member_name);
}
