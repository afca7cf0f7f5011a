// The ring of stages between copying and multiplying warpgroups, and division by numbers that the host knows.
//
//   producer                          consumer
//   wait(empty[stage], phase ^ 1)     wait(full[stage], phase)
//   copy ... arrives at full[stage]   multiply ... arrive(empty[stage])
//   next()                            next()
#pragma once
#include <ptx.cuh>

// A divisor as factor and shift (nvrtc_source.reciprocal): a hardware division takes some hundred cycles.
struct Divisor { u32 factor, shift; };
// n / divisor for 0 <= n < 2^31.
DEVICE int fast_div(int n, const Divisor& divisor) { return (int)((u64)(u32)n * divisor.factor >> divisor.shift); }

// A position in a ring of STAGES stages. `phase` is the parity of the round.
template <int STAGES> struct RingPosition {
  int stage;
  u32 phase;
  DEVICE_MEMBER void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  DEVICE_MEMBER void skip(int count) {
    stage += count;
    phase ^= (stage / STAGES) & 1;
    stage %= STAGES;
  }
};

// Waits until all stages are empty: every copy has been read by this block's warps and by those of its peers. A peer
// reads by arriving at this block's barriers; if the block has exited by then, the kernel stops with an error. A
// cluster barrier does not help unless it waits for all stores too.
template <int STAGES> DEVICE void wait_until_empty(RingPosition<STAGES> ring, u32 empty) {
  for (int i = 0; i < STAGES; i++) {
    mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
    ring.next();
  }
}
