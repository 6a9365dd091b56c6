// Dense K and V of packed tiles of 64 tokens: a block per tile and kv head.
//
// Expects INPUT of packing/device.cuh, CHANNELS (an even number), THREADS of a block and
// ARGUMENTS_BYTES of the host.

// Parameters of spans, and where the tokens go.
struct Side {
  const void *scale, *zero;    // [batch * kv_heads, spans, ..]: fp16, or rows of 8 bits
  const unsigned char* order;  // [batch * kv_heads, spans, CHANNELS], or null
  char* to;                    // [batch * kv_heads, tokens, CHANNELS]
};
struct Arguments {
  Side key, value;
  const char* packed_tiles;  // [batch * kv_heads, stored, ..], of which tiles hold tokens
  const int *token, *span;   // [batch, tiles * 64] and [batch, tiles]; -1: none
  int kv_heads, tiles, stored, tokens, spans;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// A block's tile. span: -1 without tokens. stored: number of the tile among all that are stored.
struct Tile {
  int head, span;
  long long stored;
  const int* token;

  __device__ __forceinline__ explicit Tile(const Arguments& at) : head(blockIdx.x / at.tiles) {
    const int of_head = blockIdx.x - head * at.tiles;
    const long long of_sequence = (long long)(head / at.kv_heads) * at.tiles + of_head;
    span = at.span[of_sequence], token = at.token + of_sequence * 64;
    stored = (long long)head * at.stored + of_head;
  }
  // Row of the parameters.
  __device__ __forceinline__ long long row(const Arguments& at) const {
    return (long long)head * at.spans + span;
  }
  // Two channels of a token at a time. number: of (token of the tile, channel).
  template <class Number>
  __device__ __forceinline__ void write(const Arguments& at, char* to, Number number) const {
    char* first = to + (long long)head * at.tokens * CHANNELS * ELEMENT_BYTES;
    for (int n = threadIdx.x; n < 64 * (CHANNELS / 2); n += THREADS) {
      const int t = n / (CHANNELS / 2), c = n % (CHANNELS / 2) * 2;
      if (token[t] < 0) continue;
      *(Pair*)(first + ((long long)token[t] * CHANNELS + c) * ELEMENT_BYTES) =
          pair_of(number(t, c), number(t, c + 1));
    }
  }
};
__device__ __forceinline__ void copy_words(uint4* to, const char* from, int bytes) {
  for (int n = threadIdx.x; n < bytes / 16; n += THREADS) to[n] = ((const uint4*)from)[n];
}
__device__ __forceinline__ float level(u32 code, float scale, float zero) {
  return __fadd_rn(__fmul_rn((float)code, scale), zero);
}
