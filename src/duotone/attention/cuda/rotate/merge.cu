// Merges the parts of every kv head where the values of some are in a basis, and rotates these
// back: the last launch of a call, instead of merge_parts.cu.
//
//   out = (sum of each basis's parts @ its matrix + sum of the others) / sum of all weights
//
// Compiled by NVRTC with these macros:
//   BASES  1 or 2
//   CHANNELS, G, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES  as in spans/decode.cu
//   ROWS, COLUMNS, DEPTH  as in rotate/product.cuh
#include "shared/call.cuh"
#include "rotate/product.cuh"
#include "shared/merged.cuh"

struct Arguments : Call {
  const float *matrices, *other_matrices;  // [CHANNELS, CHANNELS] of each kv head, by basis
  long long matrix_stride, other_stride;   // between them; 0: all have the same
  int rotated_parts, other_parts;          // parts in each basis, the first ones
  int rows;                                // of a kv head, batch * G
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// Where rows are few, several threads share the parts of a row.
#define QUADS (ROWS * CHANNELS / 4)
#define SHARES (THREADS / QUADS)
static_assert(SHARES > 0, "a thread merges four channels of a row");

// Sums of a share, or of all: by basis, then of what is in none. [SHARES or 1]
#define SUMS (BASES + 1)
struct __align__(16) Sums {
  float of[SUMS][ROWS][CHANNELS];
  float2 weights[ROWS];  // maximum and weight

  // Under the largest of the maxima.
  __device__ __forceinline__ void put(int r, int c, Merged (&x)[SUMS]) {
    float top = x[0].m, l = 0.f;
#pragma unroll
    for (int b = 1; b < SUMS; b++) top = fmaxf(top, x[b].m);
#pragma unroll
    for (int b = 0; b < SUMS; b++) {
      x[b].raise(top), l += x[b].l;
      *(float4*)&of[b][r][c] = make_float4(x[b].sum[0], x[b].sum[1], x[b].sum[2], x[b].sum[3]);
    }
    if (c == 0) weights[r] = make_float2(top, l);
  }
};

// The sums of one share's parts.
__device__ __forceinline__ void merge_share(const Arguments& at, const Tile& tile, Sums& to,
                                            int share, int r, int c) {
  const int head = tile.head(r), h = tile.q_head(r);
  const int both = at.rotated_parts + at.other_parts;  // 0 of another basis, where there is none
  const int ends[] = {at.rotated_parts, BASES == 2 ? both : at.all_parts, at.all_parts};
  Merged x[SUMS];
#pragma unroll
  for (int b = 0; b < SUMS; b++) {
    const int first = b == 0 ? 0 : ends[b - 1], parts = ends[b] - first;
    x[b] = merged<4>(at, head, h, c, first + parts * share / SHARES,
                     first + parts * (share + 1) / SHARES);
  }
  to.put(r, c, x);
}

// The sums of all shares.
__device__ __forceinline__ void merge_shares(const Sums* shares, Sums& to, int r, int c) {
  Merged x[SUMS];
  for (int s = 0; s < SHARES; s++) x[0].m = fmaxf(x[0].m, shares[s].weights[r].x);
#pragma unroll
  for (int b = 0; b < SUMS; b++) {
    x[b].m = x[0].m;
#pragma unroll
    for (int s = 0; s < SHARES; s++) {
      const float2 weight = shares[s].weights[r];
      const float2 own = make_float2(weight.x, b == 0 ? weight.y : 0.f);
      x[b].add(own, *(const float4*)&shares[s].of[b][r][c]);
    }
  }
  to.put(r, c, x);
}

// Adds the product of the first basis to what is in none.
__device__ __forceinline__ void add_product(const Tile& tile, Sums& all, const float* sums) {
  for (int i = threadIdx.x * 4; i < ROWS * COLUMNS; i += THREADS * 4) {
    const int row = i / COLUMNS, column = tile.first_column + i % COLUMNS;
    const float4 x = all_slices(sums, row, i % COLUMNS);
    float4& y = *(float4*)&all.of[BASES][row][column];
    y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    merge_rotated(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  begin();
  Sums *all = (Sums*)shared, *shares = all + 1;
  float* sums = (float*)shares;  // once the shares are merged
  const Tile tile(at.kv_heads, at.rows);
  Product product;
  product.load(at.matrices + tile.kv_head * at.matrix_stride, tile);
  wait_for_all();
  const int share = threadIdx.x / QUADS, r = threadIdx.x * 4 / CHANNELS % ROWS,
            c = threadIdx.x * 4 % CHANNELS;
  const bool merges = share < SHARES && tile.has(r);
  if (merges) merge_share(at, tile, shares[share], share, r, c);
  __syncthreads();
  if (merges && share == 0) merge_shares(shares, *all, r, c);
  __syncthreads();
  product.multiply(all->of[0][0], sums);
  __syncthreads();
#if BASES == 2
  add_product(tile, *all, sums);
  product.load(at.other_matrices + tile.kv_head * at.other_stride, tile);
  __syncthreads();
  product.multiply(all->of[1][0], sums);
  __syncthreads();
#endif
  for (int i = threadIdx.x * 4; i < ROWS * COLUMNS; i += THREADS * 4) {
    const int row = i / COLUMNS, column = tile.first_column + i % COLUMNS;
    if (!tile.has(row)) continue;
    const float4 x = all_slices(sums, row, i % COLUMNS);
    const float4 y = *(const float4*)&all->of[BASES][row][column];
    const float both[4] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    const float2 weight = all->weights[row];
    write_out(at, tile.head(row), tile.q_head(row), column, weight.x, weight.y, both);
  }
}
