// Where a kernel is in its ring of STAGES stages, and in its list of tiles.

// n / d for 0 <= n < 2^31, where the host made `factor` and `shift` of d: a division of its own takes some hundred cycles.
DEVICE int quotient(int n, u32 factor, u32 shift) { return (int)((u64)(u32)n * factor >> shift); }

struct Ring {  // a place in the ring of stages
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

// Wait until all that was copied has been read, by this block's warps and by its peers'. They say so at this block's barriers, and
// what they send may still be under way when they have ended: a block that is gone by then stops the kernel with an error. A
// meeting of the cluster is no help, unless it waits for all stores too.
DEVICE void drain(Ring ring, u32 empty) {
  for (int i = 0; i < STAGES; i++) {
    barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
    ring.next();
  }
}
