/* A program of a package for a GPU: a recorded CUDA graph, built anew with the addresses that its memory has here. */
#include "cudnn.h"

#include <stdlib.h>
#include <string.h>

#define MOST_BYTES ((int64_t)1 << 40)
#define MOST_ARGUMENTS 256
#define MOST_ARGUMENT_BYTES 4096
#define PORTABLE_CLUSTER 8 /* thread blocks, on every device of capability 9.0 or newer */

typedef struct {
    program *p;
    cuda_device *device;
    const parts *from;
    const char *name;
} loader;

static convoy_status wrong(const loader *l, const char *what) {
    return fail(CONVOY_DAMAGED, "%s: %s is missing or wrong; export the package again", l->name, what);
}

/* --- memory ---------------------------------------------------------------------------------------------------------------- */

/* Memory with the values of a constant; several programs and blocks may have it. */
static convoy_status constant_memory(loader *l, const weight *values, cu_address *address) {
    cuda_device *d = l->device;
    for (size_t i = 0; i < d->constant_count; i++)
        if (d->constants[i].values == values) {
            *address = d->constants[i].address;
            return CONVOY_OK;
        }
    convoy_status status = cuda_checked(d, d->call.memory_allocate(address, values->size), "memory for weights");
    if (status) return status;
    d->constants[d->constant_count++] = (cuda_constant){values, *address};
    status = cuda_checked(d, d->call.copy_in(*address, values->data, values->size, d->stream), "a copy of weights");
    return status ? status : cuda_checked(d, d->call.stream_synchronize(d->stream), "a copy of weights");
}

static convoy_status read_blocks(loader *l, const json *list) {
    cuda_graph *g = l->p->graph;
    if (!list || !(g->blocks = json_take(&l->p->memory, list->count + 1, sizeof *g->blocks))) return wrong(l, "blocks");
    for (const json *one = list->first; one; one = one->next) {
        const json *constant = json_get(one, "constant", JSON_TEXT);
        int64_t size;
        if (!constant || !json_count(one, "size_bytes", MOST_BYTES, &size) || !size) return wrong(l, "a block");
        cuda_block *block = g->blocks + g->block_count;
        convoy_status status;
        if (*constant->text) {
            const weight *values = find_weight(l->from, constant->text);
            if (!values || values->size != (size_t)size) return wrong(l, "a constant");
            status = constant_memory(l, values, &block->address);
        } else {
            status = cuda_checked(l->device, l->device->call.memory_allocate(&block->address, (size_t)size), "memory for inner values");
            block->owned = !status;
        }
        if (status) return status;
        block->size = (size_t)size;
        g->block_count++;
    }
    return CONVOY_OK;
}

/* The address of a place: a list of a block and an offset, from its `first` item on. */
static bool address_of(const loader *l, const json *place, size_t first, size_t size, cu_address *address) {
    const cuda_graph *g = l->p->graph;
    int64_t block, offset;
    if (!json_item(place, first, 0, (int64_t)g->block_count - 1, &block)) return false;
    if (!json_item(place, first + 1, 0, MOST_BYTES, &offset) || (uint64_t)offset + size > g->blocks[block].size) return false;
    *address = g->blocks[block].address + (cu_address)offset;
    return true;
}

static convoy_status read_places(loader *l, const json *list) {
    program *p = l->p;
    size_t count = p->input_count + p->output_count, i = 0;
    if (!list || list->count != count) return wrong(l, "places");
    p->graph->places = json_take(&p->memory, count + 1, sizeof *p->graph->places);
    if (!p->graph->places) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", l->name);
    for (const json *one = list->first; one; one = one->next, i++) {
        const convoy_tensor_info *info = i < p->input_count ? p->inputs + i : p->outputs + (i - p->input_count);
        if (!address_of(l, one, 0, info->size_bytes, p->graph->places + i)) return wrong(l, "a place");
    }
    return CONVOY_OK;
}

/* --- kernels --------------------------------------------------------------------------------------------------------------- */

