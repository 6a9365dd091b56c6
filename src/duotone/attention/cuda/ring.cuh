// A warp's ring of records; warps draw them from a counter, since the order of keys is free.
//
// SLOT_BYTES: room for a record with all its pieces, or for the part of one that a pass reads.
#ifndef SLOT_BYTES
#define SLOT_BYTES RECORD_BYTES
#endif
// From compute capability 9.0 on a record is a bulk copy (one for each piece) whose bytes a barrier
// counts, before that the lanes copy 16 bytes each at a time.
#if __CUDA_ARCH__ >= 900
#define BULK_COPIES 1
#else
#define BULK_COPIES 0
#endif

#if BULK_COPIES
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  asm volatile(
      "{.reg .pred P;\n WAIT: mbarrier.try_wait.parity.shared::cta.b64 P,[%0],%1;\n"
      " @P bra DONE;\n bra WAIT;\n DONE:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
// Where a record goes, for the lane that asks.
struct Slot {
  u32 barrier, address;

  // The bytes of all pieces, before the first of them.
  template <int BYTES>
  __device__ __forceinline__ void expect() const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "n"(BYTES)
                 : "memory");
  }
  template <int BYTES>
  __device__ __forceinline__ void put(u32 offset, const char* source) const {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%3,[%2];" ::
            "r"(address + offset),
        "l"(source), "r"(barrier), "n"(BYTES)
        : "memory");
  }
};
#else
// Where a record goes, for all lanes.
struct Slot {
  u32 address;
  int lane;

  template <int BYTES>
  __device__ __forceinline__ void expect() const {}
  template <int BYTES>
  __device__ __forceinline__ void put(u32 offset, const char* source) const {
    for (int at = lane * 16; at < BYTES; at += 512)
      asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(address + offset + at),
                   "l"(source + at)
                   : "memory");
  }
};
#endif

struct Ring {
  u32 memory, slot, counter;
  int* drawn;
  int current;
#if BULK_COPIES
  u32 barrier, phase;
#endif

  __device__ __forceinline__ void make(const Unit& u, char* shared, u64* barriers, int* draws) {
    memory = pinned(shared_address(shared) + u.warp * (STAGES * SLOT_BYTES), u.lane);
    slot = 0;
    drawn = draws;
    // Of an address that it knows to be the same for a warp the compiler makes one addition of all
    // lanes, a dozen instructions, though one lane draws.
    counter = pinned(shared_address(draws), u.lane);
#if BULK_COPIES
    barrier = pinned(shared_address(barriers + u.warp * STAGES), u.lane);
    phase = 0;
    if (u.lane == 0) {
      for (int s = 0; s < STAGES; s++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(barrier + 8 * s));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#endif
    __syncwarp();
  }
  // Asks for the first record of a pass.
  template <int BYTES, class U>
  __device__ __forceinline__ void start(const U& u) {
    current = u.first + u.warp;
    if (current < u.last) ask<BYTES>(u, current);
  }
  // Puts the counter behind the first records; a barrier must stand between it and its draws.
  __device__ __forceinline__ void reset(const Unit& u) {
    if (u.tid == 0) *drawn = u.first + WARPS;
  }
  // Waits for the current record and asks for the next one, lane 0's `next`; returns where the
  // current one is.
  template <int BYTES, class U>
  __device__ __forceinline__ u32 take(const U& u, int& next) {
    wait();
    const u32 here = memory + slot * SLOT_BYTES;
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    next = 0;
#if BULK_COPIES
    if (slot == 0) phase ^= 1;
    if (u.lane == 0) {
      next = draw();
      if (next < u.last) ask<BYTES>(u, next);
    }
#else
    if (u.lane == 0) next = draw();
    next = __shfl_sync(FULL, next, 0);
    if (next < u.last) ask<BYTES>(u, next);
#endif
    return here;
  }
  // Behind the last record: the ring's memory may be written by the lanes.
  __device__ __forceinline__ void leave() {
#if BULK_COPIES
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }

  __device__ __forceinline__ int draw() {
    int next;
    asm volatile("atom.shared.add.u32 %0,[%1],1;" : "=r"(next) : "r"(counter) : "memory");
    return next;
  }
#if BULK_COPIES
  template <int BYTES, class U>
  __device__ __forceinline__ void ask(const U& u, int record) {
    if (u.lane == 0)
      u.template copy_record<BYTES>(record, Slot{barrier + 8 * slot, memory + slot * SLOT_BYTES});
  }
  __device__ __forceinline__ void wait() { wait_for(barrier + 8 * slot, phase); }
#else
  template <int BYTES, class U>
  __device__ __forceinline__ void ask(const U& u, int record) {
    const Slot here = {memory + slot * SLOT_BYTES, u.lane};
    u.template copy_record<BYTES>(record, here);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // One record at most is under way; the other lanes' parts are there once they have waited, too.
  __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
  }
#endif
};
