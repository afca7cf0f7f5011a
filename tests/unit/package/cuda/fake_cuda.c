/* A CUDA driver for tests without a GPU: memory is the host's, and a launch runs a C function of the kernel's name.
 *
 * It checks what it is given (addresses within allocations, contexts that are current, nodes of the graph) and counts what is alive.
 * FAKE_CUDA_FAIL names a function that fails. `fake_cuda_*` are for the tests. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef unsigned long long address;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500, UNKNOWN = 999, MOST = 4096 };

static struct {
    char *begin;
    size_t size;
} memory[MOST];
static int contexts, modules, graphs, execs, streams, events, depth, device_major = 9, device_minor = 0, version = 13000;
static unsigned long long device_bytes = 1ull << 40, used;

static result failing(const char *name) {
    const char *wanted = getenv("FAKE_CUDA_FAIL");
    return wanted && !strcmp(wanted, name) ? UNKNOWN : OK;
}
#define MAY_FAIL                       \
    if (failing(__func__)) return UNKNOWN; \
    if (!depth) return INVALID /* no context is current */

int fake_cuda_depth(void) { return depth; }
int fake_cuda_alive(void) {
    int count = contexts + modules + graphs + execs + streams + events;
    for (int i = 0; i < MOST; i++) count += memory[i].begin != NULL;
    return count;
}
static int anywhere; /* PyTorch's CPU memory counts as the device's */
static int inside(address at, size_t size) {
    if (anywhere) return 1;
    for (int i = 0; i < MOST; i++)
        if (memory[i].begin && (char *)at >= memory[i].begin && (char *)at + size <= memory[i].begin + memory[i].size) return 1;
    return 0;
}

/* --- the device ------------------------------------------------------------------------------------------------------------ */

result cuInit(unsigned flags) { return flags ? INVALID : failing("cuInit"); }
result cuGetErrorName(result error, const char **name) {
    *name = error == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == INVALID ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
    return OK;
}
result cuDriverGetVersion(int *found) { return *found = version, failing("cuDriverGetVersion"); }
result cuDeviceGet(int *device, int index) { return *device = index, failing("cuDeviceGet"); }
result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? device_major : attribute == 76 ? device_minor : 0;
    return device ? INVALID : OK;
}
result cuDevicePrimaryCtxRetain(void **context, int device) {
    if (failing("cuDevicePrimaryCtxRetain")) return UNKNOWN;
    *context = &contexts;
    contexts++;
    return device ? INVALID : OK;
}
result cuDevicePrimaryCtxRelease_v2(int device) { return contexts--, device ? INVALID : OK; }
result cuCtxGetCurrent(void **context) { return *context = depth ? &contexts : NULL, OK; }
result cuCtxGetDevice(int *device) { return *device = 0, OK; }
result cuCtxPushCurrent_v2(void *context) { return depth++, context == &contexts ? OK : INVALID; }
result cuCtxPopCurrent_v2(void **context) { return *context = &contexts, depth-- > 0 ? OK : INVALID; }
void fake_cuda_enter(void) { depth++, anywhere = 1; }

/* --- memory, streams, events ------------------------------------------------------------------------------------------------- */

result cuMemAlloc_v2(address *made, size_t size) {
    MAY_FAIL;
    if (!size) return INVALID;
    if (used + size > device_bytes) return NO_MEMORY;
    for (int i = 0; i < MOST; i++)
        if (!memory[i].begin) {
            memory[i].begin = aligned_alloc(512, (size + 511) / 512 * 512);
            memory[i].size = size;
            memset(memory[i].begin, 0xa5, size);
            used += size;
            return *made = (address)memory[i].begin, OK;
        }
    return NO_MEMORY;
}
result cuMemFree_v2(address at) {
    for (int i = 0; i < MOST; i++)
        if (memory[i].begin && memory[i].begin == (char *)at) {
            used -= memory[i].size;
            free(memory[i].begin);
            memory[i].begin = NULL;
            return OK;
        }
    return INVALID;
}
result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream) {
    MAY_FAIL;
    return (void)stream, inside(to, size) ? (memcpy((void *)to, from, size), OK) : INVALID;
}
result cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, void *stream) {
    MAY_FAIL;
    return (void)stream, inside(from, size) ? (memcpy(to, (void *)from, size), OK) : INVALID;
}
result cuMemcpyDtoDAsync_v2(address to, address from, size_t size, void *stream) {
    MAY_FAIL;
    return (void)stream, inside(from, size) && inside(to, size) ? (memmove((void *)to, (void *)from, size), OK) : INVALID;
}
result cuStreamCreate(void **stream, unsigned flags) {
    MAY_FAIL;
    return *stream = &streams, streams++, flags ? INVALID : OK;
}
result cuStreamDestroy_v2(void *stream) { return (void)stream, streams--, OK; }
result cuStreamSynchronize(void *stream) {
    MAY_FAIL;
    return (void)stream, OK;
}
result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    MAY_FAIL;
    return (void)stream, (void)flags, event == &events ? OK : INVALID;
}
result cuEventCreate(void **event, unsigned flags) {
    MAY_FAIL;
    return (void)flags, *event = &events, events++, OK;
}
result cuEventDestroy_v2(void *event) { return (void)event, events--, OK; }
result cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, OK; }
result cuEventSynchronize(void *event) { return (void)event, OK; }