static int hex(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

/* An argument: bytes in hex digits, the addresses in it, and whether it is a tensor map. */
static convoy_status read_argument(loader *l, const json *data, void **argument) {
    if (data->kind != JSON_LIST || data->count != 3 || data->first->kind != JSON_TEXT) return wrong(l, "an argument");
    const char *text = data->first->text;
    size_t size = strlen(text) / 2;
    const json *marks = data->first->next;
    int64_t is_map, at;
    if (!size || size > MOST_ARGUMENT_BYTES || marks->kind != JSON_LIST || !json_item(data, 2, 0, 1, &is_map)) return wrong(l, "an argument");
    uint8_t *raw = json_take(&l->p->memory, size + 64, 1);
    if (!raw) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", l->name);
    uint8_t *bytes = raw + (64 - (uintptr_t)raw % 64) % 64; /* as tensor maps want it */
    for (size_t i = 0; i < size; i++) {
        int high = hex(text[2 * i]), low = hex(text[2 * i + 1]);
        if (high < 0 || low < 0) return wrong(l, "an argument");
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    if (is_map && (size != sizeof(cu_tensor_map) || marks->count != 1)) return wrong(l, "a tensor map");
    for (const json *mark = marks->first; mark; mark = mark->next) {
        cu_address address;
        if (!json_item(mark, 0, 0, (int64_t)size - 8, &at) || !address_of(l, mark, 1, 1, &address)) return wrong(l, "an address");
        if (!is_map)
            memcpy(bytes + at, &address, sizeof address);
        else {
            convoy_status status = cuda_checked(l->device, l->device->call.map_address((cu_tensor_map *)bytes, (void *)(uintptr_t)address), "a tensor map");
            if (status) return status;
        }
    }
    *argument = bytes;
    return CONVOY_OK;
}

static bool read_three(const json *node, const char *key, int64_t most, unsigned sizes[3]) {
    const json *list = json_get(node, key, JSON_LIST);
    int64_t value;
    for (size_t i = 0; i < 3; i++) {
        if (!json_item(list, i, 1, most, &value)) return false;
        sizes[i] = (unsigned)value;
    }
    return true;
}

/* Let a function have the shared memory and the clusters of a launch. */
static convoy_status allow(const cuda_device *d, cu_function function, int shared, unsigned cluster) {
    int now = 0;
    convoy_status status = cuda_checked(d, d->call.function_get(&now, CU_MOST_DYNAMIC_SHARED, function), "a kernel");
    if (!status && now < shared) status = cuda_checked(d, d->call.function_set(function, CU_MOST_DYNAMIC_SHARED, shared), "shared memory");
    if (!status && cluster > PORTABLE_CLUSTER) status = cuda_checked(d, d->call.function_set(function, CU_LARGE_CLUSTERS, 1), "clusters");
    return status;
}

static convoy_status add_kernel(loader *l, cu_graph graph, const json *data, cu_node *node) {
    const cuda_device *d = l->device;
    const json *arguments = json_get(data, "arguments", JSON_LIST);
    unsigned grid[3], block[3], cluster[3];
    void *pointers[MOST_ARGUMENTS];
    int64_t kernel, shared;
    size_t count = 0;
    convoy_status status;
    if (!arguments || arguments->count > MOST_ARGUMENTS || !json_count(data, "kernel", (int64_t)d->function_count - 1, &kernel) ||
        !json_count(data, "shared_bytes", 1 << 20, &shared) || !read_three(data, "grid", INT32_MAX, grid) ||
        !read_three(data, "block", 1024, block) || !read_three(data, "cluster", 16, cluster))
        return wrong(l, "a kernel");
    for (const json *one = arguments->first; one; one = one->next)
        if ((status = read_argument(l, one, pointers + count++))) return status;
    cu_function function = d->functions[kernel];
    if ((status = allow(d, function, (int)shared, cluster[0] * cluster[1] * cluster[2]))) return status;
    const cu_kernel_params params = {function, grid[0],  grid[1],          grid[2],  block[0], block[1],
                                     block[2], (unsigned)shared, pointers, NULL,     NULL,     NULL};
    if ((status = cuda_checked(d, d->call.graph_kernel(node, graph, NULL, 0, &params), "a kernel"))) return status;
    if (cluster[0] * cluster[1] * cluster[2] == 1) return CONVOY_OK;
    const cu_attribute_value value = {.cluster = {cluster[0], cluster[1], cluster[2]}};
    return cuda_checked(d, d->call.node_attribute(*node, CU_CLUSTER, &value), "clusters");
}

/* --- the graph ------------------------------------------------------------------------------------------------------------- */

static convoy_status add_copy(loader *l, cu_graph graph, const json *data, cu_node *node) {
    cu_copy_params copy = {.height = 1, .depth = 1};
    int64_t size;
    if (!json_count(data, "size_bytes", MOST_BYTES, &size)) return wrong(l, "a copy");
    copy.source.memory_type = copy.target.memory_type = CU_MEMORY_DEVICE;
    copy.width_bytes = (size_t)size;
    if (!address_of(l, json_get(data, "source", JSON_LIST), 0, (size_t)size, &copy.source.device) ||
        !address_of(l, json_get(data, "target", JSON_LIST), 0, (size_t)size, &copy.target.device))
        return wrong(l, "a copy");
    return cuda_checked(l->device, l->device->call.graph_copy(node, graph, NULL, 0, &copy, l->device->context), "a copy");
}

static convoy_status add_fill(loader *l, cu_graph graph, const json *data, cu_node *node) {
    cu_fill_params fill = {.height = 1};
    int64_t value, each, count;
    if (!json_count(data, "value", UINT32_MAX, &value) || !json_count(data, "element_bytes", 4, &each) || each < 1 || each == 3 ||
        !json_count(data, "count", MOST_BYTES, &count) ||
        !address_of(l, json_get(data, "target", JSON_LIST), 0, (size_t)(each * count), &fill.target))
        return wrong(l, "a fill");
    fill.value = (unsigned)value;
    fill.element_bytes = (unsigned)each;
    fill.width = (size_t)count;
    fill.pitch = (size_t)(each * count);
    return cuda_checked(l->device, l->device->call.graph_fill(node, graph, NULL, 0, &fill, l->device->context), "a fill");
}

static convoy_status add_cudnn(loader *l, cu_graph graph, const json *data, cu_node *node) {
    const json *plan = json_get(data, "plan", JSON_TEXT), *operands = json_get(data, "operands", JSON_LIST);
    const member *text = plan ? archive_find(l->from->files, plan->text) : NULL;
    cudnn_operands run = {.count = 0};
    cu_address address;
    int64_t size;
    if (!text || !operands || operands->count > CUDNN_MOST_OPERANDS || !json_count(data, "workspace_bytes", MOST_BYTES, &size))
        return wrong(l, "a run of cuDNN");
    for (const json *one = operands->first; one; one = one->next, run.count++) {
        if (!json_item(one, 0, 0, INT32_MAX, run.uids + run.count) || !address_of(l, one, 1, 1, &address)) return wrong(l, "an operand");
        run.pointers[run.count] = (void *)(uintptr_t)address;
    }
    if (size) {
        if (!address_of(l, json_get(data, "workspace", JSON_LIST), 0, (size_t)size, &address)) return wrong(l, "a workspace");
        run.workspace = (void *)(uintptr_t)address;
    }
    return cudnn_add(l->device, graph, text, &run, node);
}

static convoy_status add_nodes(loader *l, cu_graph graph, const json *list, cu_node *nodes) {
    convoy_status status = CONVOY_OK;
    for (const json *one = list->first; one && !status; one = one->next, nodes++) {
        const json *kind = json_get(one, "kind", JSON_TEXT);
        const char *word = kind ? kind->text : "";
        if (!strcmp(word, "kernel"))
            status = add_kernel(l, graph, one, nodes);
        else if (!strcmp(word, "copy"))
            status = add_copy(l, graph, one, nodes);
        else if (!strcmp(word, "fill"))
            status = add_fill(l, graph, one, nodes);
        else if (!strcmp(word, "cudnn"))
            status = add_cudnn(l, graph, one, nodes);
        else if (!strcmp(word, "join"))
            status = cuda_checked(l->device, l->device->call.graph_empty(nodes, graph, NULL, 0), "a node");
        else
            status = wrong(l, "a node");
    }
    return status;
}

/* Edges are added one at a time: the driver gave edges of one call the kind of the first (580.159, measured on an H100). */
static convoy_status add_edges(loader *l, cu_graph graph, const json *list, const cu_node *nodes, size_t node_count) {
    convoy_status status = CONVOY_OK;
    for (const json *one = list->first; one && !status; one = one->next) {
        int64_t before, after, programmatic, last = (int64_t)node_count - 1;
        if (!json_item(one, 0, 0, last, &before) || !json_item(one, 1, 0, last, &after) || !json_item(one, 2, 0, 1, &programmatic))
            return wrong(l, "an edge");
        cu_edge kind = {0};
        if (programmatic) kind.from_port = kind.type = CU_PROGRAMMATIC;
        cu_result error = l->device->call.graph_edges(graph, nodes + before, nodes + after, &kind, 1);
        status = cuda_checked(l->device, error, "the graph's edges");
    }
    return status;
}

static convoy_status build(loader *l, const json *data) {
    const cuda_device *d = l->device;
    const json *nodes = json_get(data, "nodes", JSON_LIST), *edges = json_get(data, "edges", JSON_LIST);
    cu_node *made = nodes ? json_take(&l->p->memory, nodes->count + 1, sizeof *made) : NULL;
    cu_graph graph;
    if (!made || !edges) return wrong(l, "its graph");
    convoy_status status = cuda_checked(d, d->call.graph_create(&graph, 0), "a graph");
    if (status) return status;
    if (!(status = add_nodes(l, graph, nodes, made)) && !(status = add_edges(l, graph, edges, made, nodes->count)))
        status = cuda_checked(d, d->call.graph_instantiate(&l->p->graph->exec, graph, 0), "the graph");
    d->call.graph_destroy(graph);
    return status;
}

convoy_status cuda_graph_load(program *p, cuda_device *device, const parts *from, const char *member_name) {
    const member *file = archive_find(from->files, member_name);
    const json *data = file ? json_parse(file->data, file->size, &p->memory) : NULL;
    loader l = {p, device, from, member_name};
    convoy_status status;
    cu_context popped;
    if (!data) return wrong(&l, "its program");
    p->graph = json_take(&p->memory, 1, sizeof *p->graph);
    if (!p->graph) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", member_name);
    if (!(p->inputs = read_tensors(p, json_get(data, "inputs", JSON_LIST), &p->input_count)) ||
        !(p->outputs = read_tensors(p, json_get(data, "outputs", JSON_LIST), &p->output_count)))
        return wrong(&l, "a tensor");
    if ((status = cuda_checked(device, device->call.context_push(device->context), "its context"))) return status;
    if (!(status = read_blocks(&l, json_get(data, "blocks", JSON_LIST))) && !(status = read_places(&l, json_get(data, "places", JSON_LIST))))
        status = build(&l, data);
    device->call.context_pop(&popped);
    return status;
}

void cuda_graph_close(program *p, cuda_device *device) {
    cuda_graph *g = p->graph;
    cu_context popped;
    if (!g || device->call.context_push(device->context)) return;
    if (device->has_run) device->call.event_synchronize(device->done);
    if (g->exec) device->call.exec_destroy(g->exec);
    for (size_t i = 0; i < g->block_count; i++)
        if (g->blocks[i].owned) device->call.memory_free(g->blocks[i].address);
    device->call.context_pop(&popped);
}
