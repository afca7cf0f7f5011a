/* A concatenation along channels, of values of any size: in NHWC each pixel's channels side by side, in NCHW each image's.
 *
 * A row is a pixel or an image; of each input it holds a piece of so many bytes.
 */
#include <string.h>

#define WORTH_A_THREAD 65536 /* bytes that a thread must get for its start to be worth it */

/* The whole problem: the pieces and what they make. Settings: rows, pieces, threads, and the bytes of each piece in a row. */
void convoy_concat(const int64_t *settings, void *const *tensors) {
    int64_t rows = settings[0], pieces = settings[1], threads = settings[2];
    const int64_t *bytes = settings + 3;
    const char *const *from = (const char *const *)tensors;
    char *to = tensors[pieces];
    int64_t whole = 0;
    for (int64_t i = 0; i < pieces; i++) whole += bytes[i];
    int64_t wanted = rows * whole / WORTH_A_THREAD;
    if (wanted < threads) threads = wanted;
    PARALLEL_FOR(row, rows, threads) {
        char *at = to + row * whole;
        for (int64_t i = 0; i < pieces; i++) {
            memcpy(at, from[i] + row * bytes[i], bytes[i]);
            at += bytes[i];
        }
    }
}
