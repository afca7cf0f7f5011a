/* Runs of cuDNN's execution plans: each plan is read from its text once, and each of its runs is captured as a part of a graph. */
#include "cudnn.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const member *text;
    cudnn_descriptor plan;
} known_plan;

struct cudnn {
    cudnn_functions call;
    cudnn_handle handle;
    known_plan *plans;
    size_t plan_count;
};

static convoy_status checked(const cuda_device *d, cudnn_result error, const char *what) {
    if (!error) return CONVOY_OK;
    return fail(CONVOY_GPU_FAILED, "%s: cuDNN refused %s: %s", d->path, what, d->cudnn->call.error_text(error));
}

static convoy_status load(const cuda_device *d, cudnn_functions *call) {
    /* Never unloaded: its threads and its own libraries may outlive the last net. */
    void *library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) return fail(CONVOY_OTHER_MACHINE, "%s: it needs cuDNN 9, which cannot be opened: %s", d->path, dlerror());
    struct {
        const char *symbol;
        void *to;
    } functions[] = {
#define CUDNN_ENTRY(name, result, symbol, arguments) {symbol, &call->name},
        CUDNN_FUNCTIONS(CUDNN_ENTRY)
#undef CUDNN_ENTRY
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(library, functions[i].symbol);
        if (!found) return fail(CONVOY_OTHER_MACHINE, "%s: cuDNN lacks %s: update it", d->path, functions[i].symbol);
        memcpy(functions[i].to, &found, sizeof found); /* ISO C has no cast between them */
    }
    return CONVOY_OK;
}

convoy_status cudnn_open(cuda_device *d, int64_t version) {
    struct cudnn *c = d->cudnn = calloc(1, sizeof *c);
    if (!c) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", d->path);
    convoy_status status = load(d, &c->call);
    if (status) return status;
    int64_t here = (int64_t)c->call.version();
    if (here / 100 != version / 100)
        return fail(CONVOY_OTHER_MACHINE, "%s: it has plans of cuDNN %d.%d, this one is %d.%d", d->path, (int)(version / 10000),
                    (int)(version / 100 % 100), (int)(here / 10000), (int)(here / 100 % 100));
    return checked(d, c->call.create(&c->handle), "a handle");
}

/* The plan of a text: made once for all of its runs. */
static convoy_status plan_of(cuda_device *d, const member *text, cudnn_descriptor *plan) {
    struct cudnn *c = d->cudnn;
    for (size_t i = 0; i < c->plan_count; i++)
        if (c->plans[i].text == text) {
            *plan = c->plans[i].plan;
            return CONVOY_OK;
        }
    known_plan *grown = realloc(c->plans, (c->plan_count + 1) * sizeof *grown);
    if (!grown) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory for plans", d->path);
    c->plans = grown;
    convoy_status status = checked(d, c->call.make(CUDNN_EXECUTION_PLAN, plan), "a plan");
    if (status) return status;
    c->plans[c->plan_count++] = (known_plan){text, *plan};
    if ((status = checked(d, c->call.set(*plan, CUDNN_PLAN_TEXT, CUDNN_CHARS, (int64_t)text->size, text->data), "a plan's text")) ||
        (status = checked(d, c->call.set(*plan, CUDNN_PLAN_HANDLE, CUDNN_HANDLES, 1, &c->handle), "a plan's handle")))
        return status;
    return checked(d, c->call.finalize(*plan), "a plan");
}

static convoy_status fill_pack(const cuda_device *d, cudnn_descriptor pack, const cudnn_operands *operands) {
    const cudnn_functions *call = &d->cudnn->call;
    int64_t count = (int64_t)operands->count;
    convoy_status status = checked(d, call->set(pack, CUDNN_PACK_UIDS, CUDNN_INT64, count, operands->uids), "its tensors");
    if (!status) status = checked(d, call->set(pack, CUDNN_PACK_POINTERS, CUDNN_POINTERS, count, operands->pointers), "their memory");
    if (!status) status = checked(d, call->set(pack, CUDNN_PACK_WORKSPACE, CUDNN_POINTERS, 1, &operands->workspace), "its workspace");
    return status ? status : checked(d, call->finalize(pack), "its tensors");
}

/* A run as a graph. The first run loads cuDNN's kernels, which a capture does not allow. */
static convoy_status capture(const cuda_device *d, cudnn_descriptor plan, cudnn_descriptor pack, cu_graph *made) {
    const cudnn_functions *call = &d->cudnn->call;
    cudnn_handle handle = d->cudnn->handle;
    convoy_status status;
    if ((status = checked(d, call->set_stream(handle, d->stream), "a stream")) ||
        (status = checked(d, call->execute(handle, plan, pack), "a run")) ||
        (status = cuda_checked(d, d->call.stream_synchronize(d->stream), "a run of cuDNN")) ||
        (status = cuda_checked(d, d->call.capture_begin(d->stream, CU_CAPTURE_THREAD_LOCAL), "a capture")))
        return status;
    cudnn_result error = call->execute(handle, plan, pack);
    cu_result ended = d->call.capture_end(d->stream, made);
    if ((status = checked(d, error, "a captured run"))) {
        if (!ended && *made) d->call.graph_destroy(*made);
        return status;
    }
    return cuda_checked(d, ended, "a capture of cuDNN");
}

convoy_status cudnn_add(cuda_device *d, cu_graph graph, const member *text, const cudnn_operands *operands, cu_node *node) {
    cudnn_descriptor plan, pack;
    cu_graph child = NULL;
    if (!d->cudnn) return fail(CONVOY_DAMAGED, "%s: its manifest does not say that it needs cuDNN", d->path);
    convoy_status status = plan_of(d, text, &plan);
    if (status) return status;
    if ((status = checked(d, d->cudnn->call.make(CUDNN_VARIANT_PACK, &pack), "tensors"))) return status;
    if (!(status = fill_pack(d, pack, operands))) status = capture(d, plan, pack, &child);
    d->cudnn->call.drop(pack);
    if (status) return status;
    status = cuda_checked(d, d->call.graph_child(node, graph, NULL, 0, child), "a run of cuDNN");
    d->call.graph_destroy(child);
    return status;
}

void cudnn_close(cuda_device *d) {
    struct cudnn *c = d->cudnn;
    if (!c) return;
    for (size_t i = 0; i < c->plan_count; i++) c->call.drop(c->plans[i].plan);
    if (c->handle) c->call.destroy(c->handle);
    free(c->plans);
    free(c);
    d->cudnn = NULL;
}
