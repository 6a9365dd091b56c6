// Queries into the basis of their keys: rows times the matrix of their kv head.
//
// Compiled by NVRTC with these macros:
//   CHANNELS, G, QUERY, OVERLAP, ARGUMENTS_BYTES  as in spans/decode.cu; OUT is 2
//   ROWS, COLUMNS, DEPTH  as in rotate/product.cuh
#include "shared/call.cuh"
#include "rotate/product.cuh"

struct Arguments {
  const query_t* query;   // [batch, kv_heads * G, CHANNELS]
  const float* matrices;  // [kv_heads, CHANNELS, CHANNELS]
  float* out;             // as query
  int kv_heads, rows;     // rows of a kv head: batch * G
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

static_assert(4 * THREADS >= ROWS * CHANNELS, "a thread reads four channels of a row");
struct __align__(4 * sizeof(query_t)) Four {
  query_t x[4];
};

__device__ __forceinline__ size_t row_of(const Tile& tile, int r) {
  return ((size_t)tile.head(r) * G + tile.q_head(r)) * CHANNELS;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rotate_queries(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  float *rows = (float*)shared, *sums = rows + ROWS * CHANNELS;
  const Tile tile(at.kv_heads, at.rows);
  Product product;
  product.load(at.matrices + (size_t)tile.kv_head * CHANNELS * CHANNELS, tile);
  // One read for each thread after the wait: all of them are in flight together.
  const int mine = threadIdx.x * 4, row = mine / CHANNELS;
  const bool reads = row < ROWS && tile.has(row);
  const Four* from = (const Four*)(at.query + row_of(tile, row) + mine % CHANNELS);
  wait_for_query();
  if (reads) {
    const Four q = *from;
#pragma unroll
    for (int j = 0; j < 4; j++) rows[mine + j] = query_to_float(q.x[j]);
  }
  __syncthreads();
  product.multiply(rows, sums);
  __syncthreads();
  for (int i = threadIdx.x * 4; i < ROWS * COLUMNS; i += THREADS * 4) {
    const int r = i / COLUMNS, c = i % COLUMNS;
    if (tile.has(r))
      *(float4*)(at.out + row_of(tile, r) + tile.first_column + c) = all_slices(sums, r, c);
  }
}
