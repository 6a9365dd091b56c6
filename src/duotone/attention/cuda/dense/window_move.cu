// Tokens of windows of K and V to other slots, where a sequence's stage is full.
//
// Compiled by NVRTC with these macros:
//   ROW_BYTES  bytes of one head's K (and V) of a token, a multiple of 16
//   ARGUMENTS_BYTES  size of Arguments on the host
struct Arguments {
  char* states[2];              // windows; tokens of a head are adjacent
  const long long* from;        // [batch, moved] slots
  const long long* to;          // [batch, moved], none of which is in `from`
  const bool* full;             // [batch]
  long long batch[2], head[2];  // bytes
  int kv_heads, moved, rows;    // rows: batch * kv_heads * moved
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
#define VECTORS (ROW_BYTES / 16)

extern "C" __global__ void window_move(const __grid_constant__ Arguments at) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, vector = i % VECTORS, row = i / VECTORS;
  const int which = row >= at.rows, mine = row - which * at.rows;
  if (mine >= at.rows) return;
  const int token = mine % at.moved, of_all = mine / at.moved;
  const int sequence = of_all / at.kv_heads, head = of_all - sequence * at.kv_heads;
  if (!at.full[sequence]) return;
  char* states = at.states[which] + sequence * at.batch[which] + head * at.head[which];
  const long long slot = (long long)sequence * at.moved + token;
  ((uint4*)(states + at.to[slot] * ROW_BYTES))[vector] =
      ((const uint4*)(states + at.from[slot] * ROW_BYTES))[vector];
}
