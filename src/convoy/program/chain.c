/* A chain of launches: each is a function, its settings, and where its tensors lie. A pointer that is the same in every call
 * stands in the operand; the others are places of `slots`, which the caller fills. */
#include <stdint.h>

#define MOST_TENSORS 64

typedef struct {
    void *fixed;
    int64_t slot; /* -1: fixed */
} Operand;

typedef struct {
    void (*call)(const void *settings, void *const *tensors);
    const void *settings;
    const Operand *operands;
    int64_t count;
} Launch;

void convoy_chain(const Launch *launches, int64_t count, void *const *slots) {
    void *tensors[MOST_TENSORS];
    for (const Launch *launch = launches; launch < launches + count; launch++) {
        for (int64_t i = 0; i < launch->count; i++) {
            const Operand *from = launch->operands + i;
            tensors[i] = from->slot < 0 ? from->fixed : slots[from->slot];
        }
        launch->call(launch->settings, tensors);
    }
}
