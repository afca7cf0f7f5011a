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
