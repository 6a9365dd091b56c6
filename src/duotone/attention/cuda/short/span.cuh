// A warp's memory, and one span in it: q in the order of the codes, scores, sums of V.
//
// Expects parameters.cuh, and ROUNDS_OF_TOKENS: tokens of a lane that are staged together.
#define ROOM (32 * ROUNDS_OF_TOKENS)
#define SUMS_BYTES (G * (D + 8) * 4)
#define MOST_SLOTS (Keys::SLOTS > Values::SLOTS ? Keys::SLOTS : Values::SLOTS)
#define FOLDED_AT SUMS_BYTES
#define WEIGHTS_AT (FOLDED_AT + MOST_SLOTS * G * 4)
#define KEYS_AT (WEIGHTS_AT + ROOM * G * 4)
#define CODES_BYTES(ROW) ((ROOM * (ROW) + 15) / 16 * 16 + 16)
#define VALUES_AT (KEYS_AT + CODES_BYTES(Keys::BYTES))
#define WARP_BYTES (VALUES_AT + CODES_BYTES(Values::BYTES))
static_assert(SUMS_BYTES % 16 == 0 && FOLDED_AT % 16 == 0 && WEIGHTS_AT % 16 == 0, "vectors");
#define VALUES_OF_LANE ((Values::SLOTS + 31) / 32)  // slots 32 i + lane of V

// Copies bytes from any address: all units of 16 bytes that have some of them. Returns where the
// first byte is.
__device__ __forceinline__ const unsigned char* copy_codes(char* to, const unsigned char* from,
                                                           int bytes, int lane) {
  const int before = (int)((size_t)from & 15);
  const char* source = (const char*)from - before;
  const u32 address = shared_address(to);
  for (int at = lane * 16; at < bytes + before; at += 512)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(address + at), "l"(source + at)
                 : "memory");
  return (const unsigned char*)to + before;
}
__device__ __forceinline__ void wait_for_codes() {
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}
// N floats at an address that vectors of them allow.
template <int N>
__device__ __forceinline__ void load_floats(float* x, const float* from) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const float4 four = ((const float4*)from)[i];
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float2 two = ((const float2*)from)[i];
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
}

// Adds the products with BYTES of each of a lane's rows, whose codes have BITS.
template <int BITS, int BYTE, int BYTES, int SLOT>
__device__ __forceinline__ void dot_bytes(float (*s)[G], const unsigned char* keys,
                                          const float* folded, int lane) {
  constexpr int EACH = 8 / BITS;
#pragma unroll 2
  for (int j = 0; j < BYTES; j++) {
    u32 byte[ROUNDS_OF_TOKENS];
    float q[EACH * G];
#pragma unroll
    for (int r = 0; r < ROUNDS_OF_TOKENS; r++)
      byte[r] = keys[(32 * r + lane) * Keys::BYTES + BYTE + j];
    load_floats<EACH * G>(q, folded + (SLOT + j * EACH) * G);
#pragma unroll
    for (int e = 0; e < EACH; e++)
#pragma unroll
      for (int r = 0; r < ROUNDS_OF_TOKENS; r++) {
        const float x = near_one(byte[r], up_of(BITS, e), mask_of(BITS));
#pragma unroll
        for (int h = 0; h < G; h++) s[r][h] = fmaf(q[e * G + h], x, s[r][h]);
      }
  }
}

// Slots of V of a lane: their bytes in a row, and digits.
struct Columns {
  int byte[VALUES_OF_LANE], up[VALUES_OF_LANE];
  u32 mask[VALUES_OF_LANE];

