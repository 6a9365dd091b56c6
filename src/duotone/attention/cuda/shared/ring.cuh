// A warp's ring of packed tiles; warps draw them from a counter, since the order of keys is free.
//
// Expects WARPS, STAGES and PACKED_TILE_BYTES, and
//   STAGES      slots of a warp's ring: IN_FLIGHT of them, the current packed tile, and the one
//               before it, whose V is read late. Where there is no slot for both, the one before is
//               read before the ring is refilled
//   IN_FLIGHT   packed tiles that a warp has loads in flight for (STAGES - 1 where it is not
//               defined). With one, passes that read half of a packed tile leave memory idle. So do
//               units of few packed tiles, whose warps all wait for their second one at a time
//   IN_TURN     1: a warp takes every WARPS-th packed tile instead, so that the same call gives the
//               same bits. Else timing decides which warp draws which packed tile, and so the order of
//               fp32 sums (0 where it is not defined)
//   SLOT_BYTES  room for a packed tile with all its pieces, or for the part that a pass reads
//               (PACKED_TILE_BYTES where it is not defined)
#ifndef IN_FLIGHT
#define IN_FLIGHT (STAGES - 1)
#endif
#ifndef SLOT_BYTES
#define SLOT_BYTES PACKED_TILE_BYTES
#endif
#ifndef IN_TURN
#define IN_TURN 0
#endif
#define RINGS_BYTES (WARPS * STAGES * SLOT_BYTES)  // of a sub-block
static_assert(1 <= IN_FLIGHT && IN_FLIGHT < STAGES,
              "one packed tile is read while others are in flight");
// From compute capability 9.0 on, a packed tile is a bulk copy for each of its pieces, whose bytes
// a barrier counts. Before 9.0 the lanes copy 16 bytes each at a time.
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
// Where a packed tile goes, for the lane that loads.
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
// Where a packed tile goes, for all lanes.
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
  int current, following[IN_FLIGHT];  // the last of those after it is drawn with the current one
#if BULK_COPIES
  u32 barrier, phase;
#endif

  __device__ __forceinline__ void make(const Unit& u, char* shared, u64* barriers, int* draws) {
    memory = pinned(shared_address(shared) + u.warp * (STAGES * SLOT_BYTES), u.lane);
    slot = 0;
    drawn = draws;
    // Pinned: the compiler would add once for all lanes at an address that it knows to be equal for
    // them. That takes a dozen instructions, though one lane draws.
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
  static __device__ __forceinline__ int after(int slot, int by = 1) {
    return slot + by >= STAGES ? slot + by - STAGES : slot + by;
  }
  // Loads the first packed tiles of a pass: BYTES of each, from byte FROM on.
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void start(const U& u) {
    current = u.first + u.warp;
#pragma unroll
    for (int n = 0; n < IN_FLIGHT; n++) {
      load_into<BYTES, FROM>(u, current + n * WARPS, after(slot, n));
      following[n] = current + (n + 1) * WARPS;
    }
  }
  // Loads them before lengths are known, for which memory must answer. Packed tiles that prove to
  // be others' are waited for and left.
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void start_early(const Call& at, U& u, const UnitTokens& tokens) {
    guess_packed_tiles(at, u, tokens);
    const int guess = u.first, there = first_loads(u);
    start<BYTES, FROM>(u);
    find_packed_tiles(at, u, tokens);
    if (u.first == guess && first_loads(u) == there) return;
    for (int n = 0; n < there; n++) take_current();
    start<BYTES, FROM>(u);
  }
  // Packed tiles that `start` loads.
  static __device__ __forceinline__ int first_loads(const Unit& u) {
    int packed_tiles = 0;
#pragma unroll
    for (int n = 0; n < IN_FLIGHT; n++) packed_tiles += u.first + u.warp + n * WARPS < u.last;
    return packed_tiles;
  }
  // Puts the counter after the first packed tiles of all warps; a barrier of the sub-block must
  // stand between it and its draws.
  __device__ __forceinline__ void reset(const Unit& u) {
    if (u.tid == 0) *drawn = u.first + IN_FLIGHT * WARPS;
  }
  // Waits for the current packed tile, and loads one more, lane 0's `next`. It goes into the slot
  // of the previous packed tile, or into a free one. All lanes must have read what lay there.
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ u32 take(const U& u, int& next) {
    const u32 here = take_current();
    next = refill<BYTES, FROM>(u);
    return here;
  }
  // Where the packed tile lies that is taken next.
  __device__ __forceinline__ u32 upcoming() const { return memory + slot * SLOT_BYTES; }
  // The first half of `take`, for kernels that still read the previous packed tile; then `refill`.
  __device__ __forceinline__ u32 take_current() {
    wait_for_older();
    const u32 here = upcoming();
    slot = after(slot);
#if BULK_COPIES
    if (slot == 0) phase ^= 1;
#endif
    return here;
  }
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ int refill(const U& u) {
    int next = 0;
    if (u.lane == 0) next = IN_TURN ? current + IN_FLIGHT * WARPS : draw();
#if !BULK_COPIES
    next = __shfl_sync(FULL, next, 0);
#endif
    load_into<BYTES, FROM>(u, next, after(slot, IN_FLIGHT - 1));
    return next;
  }
  // On to the next packed tile; what the lanes have read so far may be overwritten from here on.
  __device__ __forceinline__ void advance(int next) {
    __syncwarp();
    following[IN_FLIGHT - 1] = __shfl_sync(FULL, next, 0);
    current = following[0];
#pragma unroll
    for (int n = 1; n < IN_FLIGHT; n++) following[n - 1] = following[n];
  }

  // After the last packed tile, which all lanes have read: they may write the ring's memory.
  __device__ __forceinline__ void leave() {
    __syncwarp();
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
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void load_into(const U& u, int packed_tile, int where) {
    if (u.lane == 0 && packed_tile < u.last)
      u.template copy_packed_tile<BYTES, FROM>(
          packed_tile, Slot{barrier + 8 * where, memory + where * SLOT_BYTES});
  }
  __device__ __forceinline__ void wait_for_older() { wait_for(barrier + 8 * slot, phase); }
#else
  template <int BYTES, int FROM, class U>
  __device__ __forceinline__ void load_into(const U& u, int packed_tile, int where) {
    const Slot there = {memory + where * SLOT_BYTES, u.lane};
    if (packed_tile < u.last) u.template copy_packed_tile<BYTES, FROM>(packed_tile, there);
    asm volatile("cp.async.commit_group;" ::: "memory");  // also an empty one, so that they count
  }
  __device__ __forceinline__ void wait_for_older() {
    asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT - 1) : "memory");
    __syncwarp();
  }
#endif
};
