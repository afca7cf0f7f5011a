// Runs the copying kernel on the host, thread after thread: they do not meet.
extern "C" void run(const Element* x, u64* z, const Sizes* s, int grid) {
  for (int block = 0; block < grid; block++)
    for (int t = 0; t < 256; t++) {
      threadIdx = {(unsigned)t, 0, 0};
      blockIdx = {(unsigned)block, 0, 0};
      pad_image(x, z, *s);
    }
}