/* --- kernels ----------------------------------------------------------------------------------------------------------------- */

typedef struct {
    void (*run)(void **arguments);
    int count, sizes[8], shared, large;
} function;

/* y[i] = w[i mod 8] x[i] + shift */
static void affine(void **a) {
    const float *x = *(float **)a[0], *w = *(float **)a[1], shift = *(float *)a[4];
    float *y = *(float **)a[2];
    for (int i = 0; i < *(int *)a[3]; i++) y[i] = w[i % 8] * x[i] + shift;
}
/* Doubles n values of the tensor of a tensor map in place: its address is the first word. */
static void doubled(void **a) {
    float *x = **(float ***)a;
    for (int i = 0; i < *(int *)a[1]; i++) x[i] *= 2;
}
static function AFFINE = {affine, 5, {8, 8, 8, 4, 4}, 0, 0}, DOUBLED = {doubled, 2, {128, 4}, 0, 0};

void fake_cuda_device(int major, int minor, int driver, unsigned long long bytes) {
    device_major = major, device_minor = minor, version = driver, device_bytes = bytes;
    AFFINE.shared = DOUBLED.shared = 0;
}

result cuModuleLoadData(void **module, const void *image) {
    MAY_FAIL;
    if (memcmp(image, "fake cubin", 10)) return INVALID;
    return *module = &modules, modules++, OK;
}
result cuModuleUnload(void *module) { return (void)module, modules--, OK; }
result cuModuleGetFunction(function **found, void *module, const char *name) {
    MAY_FAIL;
    *found = !strcmp(name, "affine") ? &AFFINE : !strcmp(name, "doubled") ? &DOUBLED : NULL;
    return module == &modules && *found ? OK : NOT_FOUND;
}
result cuFuncGetAttribute(int *value, int attribute, function *f) { return *value = attribute == 8 ? f->shared : 0, OK; }
result cuFuncSetAttribute(function *f, int attribute, int value) {
    if (attribute == 8) f->shared = value;
    if (attribute == 14) f->large = value;
    return failing("cuFuncSetAttribute");
}
result cuTensorMapReplaceAddress(void *map, void *to) {
    if ((!anywhere && (uintptr_t)map % 64) || (uintptr_t)to % 16) return INVALID;
    return memcpy(map, &to, sizeof to), failing("cuTensorMapReplaceAddress");
}

/* --- graphs ------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    function *f;
    int (*work)(address *operands); /* a library's kernel */
    address operands[8];
    char arguments[8][128];
    address to, from;
    size_t size;
    unsigned value, each;
    int cluster;
} node;
typedef struct {
    node nodes[64];
    int count, edges[256][3], edge_count;
} graph;

static node *add(graph *g, node **made) { return *made = g->nodes + g->count++; }

result cuGraphCreate(graph **made, unsigned flags) {
    MAY_FAIL;
    return *made = calloc(1, sizeof **made), graphs++, flags ? INVALID : OK;
}
result cuGraphDestroy(graph *g) { return free(g), graphs--, OK; }

typedef struct {
    function *f;
    unsigned grid[3], block[3], shared;
    void **arguments, **extra, *kernel, *context;
} kernel_params;
result cuGraphAddKernelNode_v2(node **made, graph *g, void *after, size_t count, const kernel_params *p) {
    MAY_FAIL;
    if (after || count || !p->grid[0] || !p->block[0] || (int)p->shared > p->f->shared + 49152) return INVALID;
    node *n = add(g, made);
    n->f = p->f;
    for (int i = 0; i < p->f->count; i++) memcpy(n->arguments[i], p->arguments[i], (size_t)p->f->sizes[i]);
    return OK;
}
/* Work of a library on a stream: done at once, or a node of the graph that is being captured. The last operand is no address. */
static graph *capturing;
result fake_cuda_library(int (*work)(address *), const address *operands, int count) {
    node n = {.work = work}, *made;
    memcpy(n.operands, operands, (size_t)count * sizeof *operands);
    for (int i = 0; i < count - 1; i++)
        if (operands[i] && !inside(operands[i], 1)) return INVALID;
    if (!capturing) return work(n.operands) ? INVALID : OK;
    return *add(capturing, &made) = n, OK;
}
result cuStreamBeginCapture_v2(void *stream, int mode) {
    MAY_FAIL;
    if (capturing || mode != 1) return INVALID;
    return (void)stream, cuGraphCreate((void **)&capturing, 0);
}
result cuStreamEndCapture(void *stream, graph **made) {
    *made = capturing, capturing = NULL;
    if (*made && failing("cuStreamEndCapture")) return cuGraphDestroy(*made), *made = NULL, UNKNOWN;
    return (void)stream, *made ? OK : INVALID;
}
/* A graph of one node counts as that node. */
result cuGraphAddChildGraphNode(node **made, graph *g, void *after, size_t count, graph *child) {
    MAY_FAIL;
    if (after || count || child->count != 1) return INVALID;
    return *add(g, made) = child->nodes[0], OK;
}

