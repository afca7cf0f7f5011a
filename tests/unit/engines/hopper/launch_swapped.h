// Runs a kernel on the host: every cluster of the grid, one after another.
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef SPLIT
#define SPLIT 1
#endif
#ifndef INBOX_BYTES
#define INBOX_BYTES 0  // sums from other blocks come into the ring
#endif
#ifndef STAGED_BYTES
#define STAGED_BYTES 0
#define HALOS_BYTES 0
#endif
#ifndef LAUNCHED_THREADS
#define LAUNCHED_THREADS (128 * (CONSUMERS + 1))
#endif
static const int TOGETHER = CLUSTER * SPLIT;
template <typename Kernel> static int launch(int grid, Kernel kernel) {
  const int threads = LAUNCHED_THREADS;
  faults = 0;
  for (int first = 0; first < grid; first += TOGETHER) {
    Cluster c;
    c.all = std::make_unique<Meeting>(threads * TOGETHER);
    for (int rank = 0; rank < TOGETHER; rank++) {
      auto b = std::make_unique<Block>();
      b->memory.assign(STAGES * (STAGE_BYTES + 16) + INBOX_BYTES + STAGED_BYTES + HALOS_BYTES + 96 + 1024, 0xff);
      b->all = std::make_unique<Meeting>(threads);
      b->running = threads;
      for (int i = 0; i < threads / 32; i++) b->warps.push_back(std::make_unique<Warp>());
      c.blocks.push_back(std::move(b));
    }
    std::vector<std::thread> running;
    for (int rank = 0; rank < TOGETHER; rank++)
      for (int t = 0; t < threads; t++)
        running.emplace_back([&, rank, t] {
          threadIdx = {(unsigned)t, 0, 0};
          blockIdx = {(unsigned)(first + rank), 0, 0};
          gridDim = {(unsigned)grid, 1, 1};
          here = c.blocks[rank].get();
          cluster = &c;
          my_rank = rank;
          kernel();
          leave();
        });
    for (auto& thread : running) thread.join();
  }
  return faults;
}
