// Rows times the matrix of their kv head, in fp32.
//
// A thread keeps four columns of DEPTH rows of the matrix in registers. So a block reads its matrix
// once, and before it waits for the rows. The sums of all slices of the matrix meet in
// shared memory.
//
// Expects CHANNELS and G, and
//   ROWS     rows of a block: q heads of one kv head, of all sequences
//   COLUMNS  of the matrix, of a block
//   DEPTH    rows of the matrix, of a thread
#define SLICES (CHANNELS / DEPTH)
#define THREADS (SLICES * COLUMNS / 4)
static_assert(CHANNELS % DEPTH == 0 && CHANNELS % COLUMNS == 0, "a block has whole slices");
static_assert(DEPTH % 4 == 0 && COLUMNS % 4 == 0, "threads read four numbers");

// A block's rows and columns.
struct Tile {
  int kv_heads, rows, kv_head, first_row, first_column;

  // all: rows of a kv head, batch * G.
  __device__ __forceinline__ Tile(int heads, int all) : kv_heads(heads), rows(all) {
    const int tiles = (all + ROWS - 1) / ROWS, unit = blockIdx.x / (CHANNELS / COLUMNS);
    first_column = blockIdx.x % (CHANNELS / COLUMNS) * COLUMNS;
    kv_head = unit / tiles, first_row = unit % tiles * ROWS;
  }
  __device__ __forceinline__ bool has(int r) const { return first_row + r < rows; }
  // The kv head of row r among those of all sequences, and the row's q head in its group.
  __device__ __forceinline__ int head(int r) const {
    return (first_row + r) / G * kv_heads + kv_head;
  }
  __device__ __forceinline__ int q_head(int r) const { return (first_row + r) % G; }
};

struct Product {
  float matrix[DEPTH][4];

  // from: the matrix of the kv head.
  __device__ __forceinline__ void load(const float* from, const Tile& tile) {
    const int slice = threadIdx.x / (COLUMNS / 4), c = threadIdx.x % (COLUMNS / 4) * 4;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      const size_t row = slice * DEPTH + k;
      const float4 x = *(const float4*)(from + row * CHANNELS + tile.first_column + c);
      matrix[k][0] = x.x, matrix[k][1] = x.y, matrix[k][2] = x.z, matrix[k][3] = x.w;
    }
  }

  // rows: [ROWS, CHANNELS]. sums: [SLICES, ROWS, COLUMNS].
  __device__ __forceinline__ void multiply(const float* rows, float* sums) const {
    const int slice = threadIdx.x / (COLUMNS / 4), c = threadIdx.x % (COLUMNS / 4) * 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < DEPTH; k += 4) {
        const float4 x = *(const float4*)(rows + r * CHANNELS + slice * DEPTH + k);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          sum[j] = fmaf(x.x, matrix[k][j], sum[j]), sum[j] = fmaf(x.y, matrix[k + 1][j], sum[j]);
          sum[j] = fmaf(x.z, matrix[k + 2][j], sum[j]),
          sum[j] = fmaf(x.w, matrix[k + 3][j], sum[j]);
        }
      }
      *(float4*)(sums + (slice * ROWS + r) * COLUMNS + c) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
};

// Four columns of row r, from the block's column c on.
__device__ __forceinline__ float4 all_slices(const float* sums, int r, int c) {
  float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int slice = 0; slice < SLICES; slice++) {
    const float4 x = *(const float4*)(sums + (slice * ROWS + r) * COLUMNS + c);
    all.x += x.x, all.y += x.y, all.z += x.z, all.w += x.w;
  }
  return all;
}
