// Decode attention on short spans in canonical order: pictures that fill no tile of records.
//
// A warp takes one span after the other. A lane has tokens while scores are computed, and slots of
// V while these are summed. Codes meet q and the softmax's weights in fp32, as they are packed: a
// row of a few bytes is no operand of matrix units, and filled up it would be more bytes.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V
//   KN4, KN2, KN1, VN4, VN2, VN1  channels of K and of V with codes of 4, 2 and 1 bits
//   K_RANKED, V_RANKED  1: classes of channels differ by span; 0: all channels are one class
//   K_SMALL, V_SMALL    1: scales and zero-points have 8 bits; 0: they are fp16
//   ROUNDS_OF_TOKENS    tokens of a lane that are staged together
//   SLOT_BYTES          half of a warp's memory
//   G, WARPS, PER_SM, STAGES, QUERY, OUT, OVERLAP, MERGE, ARGUMENTS_BYTES  as in spans/decode.cu
#define D CHANNELS
#define HEADS G
#define KEYS 1
#define PACKED_TILE_BYTES SLOT_BYTES
#define ONE_RUN
#include "shared/common.cuh"
#include "shared/small_floats.cuh"
#include "short/row.cuh"
#include "short/parameters.cuh"
#include "short/span.cuh"
static_assert(STAGES == 2 && WARP_BYTES <= STAGES * SLOT_BYTES, "a warp's memory is too small");

struct Arguments : Call {
  const unsigned char *key, *value;            // [batch * kv_heads, row_tokens, bytes of a row]
  const unsigned char *k_numbers, *v_numbers;  // classes of channels, or null
  const void *k_scale, *k_zero, *v_scale, *v_zero;  // rows of blocks
  int row_tokens, spans;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

typedef Levels<Keys, K_SMALL, K_RANKED> KeyLevels;
typedef Levels<Values, V_SMALL, V_RANKED> ValueLevels;

// q times K's parameters, by slot and head; returns q times what all codes have in common.
__device__ __forceinline__ void fold_query(float* offset, float* folded, const float (*q)[D],
                                           const KeyLevels& levels, int lane) {
  for (int i = lane; i < Keys::SLOTS * G; i += 32) folded[i] = 0.f;
  __syncwarp();
#pragma unroll
  for (int h = 0; h < G; h++) {
    offset[h] = 0.f;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const int c = 32 * i + lane;
      const float x = c < CHANNELS ? q[h][c] : 0.f;
      offset[h] = fmaf(x, levels.level[i], offset[h]);
      if (levels.slot[i] >= 0) folded[levels.slot[i] * G + h] = x * levels.unit[i];
    }
    offset[h] = sum_of_lanes(offset[h]);
  }
  __syncwarp();
}

// Attention of the kv head to tokens `from` to `to`, one span.
__device__ __forceinline__ void attend_span(const Arguments& at, const Unit& u, char* memory,
                                            const float (*q)[D], const Columns& columns,
                                            Sums& sums, int row, int from, int to) {
  float *folded = (float*)(memory + FOLDED_AT), *weights = (float*)(memory + WEIGHTS_AT);
  const size_t first = (size_t)u.head * at.row_tokens;
  KeyLevels of_keys;
  ValueLevels of_values;
  float offset[G];
  sums.enter();
  for (int t = from; t < to; t += ROOM) {
    const int n = min(to - t, ROOM);
    const unsigned char* keys = copy_codes(memory + KEYS_AT, at.key + (first + t) * Keys::BYTES,
                                           n * Keys::BYTES, u.lane);
    const unsigned char* values = copy_codes(
        memory + VALUES_AT, at.value + (first + t) * Values::BYTES, n * Values::BYTES, u.lane);
    if (t == from) {
      of_keys.load(at.k_numbers, at.k_scale, at.k_zero, row, u.lane);
      of_values.load(at.v_numbers, at.v_scale, at.v_zero, row, u.lane);
      fold_query(offset, folded, q, of_keys, u.lane);
    }
    wait_for_codes();
    float s[ROUNDS_OF_TOKENS][G] = {};
    dot_bytes<4, 0, Keys::B4, 0>(s, keys, folded, u.lane);
    dot_bytes<2, Keys::B4, Keys::B2, Keys::S2>(s, keys, folded, u.lane);
    dot_bytes<1, Keys::B4 + Keys::B2, Keys::B1, Keys::S1>(s, keys, folded, u.lane);
#pragma unroll
    for (int r = 0; r < ROUNDS_OF_TOKENS; r++)
#pragma unroll
      for (int h = 0; h < G; h++)
        s[r][h] = 32 * r + u.lane < n ? (s[r][h] + offset[h]) * at.sm_scale : MINUS_INFINITY;
    sums.weigh(s, weights, u.lane);
    __syncwarp();
    sums.add(columns, weights, values, n);
    __syncwarp();
  }
  sums.leave((float*)memory, folded, of_values, u.lane);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)
    short_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float ml[WARPS][HEADS][2];
  __shared__ float query[G][D];
  __shared__ int flag;
  begin();
  wait_for_query();
  Unit u;
  find_sub_block(u);
  u.part = blockIdx.x, u.kv_head = blockIdx.y, u.sequence = blockIdx.z;
  u.head = u.sequence * at.kv_heads + u.kv_head;
  const query_t* rows = at.query + (size_t)u.head * G * CHANNELS;
  for (int i = u.tid; i < G * CHANNELS; i += WARPS * 32)
    query[i / CHANNELS][i % CHANNELS] = query_to_float(rows[i]);
  char* memory = (char*)sums_of(shared, u.warp);
  Columns columns;
  columns.find(u.lane);
  Sums sums;
  sums.clear((float*)memory, u.lane);
  __syncthreads();
  const Share share = share_of(at, at.spans, u.part);
  const long long* edges = at.tokens + (size_t)u.sequence * (at.spans + 1);
  for (int span = share.first + u.warp; span < share.last; span += WARPS) {
    const int from = (int)edges[span], to = (int)edges[span + 1];
    if (from < to)
      attend_span(at, u, memory, query, columns, sums, u.head * at.spans + span, from, to);
  }
  if (u.lane == 0)
#pragma unroll
    for (int h = 0; h < G; h++) ml[u.warp][h][0] = sums.top[h], ml[u.warp][h][1] = sums.weight[h];
  finish(at, u, shared, ml, &flag, 0.f, [](int, float, float sum) { return sum; });
}
