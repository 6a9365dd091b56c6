// Arguments of the packing kernels of spans, and how their packed tiles lie.
//
// Expects CHANNELS, D, KB, VB, TILES, ARGUMENTS_BYTES.
struct Arguments {
  Dense key, value;
  const long long* index;                    // [batch, taken] tokens of K and V
  const long long* offsets;                  // [batch, blocks + 1] of the blocks, in taken tokens
  const int* first_packed_tiles;             // [batch, blocks]
  u16 *k_scale, *k_zero, *v_scale, *v_zero;  // [batch * kv_heads, blocks, CHANNELS]
  char* packed_tiles;  // [batch * kv_heads, packed_tiles_per_head, PACKED_TILE_BYTES]
  float* partial;  // [2 * batch * kv_heads * blocks, splits, 2, CHANNELS], if splits > 1
  int* counters;   // [2 * batch * kv_heads * blocks], zero before and after
  int kv_heads, taken, blocks, packed_tiles_per_head, splits;
  float k_shrink, v_shrink;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#define K_TILE_BYTES (64 * D * KB / 8)
#define V_TILE_BYTES (64 * D * VB / 8)
#define PACKED_TILE_BYTES (TILES * (K_TILE_BYTES + V_TILE_BYTES))
#define PACKED_TILE_TOKENS (TILES * 64)

__device__ __forceinline__ const char* head_of(const Dense& x, int head, int kv_heads) {
  return x.data + head / kv_heads * x.batch + head % kv_heads * x.head;
}