typedef struct {
    size_t x, y, z, level;
    int kind;
    void *host;
    address device;
    void *array, *reserved;
    size_t pitch, height;
} side;
typedef struct {
    side from, to;
    size_t width, height, depth;
} copy_params;
result cuGraphAddMemcpyNode(node **made, graph *g, void *after, size_t count, const copy_params *p, void *context) {
    MAY_FAIL;
    if (after || count || p->from.kind != 2 || p->to.kind != 2 || p->height != 1 || p->depth != 1 || context != &contexts) return INVALID;
    node *n = add(g, made);
    n->to = p->to.device, n->from = p->from.device, n->size = p->width;
    return OK;
}
typedef struct {
    address to;
    size_t pitch;
    unsigned value, each;
    size_t width, height;
} fill_params;
result cuGraphAddMemsetNode(node **made, graph *g, void *after, size_t count, const fill_params *p, void *context) {
    MAY_FAIL;
    if (after || count || p->height != 1 || context != &contexts) return INVALID;
    node *n = add(g, made);
    n->to = p->to, n->value = p->value, n->each = p->each, n->size = p->width;
    return OK;
}
result cuGraphAddEmptyNode(node **made, graph *g, void *after, size_t count) {
    MAY_FAIL;
    return (void)after, add(g, made), count ? INVALID : OK;
}
result cuGraphAddDependencies_v2(graph *g, node **from, node **to, const unsigned char (*data)[8], size_t count) {
    MAY_FAIL;
    for (size_t i = 1; i < count; i++)
        if (memcmp(data[i], data[0], 8)) return INVALID; /* a driver gives all edges of a call the kind of the first */
    for (size_t i = 0; i < count; i++) {
        int *edge = g->edges[g->edge_count++];
        edge[0] = (int)(from[i] - g->nodes), edge[1] = (int)(to[i] - g->nodes), edge[2] = data[i][2];
        if (edge[2] && (edge[2] != 1 || data[i][0] != 1 || !from[i]->f || !to[i]->f)) return INVALID;
    }
    return OK;
}
result cuGraphKernelNodeSetAttribute(node *n, int attribute, const unsigned *value) {
    MAY_FAIL;
    return attribute == 4 ? (n->cluster = (int)(value[0] * value[1] * value[2]), OK) : INVALID;
}
result cuGraphInstantiateWithFlags(graph **made, graph *g, unsigned long long flags) {
    MAY_FAIL;
    return *made = malloc(sizeof **made), memcpy(*made, g, sizeof **made), execs++, flags ? INVALID : OK;
}
result cuGraphExecDestroy(graph *g) { return free(g), execs--, OK; }

static result run(node *n) {
    void *arguments[8];
    for (int i = 0; i < 8; i++) arguments[i] = n->arguments[i];
    if (n->work) return n->work(n->operands) ? INVALID : OK;
    if (n->f)
        n->f->run(arguments);
    else if (n->from)
        return inside(n->to, n->size) && inside(n->from, n->size) ? (memmove((void *)n->to, (void *)n->from, n->size), OK) : INVALID;
    else if (n->to)
        for (size_t i = 0; i < n->size; i++) memcpy((char *)n->to + i * n->each, &n->value, n->each);
    return OK;
}
/* Nodes in the reverse of the order in which they were added, as far as edges allow: an edge that is missing shows. */
result cuGraphLaunch(graph *g, void *stream) {
    MAY_FAIL;
    char done[64] = {0};
    (void)stream;
    for (int left = g->count; left; left--) {
        int next = -1;
        for (int i = g->count - 1; i >= 0 && next < 0; i--) {
            int ready = !done[i];
            for (int e = 0; e < g->edge_count; e++) ready &= g->edges[e][1] != i || done[g->edges[e][0]];
            if (ready) next = i;
        }
        if (next < 0 || run(g->nodes + next)) return INVALID;
        done[next] = 1;
    }
    return OK;
}

/* How cuda-bindings finds the functions: names without the endings that headers add. */
result cuGetProcAddress_v2(const char *name, void **found, int cuda, uint64_t flags, int *status) {
    char versioned[128];
    (void)cuda, (void)flags;
    static const char *const NEW[] = {"cuMemAlloc", "cuMemFree", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuGraphAddKernelNode",
                                      "cuGraphAddDependencies", "cuGetProcAddress", "cuGraphInstantiate", "cuDevicePrimaryCtxRelease",
                                      "cuStreamBeginCapture", "cuStreamDestroy"};
    strncpy(versioned, name, 100);
    for (size_t i = 0; i < sizeof NEW / sizeof *NEW; i++)
        if (!strcmp(name, NEW[i])) strcat(versioned, strcmp(name, "cuGraphInstantiate") ? "_v2" : "WithFlags");
    Dl_info own;
    dladdr((void *)cuInit, &own);
    void *self = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *found = dlsym(self, versioned);
    dlclose(self);
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
