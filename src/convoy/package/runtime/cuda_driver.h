/* The functions of the CUDA driver that the runtime calls, and their types, as the CUDA Driver API documents them.
 *
 * The driver's library is opened when the first package for a GPU is opened, so that the runtime needs no CUDA otherwise. */
#ifndef CONVOY_CUDA_DRIVER_H
#define CONVOY_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result;
typedef int cu_device;
typedef unsigned long long cu_address;
typedef struct cu_context *cu_context;
typedef struct cu_module *cu_module;
typedef struct cu_function *cu_function;
typedef struct cu_stream *cu_stream;
typedef struct cu_event *cu_event;
typedef struct cu_graph *cu_graph;
typedef struct cu_node *cu_node;
typedef struct cu_exec *cu_exec;

typedef struct { /* CUDA_KERNEL_NODE_PARAMS_v2 */
    cu_function function;
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void **arguments, **extra;
    void *kernel;
    cu_context context;
} cu_kernel_params;

typedef struct { /* one side of CUDA_MEMCPY3D_v2 */
    size_t x, y, z, level;
    int memory_type;
    void *host;
    cu_address device;
    void *array, *reserved;
    size_t pitch, height;
} cu_copy_side;

typedef struct { /* CUDA_MEMCPY3D_v2 */
    cu_copy_side source, target;
    size_t width_bytes, height, depth;
} cu_copy_params;

typedef struct { /* CUDA_MEMSET_NODE_PARAMS_v1 */
    cu_address target;
    size_t pitch;
    unsigned value, element_bytes;
    size_t width, height;
} cu_fill_params;

typedef struct { /* CUgraphEdgeData */
    unsigned char from_port, to_port, type, reserved[5];
} cu_edge;

typedef union { /* CUlaunchAttributeValue */
    char size[64];
    struct {
        unsigned x, y, z;
    } cluster;
} cu_attribute_value;

typedef struct { /* CUtensorMap */
    _Alignas(64) uint64_t words[16];
} cu_tensor_map;

enum {
    CU_SUCCESS = 0,
    CU_OUT_OF_MEMORY = 2,
    CU_CAPABILITY_MAJOR = 75,  /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
    CU_CAPABILITY_MINOR = 76,
    CU_MEMORY_DEVICE = 2,      /* CU_MEMORYTYPE_DEVICE */
    CU_MOST_DYNAMIC_SHARED = 8, /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    CU_LARGE_CLUSTERS = 14,    /* CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED */
    CU_CLUSTER = 4,            /* CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION */
    CU_PROGRAMMATIC = 1,       /* CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, and CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC */
    CU_NO_TIMING = 2,          /* CU_EVENT_DISABLE_TIMING */
    CU_CAPTURE_THREAD_LOCAL = 1 /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */
};

