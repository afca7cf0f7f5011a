// What direct.cu needs of a device beside plain.cuh: copies to shared memory that are not waited for, clusters, dependent launch.
// Tests put another file of the same names in this one's place.
#define LANES 32
#define SHARED_MEMORY extern __shared__ __align__(16) char shared_memory[]

DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
// Where nothing is inside, the copy is of zeros.
DEVICE void copy16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
template <class T> DEVICE T read(const T* from, bool inside) { return inside ? *from : (T)0; }
DEVICE void put(float* to, float v) { *to = v; }
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_forerunner() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A block's barrier counts the bytes that are sent to it. Nothing else is published between the blocks of a cluster: a barrier that
// does waits for all stores under way, half a microsecond. So: expect, arrive; wait; send; received.
DEVICE void expect(void* bar, int bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// PIECE floats to the same place of another block's shared memory.
DEVICE void send(float* to, int rank, const float* v, void* bar) {
  unsigned there, counted;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(bar)), "r"(rank));
#if PIECE == 4
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
               ::"r"(there), "r"(counted), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
#elif PIECE == 2
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];"
               ::"r"(there), "r"(counted), "f"(v[0]), "f"(v[1]) : "memory");
#else
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %2, [%1];"
               ::"r"(there), "r"(counted), "f"(v[0]) : "memory");
#endif
}
// A wait that cannot end stops the kernel with an error instead of the device for ever; the longest real one is far shorter.
DEVICE void receive(void* bar) {
  unsigned done, tries = 0;
  do {
    if (++tries == 1u << 24) __trap();
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(shared_address(bar)) : "memory");
  } while (!done);
}
#else  // no clusters
DEVICE void wait_for_forerunner() {}
DEVICE void let_successor_start() {}
DEVICE void expect(void*, int) {}
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
DEVICE void send(float*, int, const float*, void*) {}
DEVICE void receive(void*) {}
#endif
