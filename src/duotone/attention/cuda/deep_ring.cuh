// A ring with two records under way: with one, passes that read half of a record leave memory idle,
// and so do units of few records, whose warps all wait for their second one at the same time.
static_assert(STAGES == 3, "one record is read while two are under way");

struct DeepRing : Ring {
  int following;  // the record after the current one

  static __device__ __forceinline__ int behind(int slot) {
    return slot == STAGES - 1 ? 0 : slot + 1;
  }
  // Asks for the first two records of a pass: BYTES of each, from byte FROM on.
  template <int BYTES, int FROM>
  __device__ __forceinline__ void start(const Unit& u) {
    current = u.first + u.warp, following = current + WARPS;
    ask_into<BYTES, FROM>(u, current, slot);
    ask_into<BYTES, FROM>(u, following, behind(slot));
  }
  // As Ring's, for two records a warp.
  __device__ __forceinline__ void reset(const Unit& u) {
    if (u.tid == 0) *drawn = u.first + 2 * WARPS;
  }
  // Waits for the current record, and asks for the one behind the following one, lane 0's `next`,
  // where the record before lay: all lanes must have read it.
  template <int BYTES, int FROM>
  __device__ __forceinline__ u32 take(const Unit& u, int& next) {
    const u32 here = take_current();
    next = refill<BYTES, FROM>(u);
    return here;
  }
  // The two halves of it, for who still reads the record before.
  __device__ __forceinline__ u32 take_current() {
    wait_for_older();
    const u32 here = memory + slot * SLOT_BYTES;
    slot = behind(slot);
#if BULK_COPIES
    if (slot == 0) phase ^= 1;
#endif
    return here;
  }
  template <int BYTES, int FROM>
  __device__ __forceinline__ int refill(const Unit& u) {
    int next = 0;
    if (u.lane == 0) next = draw();
#if !BULK_COPIES
    next = __shfl_sync(FULL, next, 0);
#endif
    ask_into<BYTES, FROM>(u, next, behind(slot));
    return next;
  }
  __device__ __forceinline__ void advance(int next) {
    current = following;
    following = __shfl_sync(FULL, next, 0);
  }

#if BULK_COPIES
  template <int BYTES, int FROM>
  __device__ __forceinline__ void ask_into(const Unit& u, int record, int where) {
    if (u.lane == 0 && record < u.last)
      fill<BYTES>(barrier + 8 * where, memory + where * SLOT_BYTES, u.at(record) + FROM);
  }
  __device__ __forceinline__ void wait_for_older() { wait(); }
#else
  template <int BYTES, int FROM>
  __device__ __forceinline__ void ask_into(const Unit& u, int record, int where) {
    if (record < u.last) {
      const char* source = u.at(record) + FROM;
      for (int at = u.lane * 16; at < BYTES; at += 512)
        asm volatile(
            "cp.async.cg.shared.global [%0],[%1],16;" ::"r"(memory + where * SLOT_BYTES + at),
            "l"(source + at)
            : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");  // also an empty one, so that they count
  }
  __device__ __forceinline__ void wait_for_older() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
  }
#endif
};
