/* Runs of a recorded graph: inputs in, one launch, outputs out. */
#include "cuda_internal.h"

/* Queue a run on a stream. `within`: the tensors lie on the device. */
static convoy_status queue(const program *p, cuda_device *d, const convoy_tensor *inputs, const convoy_tensor *outputs, cu_stream stream,
                           bool within) {
    const cuda_graph *g = p->graph;
    convoy_status status = CONVOY_OK;
    for (size_t i = 0; i < p->input_count && !status; i++) {
        size_t size = p->inputs[i].size_bytes;
        if (!size) continue;
        cu_result error = within ? d->call.copy_within(g->places[i], (cu_address)(uintptr_t)inputs[i].data, size, stream)
                                 : d->call.copy_in(g->places[i], inputs[i].data, size, stream);
        status = cuda_checked(d, error, "a copy of an input");
    }
    if (!status) status = cuda_checked(d, d->call.graph_launch(g->exec, stream), "the launch");
    for (size_t i = 0; i < p->output_count && !status; i++) {
        size_t size = p->outputs[i].size_bytes;
        if (!size) continue;
        cu_address from = g->places[p->input_count + i];
        cu_result error = within ? d->call.copy_within((cu_address)(uintptr_t)outputs[i].data, from, size, stream)
                                 : d->call.copy_out(outputs[i].data, from, size, stream);
        status = cuda_checked(d, error, "a copy of an output");
    }
    return status;
}

convoy_status cuda_graph_run(const program *p, cuda_device *d, const convoy_tensor *inputs, const convoy_tensor *outputs, bool stream_given,
                             void *stream) {
    cu_context popped;
    cu_stream chosen = stream_given ? stream : d->stream;
    convoy_status status = cuda_checked(d, d->call.context_push(d->context), "its context");
    if (status) return status;
    /* Runs on other streams use the same memory: this one waits for the last of them. */
    if (d->has_run) status = cuda_checked(d, d->call.stream_wait(chosen, d->done, 0), "an event");
    if (!status) {
        status = queue(p, d, inputs, outputs, chosen, stream_given);
        if (!d->call.event_record(d->done, chosen)) d->has_run = true;
    }
    if (!status && !stream_given) status = cuda_checked(d, d->call.stream_synchronize(chosen), "the run");
    d->call.context_pop(&popped);
    return status;
}
