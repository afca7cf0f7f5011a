// Runs the kernel on the host: every cluster of the grid, one after another.
extern "C" int run(const Map* x, const Map* w, Value* y, const Value* residual, const Value* bias, const Sizes* z, int grid) {
  const int threads = 128 * (CONSUMERS + 1), SIZE = CLUSTER * SPLIT;
  faults = 0;
  for (int first = 0; first < grid; first += SIZE) {
    Cluster c;
    c.all = std::make_unique<Meeting>(threads * SIZE);
    for (int rank = 0; rank < SIZE; rank++) {
      auto b = std::make_unique<Block>();
      b->memory.assign(STAGES * (STAGE_BYTES + 16) + 1024 + 32, 0xff);
      b->all = std::make_unique<Meeting>(threads);
      b->running = threads;
      for (int i = 0; i < threads / 32; i++) b->warps.push_back(std::make_unique<Warp>());
      c.blocks.push_back(std::move(b));
    }
    std::vector<std::thread> running;
    for (int rank = 0; rank < SIZE; rank++)
      for (int t = 0; t < threads; t++)
        running.emplace_back([&, rank, t] {
          threadIdx = {(unsigned)t, 0, 0};
          blockIdx = {(unsigned)(first + rank), 0, 0};
          gridDim = {(unsigned)grid, 1, 1};
          here = c.blocks[rank].get();
          cluster = &c;
          my_rank = rank;
          implicit_gemm(*x, *w, y, residual, bias, *z);
          leave();
        });
    for (auto& thread : running) thread.join();
  }
  return faults;
}
