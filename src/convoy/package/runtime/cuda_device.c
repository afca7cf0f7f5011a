/* The CUDA driver, a device's context, and the kernels of a package on it. */
#include "cudnn.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

convoy_status cuda_checked(const cuda_device *d, cu_result error, const char *what) {
    const char *name = NULL;
    if (error == CU_SUCCESS) return CONVOY_OK;
    if (d->call.error_name) d->call.error_name(error, &name);
    return fail(error == CU_OUT_OF_MEMORY ? CONVOY_OUT_OF_MEMORY : CONVOY_GPU_FAILED, "%s: the CUDA driver refused %s: %s", d->path, what,
                name ? name : "unknown error");
}

static convoy_status open_driver(cuda_device *d) {
    d->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!d->library) return fail(CONVOY_NO_GPU, "%s: it is for a GPU, and there is no CUDA driver: %s", d->path, dlerror());
    struct {
        const char *symbol;
        void *to;
    } functions[] = {
#define CU_ENTRY(name, symbol, arguments) {symbol, &d->call.name},
        CU_FUNCTIONS(CU_ENTRY)
#undef CU_ENTRY
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *found = dlsym(d->library, functions[i].symbol);
        if (!found) return fail(CONVOY_NO_GPU, "%s: the CUDA driver lacks %s: update it", d->path, functions[i].symbol);
        memcpy(functions[i].to, &found, sizeof found); /* ISO C has no cast between them */
    }
    return CONVOY_OK;
}

/* The primary context of the caller's current device, or of the first one. */
static convoy_status open_context(cuda_device *d) {
    cu_context current = NULL;
    convoy_status status;
    if (d->call.init(0)) return fail(CONVOY_NO_GPU, "%s: it is for a GPU, and the CUDA driver finds none", d->path);
    cu_result error = d->call.context_current(&current);
    if (!error && current)
        error = d->call.context_device(&d->device);
    else
        error = d->call.device_get(&d->device, 0);
    if ((status = cuda_checked(d, error, "the device"))) return status;
    if ((status = cuda_checked(d, d->call.context_retain(&d->context, d->device), "a context"))) return status;
    d->has_context = true;
    return cuda_checked(d, d->call.context_push(d->context), "its context");
}

static convoy_status check_needs(const cuda_device *d, const json *needs) {
    int64_t capability, version;
    int major, minor, driver;
    convoy_status status;
    if (!json_count(needs, "capability", 1000, &capability) || !json_count(needs, "driver", 1000000, &version))
        return fail(CONVOY_DAMAGED, "%s: its manifest does not say what it needs", d->path);
    if ((status = cuda_checked(d, d->call.device_attribute(&major, CU_CAPABILITY_MAJOR, d->device), "the device")) ||
        (status = cuda_checked(d, d->call.device_attribute(&minor, CU_CAPABILITY_MINOR, d->device), "the device")) ||
        (status = cuda_checked(d, d->call.driver_version(&driver), "its version")))
        return status;
    if (10 * major + minor != capability)
        return fail(CONVOY_OTHER_MACHINE, "%s: made for a GPU of capability %lld.%lld, this one has %d.%d", d->path,
                    (long long)capability / 10, (long long)capability % 10, major, minor);
    if (driver < version)
        return fail(CONVOY_OTHER_MACHINE, "%s: it needs a driver for CUDA %lld, this one is for %d", d->path, (long long)version / 1000,
                    driver / 1000);
    return CONVOY_OK;
}

/* The module of a binary: loaded once for all of its kernels. */
static convoy_status module_of(cuda_device *d, const member *file, const member **files, cu_module *module) {
    for (size_t i = 0; i < d->module_count; i++)
        if (files[i] == file) {
            *module = d->modules[i];
            return CONVOY_OK;
        }
    convoy_status status = cuda_checked(d, d->call.module_load(module, file->data), "a kernel's code");
    if (!status) {
        files[d->module_count] = file;
        d->modules[d->module_count++] = *module;
    }
    return status;
}

static convoy_status load_kernels(cuda_device *d, const package *p) {
    const json *list = json_get(p->manifest, "kernels", JSON_LIST);
    size_t count = list ? list->count : 0;
    convoy_status status = CONVOY_OK;
    d->modules = calloc(count + 1, sizeof *d->modules);
    d->functions = calloc(count + 1, sizeof *d->functions);
    const member **files = calloc(count + 1, sizeof *files);
    if (!d->modules || !d->functions || !files) status = fail(CONVOY_OUT_OF_MEMORY, "%s: no memory for its kernels", d->path);
    for (const json *one = list ? list->first : NULL; one && !status; one = one->next) {
        const json *name = json_get(one, "function", JSON_TEXT), *source = json_get(one, "source", JSON_TEXT);
        const member *file = name && source ? archive_find(&p->files, source->text) : NULL;
        cu_module module;
        if (!file)
            status = fail(CONVOY_DAMAGED, "%s: a kernel has no code", d->path);
        else if (!(status = module_of(d, file, files, &module)))
            status = cuda_checked(d, d->call.module_function(d->functions + d->function_count++, module, name->text), name->text);
    }
    free(files);
    return status;
}

convoy_status cuda_open(cuda_device **device, const package *p, const char *path) {
    cuda_device *d = *device = calloc(1, sizeof *d);
    if (!d) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", path);
    d->path = strdup(path);
    d->constants = calloc(p->weight_count + 1, sizeof *d->constants);
    if (!d->path || !d->constants) return fail(CONVOY_OUT_OF_MEMORY, "%s: no memory", path);
    convoy_status status;
    if ((status = open_driver(d)) || (status = open_context(d))) return status;
    if (!(status = check_needs(d, json_get(p->manifest, "cuda", JSON_OBJECT))) && !(status = load_kernels(d, p)) &&
        !(status = cuda_checked(d, d->call.stream_create(&d->stream, 0), "a stream")))
        status = cuda_checked(d, d->call.event_create(&d->done, CU_NO_TIMING), "an event");
    int64_t cudnn = 0;
    if (!status && json_count(json_get(p->manifest, "cuda", JSON_OBJECT), "cudnn", 10000000, &cudnn) && cudnn) status = cudnn_open(d, cudnn);
    cu_context popped;
    d->call.context_pop(&popped);
    return status;
}

void cuda_close(cuda_device *d) {
    cu_context popped;
    if (!d) return;
    if (d->has_context && !d->call.context_push(d->context)) {
        cudnn_close(d);
        for (size_t i = 0; i < d->constant_count; i++) d->call.memory_free(d->constants[i].address);
        for (size_t i = 0; i < d->module_count; i++) d->call.module_unload(d->modules[i]);
        if (d->stream) d->call.stream_destroy(d->stream);
        if (d->done) d->call.event_destroy(d->done);
        d->call.context_pop(&popped);
        d->call.context_release(d->device);
    }
    free(d->path);
    free(d->constants);
    free(d->modules);
    free(d->functions);
    if (d->library) dlclose(d->library);
    free(d);
}
