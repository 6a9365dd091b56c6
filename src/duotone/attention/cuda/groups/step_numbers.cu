// Where the tokens of a decode step go and which tokens they see, in pages: a thread for each
// request.
//
// Compiled by NVRTC with these macros:
//   TOKENS   of a page
//   RINGS    pages of a request's ring; TABLES: most tables that name them
//   THREADS  of a block; ARGUMENTS_BYTES: size of Arguments on the host
struct Table {
  const int* pages;           // of a request, in its row
  long long stride, columns;  // numbers from row to row; columns 0: no table
};
struct Arguments {
  const int* lengths;      // [count] tokens with the new one; 0: a row that fills up the batch
  Table pages;             // of packed tokens
  Table rings[TABLES];     // pages of rings, one after the other
  const long long* slots;  // [count] below 0: the new token is not kept
  long long *packed, *dense, *position;  // [count]
  int *full, *ring_pages;                // [count], [count, RINGS]
  long long count;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

extern "C" __global__ void step_numbers(const __grid_constant__ Arguments at) {
  const int n = blockIdx.x * THREADS + threadIdx.x;
  if (n >= at.count) return;
  const int position = at.lengths[n] - 1, whole = position < 0 ? 0 : position / TOKENS;
  const bool kept = position >= 0 && at.slots[n] >= 0;
  at.packed[n] = whole * TOKENS;
  at.dense[n] = position + 1 - whole * TOKENS;
  at.position[n] = kept ? position : -1;
  const bool is_last = position % TOKENS == TOKENS - 1;
  at.full[n] = kept && is_last ? at.pages.pages[n * at.pages.stride + whole] : 0;
  int ring = 0;
#pragma unroll
  for (int table = 0; table < TABLES; table++)
    for (int i = 0; i < at.rings[table].columns && ring < RINGS; i++, ring++) {
      const Table& from = at.rings[table];
      at.ring_pages[n * RINGS + ring] = kept ? from.pages[n * from.stride + i] : 0;
    }
}
