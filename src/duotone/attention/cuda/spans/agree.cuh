// How the thread blocks of a cluster pass each other the bounds of their tokens.
//
// Each writes its bounds into the shared memory of all of them and counts the bytes there. A thread
// block that has all bytes goes on. Nothing is read from remote memory, so that a thread block may
// end whenever it is done. No fence is needed either: at a cluster's barrier it would be one for
// the whole device, by every warp.
//
// An element's bounds are elements, as a pair {low, high}.
#define ALL_BOUNDS_BYTES (CLUSTER * CHANNELS * (int)sizeof(Pair))

struct Agreement {
  Pair (*received)[CHANNELS];  // [rank]
  u64* arrived;             // a barrier that counts bytes; null where there is one thread block

#if CLUSTER > 1
  // Before anything that takes long: the others may pass bounds from `wait_for_listeners` on.
  __device__ __forceinline__ void listen() const {
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared_address(arrived))
                   : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(arrived)),
          "n"(ALL_BOUNDS_BYTES)
          : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  // All listen. By all threads of a thread block, before `pass`.
  __device__ __forceinline__ void wait_for_listeners() const {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  __device__ __forceinline__ void pass(int rank, int channel, Pair bounds) const {
    const u32 here = shared_address(&received[rank][channel]), count = shared_address(arrived);
#pragma unroll
    for (int other = 0; other < CLUSTER; other++)
      store_remote(address_in(other, here), address_in(other, count), bounds);
  }
  __device__ __forceinline__ void wait_for_all() const {
    asm volatile(
        "{.reg .pred P;\n WAIT: mbarrier.try_wait.parity.shared::cta.b64 P,[%0],0;\n"
        " @P bra DONE;\n bra WAIT;\n DONE: }" ::"r"(shared_address(arrived))
        : "memory");
  }
  // Address of a variable in another thread block.
  static __device__ __forceinline__ u32 address_in(int rank, u32 here) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
  }
  static __device__ __forceinline__ void store_remote(u32 target, u32 count, Pair x) {
#if INPUT == 2
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0],{%2,%3},[%1];" ::"r"(
            target),
        "r"(count), "f"(x.x[0]), "f"(x.x[1])
        : "memory");
#else
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0],%2,[%1];" ::"r"(target),
        "r"(count), "r"(x.x)
        : "memory");
#endif
  }
#else
  __device__ __forceinline__ void listen() const {}
  __device__ __forceinline__ void wait_for_listeners() const {}
  __device__ __forceinline__ void pass(int rank, int channel, Pair bounds) const {
    received[rank][channel] = bounds;
  }
  __device__ __forceinline__ void wait_for_all() const { __syncthreads(); }
#endif

  // After `wait_for_all`. length: tokens of all of them.
  __device__ __forceinline__ Bounds agreed(int channel, int length) const {
    Bounds b = {INFINITE, -INFINITE, 0.f};
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
      b.low = least(b.low, number(received[rank][channel], 0));
      b.high = greatest(b.high, number(received[rank][channel], 1));
    }
    if (length == 0) b.low = b.high = 0.f;
    return b;
  }
};
