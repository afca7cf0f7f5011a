/* cuDNN's backend interface for tests without a GPU, on the fake driver: a plan's text is {"scale":S}, its run is y = S x + workspace.
 *
 * It checks the order of calls and counts what is alive. FAKE_CUDNN_FAIL names a function that fails. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef unsigned long long address;
enum { OK = 0, BAD = 2000, FAILED = 5000, PLAN = 5, PACK = 16, X = 101, Y = 103, VALUES = 32 };

int fake_cuda_library(int (*work)(address *), const address *operands, int count);

typedef struct {
    int kind, finalized, has_handle;
    char text[256];
    int64_t uids[8];
    address pointers[8], workspace;
    int64_t count;
} descriptor;

static int alive, version = 91900;
static void *current;

int fake_cudnn_alive(void) { return alive; }
void fake_cudnn_version(int wanted) { version = wanted; }

static result failing(const char *name) {
    const char *wanted = getenv("FAKE_CUDNN_FAIL");
    return wanted && !strcmp(wanted, name) ? FAILED : OK;
}

size_t cudnnGetVersion(void) { return (size_t)version; }
const char *cudnnGetErrorString(result status) { return status == FAILED ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_BAD_PARAM"; }
result cudnnCreate(void **handle) { return *handle = &alive, alive++, failing(__func__); }
result cudnnDestroy(void *handle) { return alive--, handle == &alive ? OK : BAD; }
result cudnnSetStream(void *handle, void *stream) { return current = stream, handle == &alive ? failing(__func__) : BAD; }

result cudnnBackendCreateDescriptor(int kind, descriptor **made) {
    if (kind != PLAN && kind != PACK) return BAD;
    *made = calloc(1, sizeof **made);
    (*made)->kind = kind;
    return alive++, OK;
}
result cudnnBackendDestroyDescriptor(descriptor *d) { return free(d), alive--, OK; }
result cudnnBackendSetAttribute(descriptor *d, int attribute, int type, int64_t count, const void *values) {
    if (d->finalized) return BAD;
    if (d->kind == PLAN && attribute == 405 && type == 24 && count < 256) return memcpy(d->text, values, (size_t)count), OK;
    if (d->kind == PLAN && attribute == 400 && type == 0 && count == 1 && d->text[0]) return d->has_handle = *(void **)values == &alive, OK;
    if (d->kind == PACK && attribute == 1000 && type == 3 && count <= 8)
        return memcpy(d->uids, values, (size_t)count * 8), d->count = count, OK;
    if (d->kind == PACK && attribute == 1001 && type == 6 && count == d->count) return memcpy(d->pointers, values, (size_t)count * 8), OK;
    if (d->kind == PACK && attribute == 1003 && type == 6 && count == 1) return d->workspace = *(const address *)values, OK;
    return BAD;
}
result cudnnBackendFinalize(descriptor *d) {
    double scale;
    if (d->kind == PLAN && (!d->has_handle || sscanf(d->text, "{\"scale\":%lf}", &scale) != 1)) return BAD;
    return d->finalized = 1, failing(__func__);
}

/* operands: x, y, workspace, the bits of the scale */
static int scaled(address *operands) {
    float scale;
    memcpy(&scale, operands + 3, sizeof scale);
    const float *x = (const float *)operands[0];
    float *y = (float *)operands[1], *workspace = (float *)operands[2];
    workspace[0] = 1;
    for (int i = 0; i < VALUES; i++) y[i] = scale * x[i] + workspace[0];
    return 0;
}
result cudnnBackendExecute(void *handle, descriptor *plan, descriptor *pack) {
    address operands[4] = {0, 0, pack->workspace, 0};
    double scale;
    if (failing(__func__)) return FAILED;
    if (handle != &alive || !current || !plan->finalized || !pack->finalized || !pack->workspace) return BAD;
    for (int64_t i = 0; i < pack->count; i++) operands[pack->uids[i] == Y] = pack->pointers[i];
    if (pack->count != 2 || !operands[0] || !operands[1]) return BAD;
    if (sscanf(plan->text, "{\"scale\":%lf}", &scale) != 1) return BAD;
    float narrow = (float)scale;
    memcpy(operands + 3, &narrow, sizeof narrow);
    return fake_cuda_library(scaled, operands, 4) ? FAILED : OK;
}
