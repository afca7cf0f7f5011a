/* A convolution's kernel, called within a work item on some rows of its result: before every source of this folder.
 *
 * Some rows of a convolution's result are a convolution of fewer rows, with fewer zeros above and below. So the kernel is given other
 * sizes, and computes what it would have.
 */
#include <string.h>

#define MOST_WORDS 32
#define MOST_POINTERS 16

/* What every convolution's settings begin with. */
enum { N, C, H, W, K, R, S, PAD_H, PAD_W, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, P, Q };

typedef struct {
    void (*call)(const void *settings, void *const *tensors);
    int64_t settings[MOST_WORDS]; /* of one image, by one thread */
    int64_t pointers;             /* of its tensors */
    int64_t x, residual, y;       /* which of them; residual: -1 for none */
} Layer;

typedef struct {
    int64_t first, end;
} Rows;

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* The rows of a convolution's input that these rows of its result are made of. */
static inline Rows read_by(const int64_t *z, Rows made) {
    int64_t first = made.first * z[STRIDE_H] - z[PAD_H];
    int64_t end = (made.end - 1) * z[STRIDE_H] - z[PAD_H] + (z[R] - 1) * z[DILATION_H] + 1;
    Rows found = {lesser(z[H], greater(0, first)), 0};
    found.end = greater(found.first, lesser(z[H], end));
    return found;
}

/* Rows `made` of a convolution's result. x is the first of the rows that they are made of, residual and y are the first of their own;
 * `tensors` are the kernel's, without these. */
static inline void call_layer(const Layer *s, Rows made, const void *x, const void *residual, void *y, void *const *tensors) {
    const int64_t *z = s->settings;
    int64_t sizes[MOST_WORDS];
    void *pointers[MOST_POINTERS];
    Rows read = read_by(z, made);
    memcpy(sizes, z, sizeof sizes);
    sizes[H] = read.end - read.first;
    sizes[PAD_H] = read.first - (made.first * z[STRIDE_H] - z[PAD_H]);
    sizes[P] = made.end - made.first;
    memcpy(pointers, tensors, s->pointers * sizeof *pointers);
    pointers[s->x] = (void *)x;
    pointers[s->y] = y;
    if (s->residual >= 0) pointers[s->residual] = (void *)residual;
    s->call(sizes, pointers);
}
