// The device of direct.cu besides plain_device.cuh: asynchronous copies to shared memory, clusters, dependent launch.
// The tests put a file of this name in front of it.
#pragma once
#include <direct_config.cuh>
#include <plain_device.cuh>

enum : int {
  LANES = 32,
};
#define SHARED_MEMORY extern __shared__ __align__(16) char shared_memory[]

DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
// Sixteen bytes, or zeros where nothing is inside.
DEVICE void cp_async_16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
template <class T> DEVICE T read(const T* from, bool inside) { return inside ? *from : (T)0; }
DEVICE void put(float* to, float v) { *to = v; }
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#if __CUDA_ARCH__ >= 900
DEVICE void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void griddep_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A block's barrier counts the bytes that arrive from the other blocks of its cluster. A cluster barrier that
// publishes writes would wait for all stores under way, half a microsecond. The order: init and expect, arrive at the
// cluster barrier; wait there; send; wait for bytes.
DEVICE void mbarrier_init_expect_tx(void* bar, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n"
               "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// SEND_FLOATS floats to the same place of another block's shared memory.
DEVICE void st_async(float* to, int rank, const float* v, void* bar) {
  unsigned there, counted;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(bar)), "r"(rank));
#if SEND_FLOATS == 4
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
               ::"r"(there), "r"(counted), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
#elif SEND_FLOATS == 2
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];"
               ::"r"(there), "r"(counted), "f"(v[0]), "f"(v[1]) : "memory");
#else
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];"
               ::"r"(there), "r"(counted), "f"(v[0]) : "memory");
#endif
}
// After 2^24 tries the kernel stops with an error, instead of hanging the device; the longest real wait is far
// shorter.
DEVICE void mbarrier_wait(void* bar) {
  unsigned done, tries = 0;
  do {
    if (++tries == 1u << 24) __trap();
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                 "selp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(shared_address(bar)) : "memory");
  } while (!done);
}
#else  // no clusters
DEVICE void griddep_wait() {}
DEVICE void griddep_launch_dependents() {}
DEVICE void mbarrier_init_expect_tx(void*, int) {}
DEVICE void cluster_arrive_relaxed() {}
DEVICE void cluster_wait() {}
DEVICE void st_async(float*, int, const float*, void*) {}
DEVICE void mbarrier_wait(void*) {}
#endif
