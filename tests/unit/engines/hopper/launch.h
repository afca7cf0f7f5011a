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
    std::vector<std::thread> running;
    for (int rank = 0; rank < cluster_blocks; rank++)
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

// The same for a kernel whose threads do not meet: thread after thread.
template <typename Kernel> static void launch_alone(int grid, int threads, Kernel kernel) {
  for (int block = 0; block < grid; block++)
    for (int t = 0; t < threads; t++) {
      threadIdx = {(unsigned)t, 0, 0};
      blockIdx = {(unsigned)block, 0, 0};
      kernel();
    }
}