  __device__ __forceinline__ void find(int lane) {
#pragma unroll
    for (int i = 0; i < VALUES_OF_LANE; i++) {
      const int slot = 32 * i + lane;
      const int bits = slot < Values::S2 ? 4 : slot < Values::S1 ? 2 : 1;
      const int within = slot - (bits == 4 ? 0 : bits == 2 ? Values::S2 : Values::S1);
      const int first = bits == 4 ? 0 : bits == 2 ? Values::B4 : Values::B4 + Values::B2;
      byte[i] = min(first + within * bits / 8, Values::BYTES - 1);
      up[i] = up_of(bits, within % (8 / bits)), mask[i] = mask_of(bits);
    }
  }
};

// softmax(q K^T) V of a warp's spans, under a maximum that is raised when it has to be.
struct Sums {
  float top[G], weight[G];   // of all spans, log2 of what a weight of 1 stands for
  float part[G], fade[G];    // weight of this span; what the sums of the others have become
  float acc[VALUES_OF_LANE][G];

  __device__ __forceinline__ void clear(float* sums, int lane) {
#pragma unroll
    for (int h = 0; h < G; h++) top[h] = -1e30f, weight[h] = 0.f;
    for (int i = lane; i < G * (D + 8); i += 32) sums[i] = 0.f;
  }
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int h = 0; h < G; h++) {
      part[h] = 0.f, fade[h] = 1.f;
#pragma unroll
      for (int i = 0; i < VALUES_OF_LANE; i++) acc[i][h] = 0.f;
    }
  }
  // s: scores (log2 units) of a lane's tokens; their weights go to `weights`, [token][head].
  __device__ __forceinline__ void weigh(const float (*s)[G], float* weights, int lane) {
#pragma unroll
    for (int h = 0; h < G; h++) {
      float most = s[0][h];
#pragma unroll
      for (int r = 1; r < ROUNDS_OF_TOKENS; r++) most = fmaxf(most, s[r][h]);
#pragma unroll
      for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
      const float raised = fmaxf(top[h], most), by = exp2_fast(top[h] - raised);
      float sum = 0.f;
#pragma unroll
      for (int r = 0; r < ROUNDS_OF_TOKENS; r++) {
        const float p = exp2_fast(s[r][h] - raised);
        weights[(32 * r + lane) * G + h] = p;
        sum += p;
      }
      top[h] = raised, fade[h] *= by, part[h] = fmaf(part[h], by, sum_of_lanes(sum));
#pragma unroll
      for (int i = 0; i < VALUES_OF_LANE; i++) acc[i][h] *= by;
    }
  }
  // Adds n tokens; those after them, up to the next fourth one, have no weight.
  __device__ __forceinline__ void add(const Columns& columns, const float* weights,
                                      const unsigned char* values, int n) {
    for (int t = 0; t < n; t += 4) {
      float p[4 * G];
      load_floats<4 * G>(p, weights + t * G);
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < VALUES_OF_LANE; i++) {
          const u32 byte = values[(t + j) * Values::BYTES + columns.byte[i]];
          const float x = near_one(byte, columns.up[i], columns.mask[i]);
#pragma unroll
          for (int h = 0; h < G; h++) acc[i][h] = fmaf(p[j * G + h], x, acc[i][h]);
        }
    }
  }
  // Adds the span to the sums by channel. placed: room for the sums by slot.
  template <class L>
  __device__ __forceinline__ void leave(float* sums, float* placed, const L& levels, int lane) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < VALUES_OF_LANE; i++)
      if (32 * i + lane < Values::SLOTS)
#pragma unroll
        for (int h = 0; h < G; h++) placed[(32 * i + lane) * G + h] = acc[i][h];
    __syncwarp();
#pragma unroll
    for (int h = 0; h < G; h++) {
      weight[h] = fmaf(weight[h], fade[h], part[h]);
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        const int c = 32 * i + lane;
        float x = part[h] * levels.level[i];
        if (levels.slot[i] >= 0) x = fmaf(placed[levels.slot[i] * G + h], levels.unit[i], x);
        if (c < CHANNELS) sums[h * (D + 8) + c] = fmaf(sums[h * (D + 8) + c], fade[h], x);
      }
    }
    __syncwarp();
  }
};
