// K and V of tokens into a buffer, from new tokens and from rings, or from a buffer into rings.
//
// A ring row is a row of 16-bit K in a pool of pages. A page of a kv head holds ROOM rows of K, then
// as many of V. Tokens name the row of kv head 0.
//
// Compiled by NVRTC with these macros:
//   ROW_BYTES  bytes of one head's K (and V) of a token, a multiple of 16
//   ROOM       tokens of a page
//   OPEN       1: into a buffer, 0: into rings
//   THREADS    of a block; ARGUMENTS_BYTES: size of Arguments on the host
struct Arguments {
  char* rows;              // the pool
  const char* states[2];   // K and V of tokens
  char* buffer[2];         // K and V, [count, kv_heads, ROW_BYTES]; null where OPEN is 0
  const long long* at;     // [count] a token of states, or the complement of a ring row
  const long long* token;  // [count] tokens of states, where OPEN is 0
  long long states_token[2], states_head[2];  // bytes
  int kv_heads, count;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
#define VECTORS (ROW_BYTES / 16)

extern "C" __global__ void ring_rows(const __grid_constant__ Arguments at) {
  const int i = blockIdx.x * THREADS + threadIdx.x, vector = i % VECTORS;
  const int row = i / VECTORS, head = row % at.kv_heads, n = row / at.kv_heads;
  if (n >= at.count) return;
  const long long place = at.at[n], token = OPEN ? place : at.token[n];
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const long long ring = ~place + (2 * head + which) * ROOM;
    uint4* in_ring = (uint4*)(at.rows + ring * ROW_BYTES) + vector;
    const uint4* in_states = (const uint4*)(at.states[which] + token * at.states_token[which] +
                                            head * at.states_head[which]) + vector;
#if OPEN
    uint4* target = (uint4*)at.buffer[which] + (long long)row * VECTORS + vector;
    *target = place < 0 ? *in_ring : *in_states;
#else
    if (place < 0) *in_ring = *in_states;
#endif
  }
}
