// Merges the parts of every kv head where the values of some are in a basis, and rotates these
// back: the last launch of a call, instead of merge_parts.cu.
//
//   out = (sum of the rotated parts @ matrix + sum of the others) / sum of all weights
//
// Compiled by NVRTC with these macros:
//   CHANNELS, G, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES  as in spans/decode.cu
//   ROWS, COLUMNS, DEPTH  as in rotate/product.cuh
#include "shared/call.cuh"
#include "rotate/product.cuh"
#include "shared/merged.cuh"

struct Arguments : Call {
  const float* matrices;    // [CHANNELS, CHANNELS] of each kv head
  long long matrix_stride;  // between them; 0: all have the same
  int rotated_parts, rows;  // parts in the basis, the first ones; rows of a kv head, batch * G
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// Where rows are few, several threads share the parts of a row.
#define QUADS (ROWS * CHANNELS / 4)
#define SHARES (THREADS / QUADS)
static_assert(SHARES > 0, "a thread merges four channels of a row");

// Sums of a share, or of all: in the basis and not. [SHARES or 1]
struct __align__(16) Sums {
  float rotated[ROWS][CHANNELS], plain[ROWS][CHANNELS];
  float2 weights[ROWS];  // maximum and weight

  // Under the larger of both maxima.
  __device__ __forceinline__ void put(int r, int c, Merged x, Merged y) {
    const float top = fmaxf(x.m, y.m);
    x.raise(top), y.raise(top);
    *(float4*)&rotated[r][c] = make_float4(x.sum[0], x.sum[1], x.sum[2], x.sum[3]);
    *(float4*)&plain[r][c] = make_float4(y.sum[0], y.sum[1], y.sum[2], y.sum[3]);
    if (c == 0) weights[r] = make_float2(top, x.l + y.l);
  }
};

// The sums of one share's parts.
__device__ __forceinline__ void merge_share(const Arguments& at, const Tile& tile, Sums& to,
                                            int share, int r, int c) {
  const int head = tile.head(r), h = tile.q_head(r), rotated = at.rotated_parts,
            plain = at.all_parts - rotated;
  const Merged x =
      merged<4>(at, head, h, c, rotated * share / SHARES, rotated * (share + 1) / SHARES);
  const Merged y = merged<4>(at, head, h, c, rotated + plain * share / SHARES,
                             rotated + plain * (share + 1) / SHARES);
  to.put(r, c, x, y);
}

// The sums of all shares.
__device__ __forceinline__ void merge_shares(const Sums* shares, Sums& to, int r, int c) {
  Merged x, y;
  for (int s = 0; s < SHARES; s++) x.m = fmaxf(x.m, shares[s].weights[r].x);
  y.m = x.m;
#pragma unroll
  for (int s = 0; s < SHARES; s++) {
    const float2 weight = shares[s].weights[r];
    x.add(weight, *(const float4*)&shares[s].rotated[r][c]);
    y.add(make_float2(weight.x, 0.f), *(const float4*)&shares[s].plain[r][c]);
  }
  to.put(r, c, x, y);
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
  product.multiply(all->rotated[0], sums);
  __syncthreads();
  for (int i = threadIdx.x * 4; i < ROWS * COLUMNS; i += THREADS * 4) {
    const int row = i / COLUMNS, column = tile.first_column + i % COLUMNS;
    if (!tile.has(row)) continue;
    const float4 x = all_slices(sums, row, i % COLUMNS);
    const float4 y = *(const float4*)&all->plain[row][column];
    const float both[4] = {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
    const float2 weight = all->weights[row];
    write_out(at, tile.head(row), tile.q_head(row), column, weight.x, weight.y, both);
  }
}
