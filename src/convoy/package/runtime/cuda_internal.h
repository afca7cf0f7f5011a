/* Shared by the files of the GPU's part. */
#ifndef CONVOY_CUDA_INTERNAL_H
#define CONVOY_CUDA_INTERNAL_H

#include "internal.h"

#include "cuda_driver.h"

/* Device memory with the values of a constant, shared by all programs of a package. */
typedef struct {
    const weight *values;
    cu_address address;
} cuda_constant;

struct cuda_device {
    cu_functions call;
    void *library;
    cu_device device;
    cu_context context;
    cu_module *modules; /* one for each binary */
    size_t module_count;
    cu_function *functions; /* in the manifest's order */
    size_t function_count;
    cuda_constant *constants;
    size_t constant_count;
    cu_stream stream;  /* of calls with tensors in host memory */
    cu_event done;     /* the last run */
    bool has_context, has_run;
    struct cudnn *cudnn; /* NULL where no plan needs it */
    char *path; /* of the package, for errors */
};

typedef struct {
    cu_address address;
    size_t size;
    bool owned; /* not a constant, which the device holds */
} cuda_block;

typedef struct cuda_graph {
    cuda_block *blocks;
    size_t block_count;
    cu_address *places; /* of the inputs, then of the outputs */
    cu_exec exec;
} cuda_graph;

/* CONVOY_OK, or a status with the driver's word for the error. */
HIDDEN convoy_status cuda_checked(const cuda_device *d, cu_result error, const char *what);

#endif
