// A ring with several records under way: with one, passes that read half of a record leave memory
// idle, and so do units of few records, whose warps all wait for their second one at the same time.
//
// UNDER_WAY: of STAGES slots, others hold the current record and the one before it, whose V is read
// late; where there is no slot for both, the one before is read before the ring is refilled.
#ifndef UNDER_WAY
#define UNDER_WAY (STAGES - 1)
#endif
static_assert(1 <= UNDER_WAY && UNDER_WAY < STAGES,
              "one record is read while others are under way");

struct DeepRing : Ring {
  int following[UNDER_WAY];  // records after the current one; the last of them is drawn with it

  static __device__ __forceinline__ int behind(int slot, int by = 1) {
    return slot + by >= STAGES ? slot + by - STAGES : slot + by;
  }
  // Asks for the first records of a pass: BYTES of each, from byte FROM on.
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void start(const U& u) {
    current = u.first + u.warp;
#pragma unroll
    for (int n = 0; n < UNDER_WAY; n++) {
      ask_into<BYTES, FROM>(u, current + n * WARPS, behind(slot, n));
      following[n] = current + (n + 1) * WARPS;
    }
  }
  // The same before lengths are known, which takes an answer of memory. Records that turn out to be
  // others' are waited for and left.
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void start_early(const Call& at, U& u, const Place& place) {
    guess_records(at, u, place);
    const int guess = u.first, there = asked(u);
    start<BYTES, FROM>(u);
    find_records(at, u, place);
    if (u.first == guess && asked(u) == there) return;
    for (int n = 0; n < there; n++) take_current();
    start<BYTES, FROM>(u);
  }
  // Records that `start` asks for.
  static __device__ __forceinline__ int asked(const Unit& u) {
    int records = 0;
#pragma unroll
    for (int n = 0; n < UNDER_WAY; n++) records += u.first + u.warp + n * WARPS < u.last;
    return records;
  }
  // As Ring's, behind the first records of all warps.
  __device__ __forceinline__ void reset(const Unit& u) {
    if (u.tid == 0) *drawn = u.first + UNDER_WAY * WARPS;
  }
  // Waits for the current record, and asks for one more, lane 0's `next`, where the record before
  // lay or was followed by a free slot: all lanes must have read what lay there.
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ u32 take(const U& u, int& next) {
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
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ int refill(const U& u) {
    int next = 0;
    if (u.lane == 0) next = draw();
#if !BULK_COPIES
    next = __shfl_sync(FULL, next, 0);
#endif
    ask_into<BYTES, FROM>(u, next, behind(slot, UNDER_WAY - 1));
    return next;
  }
  __device__ __forceinline__ void advance(int next) {
    following[UNDER_WAY - 1] = __shfl_sync(FULL, next, 0);
    current = following[0];
#pragma unroll
    for (int n = 1; n < UNDER_WAY; n++) following[n - 1] = following[n];
  }

#if BULK_COPIES
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void ask_into(const U& u, int record, int where) {
    if (u.lane == 0 && record < u.last)
      u.template copy_record<BYTES, FROM>(record,
                                          Slot{barrier + 8 * where, memory + where * SLOT_BYTES});
  }
  __device__ __forceinline__ void wait_for_older() { wait(); }
#else
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void ask_into(const U& u, int record, int where) {
    const Slot there = {memory + where * SLOT_BYTES, u.lane};
    if (record < u.last) u.template copy_record<BYTES, FROM>(record, there);
    asm volatile("cp.async.commit_group;" ::: "memory");  // also an empty one, so that they count
  }
  __device__ __forceinline__ void wait_for_older() {
    asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY - 1) : "memory");
    __syncwarp();
  }
#endif
};
