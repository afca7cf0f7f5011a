/* Runs a portable package with libconvoy, and prints the largest value of its first output.
 *
 *     convoy export resnet18 --portable --weights DEFAULT -o resnet18.convoy
 *     convoy runtime build/libconvoy
 *     cc classify.c -Ibuild/libconvoy -Lbuild/libconvoy -lconvoy -Wl,-rpath,build/libconvoy -o classify
 *     ./classify resnet18.convoy image.f32
 *
 * image.f32 holds the first input's values, as 32-bit floats in the order of its layout; without it they are 0, 1/1000, 2/1000, ...
 */
#include <convoy.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(const char *what) {
    fprintf(stderr, "%s: %s\n", what, convoy_last_error());
    return 1;
}

/* Memory for a tensor of the net. */
static convoy_tensor tensor_for(const convoy_tensor_info *info) {
    convoy_tensor made = {malloc(info->size_bytes ? info->size_bytes : 1), info->dtype, info->rank, info->shape};
    return made;
}

static int fill(const convoy_tensor_info *info, float *values, const char *path) {
    size_t count = info->size_bytes / sizeof(float);
    for (size_t i = 0; i < count; i++) values[i] = (float)(i % 1000) / 1000.0f;
    if (!path) return 0;
    FILE *file = fopen(path, "rb");
    size_t found = file ? fread(values, sizeof(float), count, file) : 0;
    if (file) fclose(file);
    if (found == count) return 0;
    fprintf(stderr, "%s: expected %zu floats\n", path, count);
    return 1;
}

int main(int count, char **words) {
    convoy_net *net;
    convoy_tensor_info x, y;
    if (count < 2) {
        fprintf(stderr, "usage: classify NET.convoy [VALUES.f32]\n");
        return 2;
    }
    if (convoy_open(words[1], CONVOY_TRUST, &net)) return failed("open");
    if (convoy_input_count(net, 0) != 1 || convoy_input(net, 0, 0, &x) || convoy_output(net, 0, 0, &y) || x.dtype != CONVOY_FP32 ||
        y.dtype != CONVOY_FP32) {
        fprintf(stderr, "%s: expected one input, and outputs in fp32\n", words[1]);
        convoy_close(net);
        return 1;
    }
    size_t outputs = convoy_output_count(net, 0);
    convoy_tensor input = tensor_for(&x), *made = calloc(outputs, sizeof *made);
    int status = !made || !input.data || fill(&x, input.data, count > 2 ? words[2] : NULL);
    for (size_t i = 0; i < outputs && !status; i++) {
        convoy_tensor_info info;
        status = convoy_output(net, 0, i, &info) || !(made[i] = tensor_for(&info)).data;
    }
    if (!status && convoy_run(net, &input, 1, made, outputs)) status = failed("run");
    if (!status) {
        const float *values = made[0].data;
        size_t best = 0;
        for (size_t i = 1; i < y.size_bytes / sizeof(float); i++)
            if (values[i] > values[best]) best = i;
        printf("%s: largest value %.9g at %zu\n", y.name, values[best], best);
    }
    for (size_t i = 0; made && i < outputs; i++) free(made[i].data);
    free(made);
    free(input.data);
    convoy_close(net);
    return status;
}
