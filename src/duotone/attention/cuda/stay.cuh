// Blocks that stay: where there are more units than places, a block takes every gridDim.x-th one.
//
// It asks for the first records of its next unit before it merges the sums of the present one. A
// warp's sums go where its last record was: its next one goes into the slot behind, and into that
// slot only when the block has met in the next unit. So a slot must have room for G rows of sums.
static_assert(!PERSISTENT || G * (D + 8) * 4 <= RECORD_BYTES, "sums need a slot");

struct Stay {  // in shared memory
  Share next;
  int sums[WARPS];  // where each warp's are

  // What memory says of the unit behind u, and what its beginning reads on its way to L2: asked for
  // before the beginning of u, which takes as long. wants(next): what that is.
  template <class F>
  __device__ __forceinline__ Edges ask(const Call& at, const Unit& u, F wants) const {
#if PERSISTENT
    Share after;
    const int sequence = place(at, u, after);
    if (u.tid == 0) wants(after);
    return read_edges(at, after, sequence);
#else
    return {};
#endif
  }
  // Writes it down; __syncthreads must stand between this and `following`.
  __device__ __forceinline__ void keep(const Call& at, const Unit& u, const Edges& edges) {
#if PERSISTENT
    Share after;
    find_records(at, after, place(at, u, after), edges);
    // Behind the last unit: one without records.
    after.unit = u.unit + gridDim.x;
    if (after.unit >= at.units) after.first = after.last = 0;
    if (u.tid == 0) next = after;
#endif
  }
  __device__ __forceinline__ Unit following(const Unit& u) const {
    Unit after = u;
    (Share&)after = next;
    return after;
  }
  // Room for this warp's sums, once its ring has left its last record: rows of D + 8 floats.
  __device__ __forceinline__ float* room(const Ring& ring, const Unit& u, char* shared) {
#if PERSISTENT
    const int slot = u.warp * STAGES + (ring.slot == 0 ? STAGES : ring.slot) - 1;
    if (u.lane == 0) sums[u.warp] = slot * RECORD_BYTES;
    return (float*)(shared + slot * RECORD_BYTES);
#else
    return sums_of(shared, u.warp);
#endif
  }
  __device__ __forceinline__ const float* rows(char* shared, int w) const {
#if PERSISTENT
    return (const float*)(shared + sums[w]);
#else
    return sums_of(shared, w);
#endif
  }
  // Whether there is another unit, which u becomes. Copies may go over the sums of the last one,
  // and lanes over all else of it.
  __device__ __forceinline__ bool go_on(const Call& at, Unit& u) const {
#if PERSISTENT
    u = following(u);
    if (u.unit >= at.units) return false;
    leave_to_copies();
    __syncthreads();
    return true;
#else
    return false;
#endif
  }

 private:
  // Where the unit behind u stands, the last one where there is none.
  static __device__ __forceinline__ int place(const Call& at, const Unit& u, Share& after) {
    return place_unit(at, after, min(u.unit + (int)gridDim.x, at.units - 1));
  }
};

// Asks for `bytes` from `from` on, whole 16 of them, without waiting: one thread.
__device__ __forceinline__ void to_l2(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  const u64 first = (u64)from & ~15ull, end = (u64)from + bytes + 15 & ~15ull;
  if (bytes > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(first), "r"((u32)(end - first)));
#endif
}
// q of a kv head.
__device__ __forceinline__ void query_to_l2(const Call& at, const Share& s) {
  const u32 count = G * CHANNELS;
  to_l2(at.query + (size_t)s.head * count, count * sizeof(query_t));
}
