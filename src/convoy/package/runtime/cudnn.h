/* The functions of cuDNN's backend interface that the runtime calls, and their types, as the cuDNN documentation has them.
 *
 * The library is opened with the first package that holds one of cuDNN's execution plans. */
#ifndef CONVOY_CUDNN_H
#define CONVOY_CUDNN_H

#include "cuda_internal.h"

typedef int cudnn_result;
typedef struct cudnn_context *cudnn_handle;
typedef void *cudnn_descriptor;

enum {
    CUDNN_EXECUTION_PLAN = 5, /* CUDNN_BACKEND_..._DESCRIPTOR */
    CUDNN_VARIANT_PACK = 16,
    CUDNN_PLAN_HANDLE = 400, /* CUDNN_ATTR_EXECUTION_PLAN_... */
    CUDNN_PLAN_TEXT = 405,   /* ..._JSON_REPRESENTATION */
    CUDNN_PACK_UIDS = 1000,  /* CUDNN_ATTR_VARIANT_PACK_... */
    CUDNN_PACK_POINTERS = 1001,
    CUDNN_PACK_WORKSPACE = 1003,
    CUDNN_HANDLES = 0, /* CUDNN_TYPE_... */
    CUDNN_INT64 = 3,
    CUDNN_POINTERS = 6,
    CUDNN_CHARS = 24
};

/* name here, result, name in the library, arguments */
#define CUDNN_FUNCTIONS(X)                                                                                                           \
    X(version, size_t, "cudnnGetVersion", (void))                                                                                    \
    X(error_text, const char *, "cudnnGetErrorString", (cudnn_result error))                                                         \
    X(create, cudnn_result, "cudnnCreate", (cudnn_handle * handle))                                                                  \
    X(destroy, cudnn_result, "cudnnDestroy", (cudnn_handle handle))                                                                  \
    X(set_stream, cudnn_result, "cudnnSetStream", (cudnn_handle handle, cu_stream stream))                                           \
    X(make, cudnn_result, "cudnnBackendCreateDescriptor", (int kind, cudnn_descriptor *made))                                        \
    X(drop, cudnn_result, "cudnnBackendDestroyDescriptor", (cudnn_descriptor made))                                                  \
    X(set, cudnn_result, "cudnnBackendSetAttribute",                                                                                 \
      (cudnn_descriptor to, int attribute, int type, int64_t count, const void *values))                                             \
    X(finalize, cudnn_result, "cudnnBackendFinalize", (cudnn_descriptor made))                                                       \
    X(execute, cudnn_result, "cudnnBackendExecute", (cudnn_handle handle, cudnn_descriptor plan, cudnn_descriptor pack))

typedef struct {
#define CUDNN_FIELD(name, result, symbol, arguments) result(*name) arguments;
    CUDNN_FUNCTIONS(CUDNN_FIELD)
#undef CUDNN_FIELD
} cudnn_functions;

#define CUDNN_MOST_OPERANDS 64

/* Tensors of a plan's run: their uids in the plan's graph, and where they lie. */
typedef struct {
    int64_t uids[CUDNN_MOST_OPERANDS];
    void *pointers[CUDNN_MOST_OPERANDS];
    size_t count;
    void *workspace; /* NULL: none */
} cudnn_operands;

/* Open cuDNN for a package that needs a version of it. */
HIDDEN convoy_status cudnn_open(cuda_device *d, int64_t version);

/* Add a run of the plan whose text is in a member as a node of a graph. */
HIDDEN convoy_status cudnn_add(cuda_device *d, cu_graph graph, const member *text, const cudnn_operands *operands, cu_node *node);

HIDDEN void cudnn_close(cuda_device *d);

#endif
