// Where the tokens of chunks go and which tokens they see, in pages: a block for each request.
//
// Compiled by NVRTC with these macros:
//   TOKENS   of a page; KV_HEADS: its heads
//   ROOM     tokens of K, and of V, that a page of a head holds as a part of a ring
//   RINGS    pages of a request's ring
//   THREADS  of a block; ARGUMENTS_BYTES: size of Arguments on the host
struct Request {
  int row, first;    // of the tables; new token of the step
  int start;         // first of its opened tokens, those of its ring and its new ones
  int tail, opened;  // tokens in the ring; those and new ones
  int past, full;    // pages before; those that become full
  int page, rest;    // first of all pages that become full, and of all tokens after them
  int far, window;   // pages that windows read, and the first of them
};
struct Arguments {
  const Request* requests;
  const int *table, *blocks;  // rows of pages: packed ones; those of rings
  long long table_stride, blocks_stride;
  const long long* slots;  // of new tokens; below 0: the request is not kept
  long long* opened;       // a new token, or the complement of a ring row; null: no ring is read
  long long *rest, *rest_at;  // opened tokens that go into rings, and the complements of their rows
  long long* full;            // opened tokens of full pages
  int *pages, *past;          // pages that become full; those that windows read
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// The row of K of head 0.
__device__ __forceinline__ long long ring_row(const int* blocks, int position) {
  const int slot = position % (RINGS * ROOM);
  return (long long)blocks[slot / ROOM] * (KV_HEADS * 2 * ROOM) + slot % ROOM;
}

extern "C" __global__ void chunk_numbers(const __grid_constant__ Arguments at) {
  const Request request = at.requests[blockIdx.x];
  const int thread = threadIdx.x, begin = request.past * TOKENS, done = request.full * TOKENS;
  const int* table = at.table + request.row * at.table_stride;
  const int* blocks = at.blocks + request.row * at.blocks_stride;
  const bool kept = at.slots[request.first] >= 0;
  if (at.opened)
    for (int i = thread; i < request.opened; i += THREADS)
      at.opened[request.start + i] = i < request.tail ? ~ring_row(blocks, begin + i)
                                                      : request.first + i - request.tail;
  for (int i = thread; i < request.opened - done; i += THREADS) {
    at.rest[request.rest + i] = request.start + done + i;
    at.rest_at[request.rest + i] = kept ? ~ring_row(blocks, begin + done + i) : 0;
  }
  for (int i = thread; i < done; i += THREADS)
    at.full[request.page * TOKENS + i] = request.start + i;
  for (int i = thread; i < request.full; i += THREADS)
    at.pages[request.page + i] = kept ? table[request.past + i] : 0;
  for (int i = thread; i < request.far; i += THREADS) at.past[request.window + i] = table[i];
}
