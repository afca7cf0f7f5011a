// Runs a kernel on the emulated device: every cluster of the grid, one after another. The result is the number of faults.
#pragma once
#include <emulated_device.h>

template <typename Kernel> static int launch(int grid, int threads, int cluster_blocks, long shared_bytes, Kernel kernel) {
  faults = 0;
  for (int first = 0; first < grid; first += cluster_blocks) {
    Cluster c;
    c.all = std::make_unique<Meeting>(threads * cluster_blocks);
    for (int rank = 0; rank < cluster_blocks; rank++) {
      auto b = std::make_unique<Block>();
      b->memory.assign(shared_bytes, 0xff);
      b->all = std::make_unique<Meeting>(threads);
      b->running = threads;
      for (int i = 0; i < threads / 32; i++) b->warps.push_back(std::make_unique<Warp>());
      c.blocks.push_back(std::move(b));
    }
    gridDim = {(unsigned)grid, 1, 1};
    body = [&kernel] { kernel(); leave(); };
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int rank = 0; rank < cluster_blocks; rank++)
      for (int t = 0; t < threads; t++) {
        auto fiber = std::make_unique<Fiber>();
        fiber->thread_index = {(unsigned)t, 0, 0};
        fiber->block_index = {(unsigned)(first + rank), 0, 0};
        fiber->rank = rank;
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.get();
        fiber->context.uc_stack.ss_size = Fiber::STACK_BYTES;
        makecontext(&fiber->context, begin_fiber, 0);
        fibers.push_back(std::move(fiber));
      }
    run_fibers(fibers, c);
  }
  return faults;
}

// The same for a kernel whose threads do not meet: thread after thread.
template <typename Kernel> static void launch_alone(int grid, int threads, Kernel kernel) {
  for (int block = 0; block < grid; block++)
    for (int t = 0; t < threads; t++) {
      threadIdx = {(unsigned)t, 0, 0};
      blockIdx = {(unsigned)block, 0, 0};
      kernel();
    }
}
