// Arguments of the kernels that find levels (levels/search.py), and the block of tokens that a
// block of threads works at.
//
// Compiled by NVRTC with these macros:
//   CHANNELS    channels of the tensor
//   N4, N2, N1  how many of them have 4, 2 and 1 bits; RANKED: which ones is decided here
//   LLOYD, ENERGY, GAIN (0: none, 1: a number, 2: fitted): what else the spec has
//   INPUT       type of the tensor, 0: fp16, 1: bf16, 2: fp32; ALIGN: bytes that it is aligned to
//   THREADS, ARGUMENTS_BYTES
#define CODED (N4 + N2 + N1)

struct Arguments {
  Dense x;
  const long long* offsets;  // [batch, blocks + 1] of blocks of tokens
  float* moments;            // [rows, splits, 2, CHANNELS], about the block's first token
  float* power;              // [rows, splits, CHANNELS] about the mean, weighed
  float* weight;             // [batch * kv_heads, tokens] by energy
  float* fine;               // [rows, 3, CHANNELS]: mean, scale, offset before the fitted gain
  float* spread;             // [some rows, spread_parts, SPREAD_CHANNELS, SPREAD_CHANNELS]
  float* products;           // [rows, gain_parts, 2] with it
  u16 *chosen_scale, *chosen_zero, *scale;  // [rows, CODED], by rank, as the rest
  u16* zero;                                // [rows, CHANNELS]
  long long* order;                         // [rows, CHANNELS]
  int kv_heads, blocks, tokens, splits;
  int strip_row;  // elements between channels in shared memory, a multiple of 16 bytes
  int first_row, spread_parts, gain_parts;  // first_row: of a launch for gains
  float energy, gain, shrink;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// Tokens [first, first + tokens) of a head. row: head * blocks + block.
struct Block {
  int row, head, first, tokens;
  const char* data;  // its first token

  __device__ __forceinline__ Block(const Arguments& at, int row) : row(row) {
    head = row / at.blocks;
    const int sequence = head / at.kv_heads;
    const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1) + row % at.blocks;
    first = (int)edge[0], tokens = (int)(edge[1] - edge[0]);
    data = at.x.data + sequence * at.x.batch + head % at.kv_heads * at.x.head +
           (long long)first * at.x.token;
  }
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(FULL, x, mask);
  return x;
}

__device__ __forceinline__ float element_at(const char* row, int channel) {
#if INPUT == 2
  return ((const float*)row)[channel];
#else
  const Pair x = {((const u16*)row)[channel]};
  return number(x, 0);
#endif
}

// A moment of a channel, 0 or 1, over all parts of the block.
__device__ __forceinline__ float moment(const Arguments& at, const Block& block, int which, int c) {
  const float* from = at.moments + ((long long)block.row * at.splits * 2 + which) * CHANNELS + c;
  float sum = 0.f;
  for (int s = 0; s < at.splits; s++) sum += from[(long long)s * 2 * CHANNELS];
  return sum;
}
// About the first token, so that rounding of the sum cannot move the mean of equal elements.
__device__ __forceinline__ float mean_of(const Arguments& at, const Block& block, int c) {
  return block.tokens ? element_at(block.data, c) + moment(at, block, 0, c) / block.tokens : 0.f;
}