/* name here, name in the library, arguments */
#define CU_FUNCTIONS(X)                                                                                                              \
    X(init, "cuInit", (unsigned flags))                                                                                              \
    X(error_name, "cuGetErrorName", (cu_result error, const char **name))                                                            \
    X(driver_version, "cuDriverGetVersion", (int *version))                                                                          \
    X(device_get, "cuDeviceGet", (cu_device *device, int index))                                                                     \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_device device))                                       \
    X(context_retain, "cuDevicePrimaryCtxRetain", (cu_context *context, cu_device device))                                           \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (cu_device device))                                                           \
    X(context_current, "cuCtxGetCurrent", (cu_context *context))                                                                     \
    X(context_device, "cuCtxGetDevice", (cu_device *device))                                                                         \
    X(context_push, "cuCtxPushCurrent_v2", (cu_context context))                                                                     \
    X(context_pop, "cuCtxPopCurrent_v2", (cu_context *context))                                                                      \
    X(module_load, "cuModuleLoadData", (cu_module *module, const void *image))                                                       \
    X(module_unload, "cuModuleUnload", (cu_module module))                                                                           \
    X(module_function, "cuModuleGetFunction", (cu_function *function, cu_module module, const char *name))                           \
    X(function_get, "cuFuncGetAttribute", (int *value, int attribute, cu_function function))                                         \
    X(function_set, "cuFuncSetAttribute", (cu_function function, int attribute, int value))                                          \
    X(memory_allocate, "cuMemAlloc_v2", (cu_address *address, size_t size))                                                          \
    X(memory_free, "cuMemFree_v2", (cu_address address))                                                                             \
    X(copy_in, "cuMemcpyHtoDAsync_v2", (cu_address target, const void *source, size_t size, cu_stream stream))                       \
    X(copy_out, "cuMemcpyDtoHAsync_v2", (void *target, cu_address source, size_t size, cu_stream stream))                            \
    X(copy_within, "cuMemcpyDtoDAsync_v2", (cu_address target, cu_address source, size_t size, cu_stream stream))                    \
    X(stream_create, "cuStreamCreate", (cu_stream *stream, unsigned flags))                                                          \
    X(stream_destroy, "cuStreamDestroy_v2", (cu_stream stream))                                                                      \
    X(stream_synchronize, "cuStreamSynchronize", (cu_stream stream))                                                                 \
    X(stream_wait, "cuStreamWaitEvent", (cu_stream stream, cu_event event, unsigned flags))                                          \
    X(capture_begin, "cuStreamBeginCapture_v2", (cu_stream stream, int mode))                                                        \
    X(capture_end, "cuStreamEndCapture", (cu_stream stream, cu_graph *graph))                                                        \
    X(event_create, "cuEventCreate", (cu_event *event, unsigned flags))                                                              \
    X(event_destroy, "cuEventDestroy_v2", (cu_event event))                                                                          \
    X(event_record, "cuEventRecord", (cu_event event, cu_stream stream))                                                             \
    X(event_synchronize, "cuEventSynchronize", (cu_event event))                                                                     \
    X(graph_create, "cuGraphCreate", (cu_graph *graph, unsigned flags))                                                              \
    X(graph_destroy, "cuGraphDestroy", (cu_graph graph))                                                                             \
    X(graph_kernel, "cuGraphAddKernelNode_v2",                                                                                       \
      (cu_node *node, cu_graph graph, const cu_node *after, size_t count, const cu_kernel_params *params))                           \
    X(graph_copy, "cuGraphAddMemcpyNode",                                                                                            \
      (cu_node *node, cu_graph graph, const cu_node *after, size_t count, const cu_copy_params *params, cu_context context))         \
    X(graph_fill, "cuGraphAddMemsetNode",                                                                                            \
      (cu_node *node, cu_graph graph, const cu_node *after, size_t count, const cu_fill_params *params, cu_context context))         \
    X(graph_empty, "cuGraphAddEmptyNode", (cu_node *node, cu_graph graph, const cu_node *after, size_t count))                       \
    X(graph_child, "cuGraphAddChildGraphNode", (cu_node *node, cu_graph graph, const cu_node *after, size_t count, cu_graph child))  \
    X(graph_edges, "cuGraphAddDependencies_v2",                                                                                      \
      (cu_graph graph, const cu_node *from, const cu_node *to, const cu_edge *edges, size_t count))                                  \
    X(node_attribute, "cuGraphKernelNodeSetAttribute", (cu_node node, int attribute, const cu_attribute_value *value))               \
    X(graph_instantiate, "cuGraphInstantiateWithFlags", (cu_exec *exec, cu_graph graph, unsigned long long flags))                   \
    X(graph_launch, "cuGraphLaunch", (cu_exec exec, cu_stream stream))                                                               \
    X(exec_destroy, "cuGraphExecDestroy", (cu_exec exec))                                                                            \
    X(map_address, "cuTensorMapReplaceAddress", (cu_tensor_map * map, void *address))

typedef struct {
#define CU_FIELD(name, symbol, arguments) cu_result(*name) arguments;
    CU_FUNCTIONS(CU_FIELD)
#undef CU_FIELD
} cu_functions;

#endif
