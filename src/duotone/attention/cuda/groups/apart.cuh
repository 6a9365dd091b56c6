// Records whose codes of K or V lie apart, in buffers that layers share: a record comes in pieces.
//
//     slot of the ring   | a record | codes of K | codes of V |       of the same tokens, if apart
//
// Expects K_APART_BYTES and V_APART_BYTES, of a record's tokens (0 where the record has its codes),
// and PIECES_BYTES, of all of it.
#if K_APART_BYTES || V_APART_BYTES
static_assert(!PAGED, "codes that lie apart lie in one piece");

struct Codes {
  const char* data;      // [batch * kv_heads, head_bytes]
  long long head_bytes;  // tokens of a head are adjacent, in whole records
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
  __device__ __forceinline__ void copy_record(int record, const Slot& slot) const {
    static_assert(BYTES == PIECES_BYTES && FROM == 0, "a pass reads all of it");
    slot.template expect<BYTES>();
    slot.template put<RECORD_BYTES>(0, at(record));
    if constexpr (K_APART_BYTES > 0)
      slot.template put<K_APART_BYTES>(RECORD_BYTES, k_codes + (size_t)record * K_APART_BYTES);
    if constexpr (V_APART_BYTES > 0)
      slot.template put<V_APART_BYTES>(RECORD_BYTES + K_APART_BYTES,
                                       v_codes + (size_t)record * V_APART_BYTES);
  }
};
#else
struct Arguments : Call {};

struct GroupUnit : Unit {
  __device__ __forceinline__ void find(const Arguments& at) { find_unit(at, *this); }
};
#endif
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
