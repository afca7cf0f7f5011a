/* libconvoy: runs portable .convoy packages on a CPU or an NVIDIA GPU, without Python.
 *
 *     convoy_net *net;
 *     if (convoy_open("net.convoy", CONVOY_TRUST, &net)) return fail(convoy_last_error());
 *     convoy_run(net, inputs, 1, outputs, 1);
 *     convoy_close(net);
 *
 * It needs the C library and threads, nothing else; for packages for a GPU, the CUDA driver (libcuda.so.1). All functions may be called from several threads at once, on one net too;
 * convoy_close alone must be the last call on its net. A function that fails leaves the net as it was.
 */
#ifndef CONVOY_H
#define CONVOY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CONVOY_PACKAGE_VERSION 1 /* of the packages that this runtime reads */

typedef struct convoy_net convoy_net;

typedef enum {
    CONVOY_OK = 0,
    CONVOY_INVALID_ARGUMENT, /* NULL, an index out of range, or a tensor of another shape or dtype */
    CONVOY_CANNOT_READ,      /* the file is missing, is not a regular file, or cannot be read */
    CONVOY_DAMAGED,          /* the file is no whole package: cut, changed, or something else */
    CONVOY_OTHER_VERSION,    /* a package of another version */
    CONVOY_OTHER_MACHINE,    /* a package for another system, processor or C library */
    CONVOY_NOT_PORTABLE,     /* a package with steps that only Python runs: export it with --portable */
    CONVOY_NOT_TRUSTED,      /* CONVOY_TRUST was not given */
    CONVOY_OUT_OF_MEMORY,
    CONVOY_NO_GPU,    /* a package for a GPU, and there is no CUDA driver, an older one, or no device */
    CONVOY_GPU_FAILED /* the CUDA driver refused a call, or a kernel failed */
} convoy_status;

enum { CONVOY_TRUST = 1 }; /* flag of convoy_open: run the compiled code that the package holds */

typedef enum {
    CONVOY_FP64 = 1, CONVOY_FP32, CONVOY_FP16, CONVOY_BF16, CONVOY_I64, CONVOY_I32, CONVOY_I16, CONVOY_I8, CONVOY_U8, CONVOY_BOOL
} convoy_dtype;

typedef enum {
    CONVOY_CONTIGUOUS = 0, /* values in the order of the shape */
    CONVOY_CHANNELS_LAST   /* a shape [n, c, h, w] whose values lie in the order n, h, w, c; or [n, c, d, h, w] */
} convoy_layout;

/* An input or output of a net. The pointers belong to the net. */
typedef struct {
    const char *name;
    convoy_dtype dtype;
    convoy_layout layout;
    int32_t rank;
    const int64_t *shape; /* rank sizes */
    size_t size_bytes;
} convoy_tensor_info;

/* A tensor of the caller. Outputs are written to `data`. Inputs and outputs must not overlap. */
typedef struct {
    void *data;
    convoy_dtype dtype;
    int32_t rank;
    const int64_t *shape;
} convoy_tensor;

/* Where a net runs. */
typedef enum { CONVOY_CPU = 0, CONVOY_GPU } convoy_device;

/* Open a package and check all of it. A package for a GPU is opened on the CUDA device that is current in this thread, else on the
 * first one, in its primary context, which the CUDA runtime uses too. On success *net is the net, else NULL. The file may be
 * replaced (renamed over) or deleted afterwards, but must not be written into. */
convoy_status convoy_open(const char *path, unsigned flags, convoy_net **net);

/* Close a net, and free all that it holds. NULL is allowed. */
void convoy_close(convoy_net *net);

convoy_device convoy_net_device(const convoy_net *net);

/* Threads that a run uses on a CPU, from 1 to 256; 0: as many as the process may use. The default is 0. */
convoy_status convoy_set_threads(convoy_net *net, int32_t threads);

/* A package holds a program for each set of input shapes that it was exported for. */
size_t convoy_program_count(const convoy_net *net);
size_t convoy_input_count(const convoy_net *net, size_t program);
size_t convoy_output_count(const convoy_net *net, size_t program);
convoy_status convoy_input(const convoy_net *net, size_t program, size_t index, convoy_tensor_info *info);
convoy_status convoy_output(const convoy_net *net, size_t program, size_t index, convoy_tensor_info *info);

/* Run the program that fits the inputs' shapes and dtypes, on tensors in the host's memory. Returns when the outputs are written. */
convoy_status convoy_run(convoy_net *net, const convoy_tensor *inputs, size_t input_count, const convoy_tensor *outputs,
                         size_t output_count);

/* The same for a net on a GPU and tensors in that device's memory. The work is queued on `stream` (a CUstream or cudaStream_t of the
 * same device; NULL: the default stream), and the call returns at once. Runs of one net are done one after another, whatever their
 * streams. */
convoy_status convoy_run_on_stream(convoy_net *net, const convoy_tensor *inputs, size_t input_count, const convoy_tensor *outputs,
                                   size_t output_count, void *stream);

/* Why the last call of this thread that failed did so: one line. Valid until this thread's next call. */
const char *convoy_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
