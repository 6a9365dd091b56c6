// 32 tokens of K or V in shared memory: rows of D elements with 16 bytes between them. Eight rows
// so lie in different banks.
//
// Expects CHANNELS, D and
//   ALIGN    bytes that pointers and strides are multiples of, 2 to 16
//   SHARERS  warps that share a tile, of the block's WARPS; one where it is not defined
#define TILE 32
#define ROW_BYTES (D * ELEMENT_BYTES + 16)
#define TILE_BYTES (TILE * ROW_BYTES)

// Dense K or V, [batch, kv_heads, tokens, CHANNELS]; strides in bytes.
struct Dense {
  const char* data;
  long long batch, head;
  int token;
};

// Zeros after the channels of a tile's rows.
__device__ __forceinline__ void fill_rows(u32 tile, u32 lane, u32 part, u32 parts) {
  constexpr u32 MISSING = (D - CHANNELS) * ELEMENT_BYTES / 2;
  for (u32 n = 32 * part + lane; n < TILE * MISSING; n += 32 * parts)
    store_shared_half(tile + n / MISSING * ROW_BYTES + CHANNELS * ELEMENT_BYTES + n % MISSING * 2,
                      0);
}

// Starts to load ALIGN bytes of a token, or zeros where its position is -1.
template <bool WHOLE>
__device__ __forceinline__ void copy_unit(u32 target, const char* column, int stride,
                                          int position) {
  const bool real = WHOLE || position >= 0;
  const char* source = column + (long long)(WHOLE ? position : max(position, 0)) * stride;
  if constexpr (ALIGN == 2)
    store_shared_half(target, real ? *(const u16*)source : 0);
  else
    copy_async<ALIGN>(target, source, real);
}
// Starts to load a tile, or one of `parts` of it. Lane l gives the position of token l; -1: none,
// which becomes 0. WHOLE: there is no such token.
template <bool WHOLE = false>
__device__ __forceinline__ void copy_tile(u32 tile, const char* head, int stride, int position,
                                          u32 lane, u32 part = 0, u32 parts = 1) {
  constexpr u32 UNITS = CHANNELS * ELEMENT_BYTES / ALIGN;
  const u32 first = 32 * part + lane;
  if (32 * parts % UNITS == 0) {  // a lane's units lie below each other: at constant distances
    const u32 rows = 32 * parts / UNITS, row = first / UNITS, at = first % UNITS * ALIGN;
    const u32 target = tile + row * ROW_BYTES + at;
#pragma unroll 8
    for (u32 n = 0; n < TILE; n += rows)
      copy_unit<WHOLE>(target + n * ROW_BYTES, head + at, stride,
                       __shfl_sync(FULL, position, row + n));
  } else {
#pragma unroll 8
    for (u32 n = first; n < TILE * UNITS; n += 32 * parts) {
      const u32 row = n / UNITS, at = n % UNITS * ALIGN;
      copy_unit<WHOLE>(tile + row * ROW_BYTES + at, head + at, stride,
                       __shfl_sync(FULL, position, row));
    }
  }
  fill_rows(tile, lane, part, parts);
}

// Loads a tile and waits for it.
__device__ __forceinline__ void load_tile(u32 tile, const char* head, int stride, int position,
                                          u32 lane) {
  copy_tile(tile, head, stride, position, lane);
  wait_for_copies();
  __syncwarp();
}

// Elements of an operand A of m16n8k16. With g = lane / 4, t = lane % 4, register i has
//   row 16 row_tile + g + 8 (i % 2), k = 16 chunk + 2 t + 8 (i / 2) + half
// TRANSPOSED: rows are channels.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_fragment(Pair* x, u32 tile, int row_tile, int chunk,
                                              int lane) {
#if INPUT == 2
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = 16 * row_tile + g + 8 * (i % 2), k = 16 * chunk + 2 * t + 8 * (i / 2) + half;
      const int token = TRANSPOSED ? k : row, channel = TRANSPOSED ? row : k;
      x[i].x[half] = __uint_as_float(load_shared(tile + token * ROW_BYTES + channel * 4));
    }
#else
  const int row = 16 * row_tile + 8 * (lane >> 3 & 1), k = 16 * chunk + 8 * (lane >> 4);
  const int token = (TRANSPOSED ? k : row) + (lane & 7), channel = TRANSPOSED ? row : k;
  load_matrices<TRANSPOSED>(x, tile + token * ROW_BYTES + channel * 2);
#endif
}

// The warps that share a tile are here, each after its own copies.
__device__ __forceinline__ void wait_for_sharers() {
#if SHARERS > 1
  static_assert(WARPS / SHARERS < NAMED_BARRIERS, "barrier 0 is of all warps");
  meet_some(1 + threadIdx.x / (32 * SHARERS), 32 * SHARERS);
#else
  __syncwarp();
#endif
}

// Registers 2 half and 2 half + 1 of two such operands whose rows are channels, chunks 0 and 1.
__device__ __forceinline__ void load_halves(Pair* x, u32 tile, int row_tile, int half, int lane) {
#if INPUT == 2
  Pair y[4];
#pragma unroll
  for (int chunk = 0; chunk < 2; chunk++) {
    load_fragment<true>(y, tile, row_tile, chunk, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) x[2 * chunk + i] = half ? y[2 + i] : y[i];
  }
#else
  const int channel = 16 * row_tile + 8 * (lane >> 3 & 1);
  const int token = 16 * (lane >> 4) + 8 * half + (lane & 7);
  load_matrices<true>(x, tile + token * ROW_BYTES + channel * 2);
#endif
}

// Bytes of register i of 32 tokens that are among the first `left`, where byte j is a code of
//   K: token 8 i + g
//   V: token 8 (i / 2) + 2 t + 16 (j % 2) + j / 2
template <int VALUE>
__device__ __forceinline__ u32 real_bytes(int i, int left, int g, int t) {
  if (!VALUE) return 8 * i + g < left ? FULL : 0;
  u32 y = 0;
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (8 * (i / 2) + 2 * t + 16 * (j % 2) + j / 2 < left) y |= 0xFFu << 8 * j;
  return y;
}
