// Packed tiles whose codes of K or V are stored separately, in buffers that layers share: they come
// in pieces.
//
//     slot of the ring   | a packed tile | codes of K | codes of V |
//
// The codes are of the same tokens, and in the slot where they are stored separately.
//
// Expects K_SEPARATE_BYTES and V_SEPARATE_BYTES, of a packed tile's tokens (0 where the packed tile
// has its codes), and PIECES_BYTES, of all of it. TAIL (groups/tail.cuh) is 0 where they are not 0.
#if K_SEPARATE_BYTES || V_SEPARATE_BYTES
static_assert(!PAGED, "separate codes are in one piece");

struct Codes {
  const char* data;      // [batch * kv_heads, head_bytes]
  long long head_bytes;  // tokens of a head are adjacent, in whole packed tiles
};
struct Arguments : Call {
  Codes key, value;
};

struct GroupUnit : Unit {
  const char *k_codes, *v_codes;

  __device__ __forceinline__ void find(const Arguments& at) {
    find_unit(at, *this);
    k_codes = at.key.data + head * at.key.head_bytes;
    v_codes = at.value.data + head * at.value.head_bytes;
  }
  template <int BYTES, int FROM = 0, class Slot>
  __device__ __forceinline__ void copy_packed_tile(int packed_tile, const Slot& slot) const {
    static_assert(BYTES == PIECES_BYTES && FROM == 0, "a pass reads all of it");
    slot.template expect<BYTES>();
    slot.template put<PACKED_TILE_BYTES>(0, at(packed_tile));
    if constexpr (K_SEPARATE_BYTES > 0)
      slot.template put<K_SEPARATE_BYTES>(PACKED_TILE_BYTES,
                                          k_codes + (size_t)packed_tile * K_SEPARATE_BYTES);
    if constexpr (V_SEPARATE_BYTES > 0)
      slot.template put<V_SEPARATE_BYTES>(PACKED_TILE_BYTES + K_SEPARATE_BYTES,
                                          v_codes + (size_t)packed_tile * V_SEPARATE_BYTES);
  }
};
#else
#if TAIL
struct Arguments : Call {
  const int* tail_pages;         // [batch, TAIL_PAGES]
  const long long* tail_tokens;  // [batch]
  long long query_stride;        // elements from a sequence's q to the next one's
};
#else
struct Arguments : Call {};
#endif

struct GroupUnit : Unit {
  __device__ __forceinline__ void find(const Arguments& at) { find_unit(at, *this); }
};
#endif
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// q of a unit's first q head; the others follow.
__device__ __forceinline__ const query_t* query_of(const Arguments& at, const Unit& u) {
#if TAIL
  return at.query + u.sequence * at.query_stride + (size_t)u.kv_head * G * CHANNELS;
#else
  return at.query + (size_t)u.head * G * CHANNELS;
#endif
}
