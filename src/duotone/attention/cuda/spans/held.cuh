// A thread block of spans/pack_once.cu: its share of a block of tokens, and its bounds.
//
// A slot has the bounds that the warps of 32 tokens saw, as floats, [low, high][channel], and words
// later.
#define MOST_BITS (KB > VB ? KB : VB)
#define SLOTS (WARPS / SHARERS)
#define SLOT_BYTES (4 * D * (MOST_BITS > 2 ? MOST_BITS : 2))
#define BEFORE_TILES (SLOTS * SLOT_BYTES + 16 * D)
static_assert(BEFORE_TILES == BEFORE_TILES_BYTES, "the host's shared memory differs");

struct Share {
  int head, sequence, block, rank, length, first_packed_tile;
  int first_slot, part;  // of this warp
  int halves;            // of tiles of 64 tokens, to be written; those after the tokens are zeros
  bool is_value;

  __device__ __forceinline__ void find(const Arguments& at) {
    const int row = blockIdx.x / CLUSTER;
    first_slot = threadIdx.x / (32 * SHARERS), part = threadIdx.x / 32 % SHARERS;
    rank = blockIdx.x % CLUSTER, is_value = row & 1;
    // A division is some hundred cycles before the first load: none where one is enough.
    head = at.blocks == 1 ? row / 2 : row / 2 / at.blocks, block = row / 2 - head * at.blocks;
    sequence = head < at.kv_heads ? 0 : head / at.kv_heads;
    const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1) + block;
    length = (int)(edge[1] - edge[0]);
    first_packed_tile = at.first_packed_tiles[(long long)sequence * at.blocks + block];
    // The last block has what comes after it, too: other sequences may be longer.
    const int packed_tiles = block == at.blocks - 1
                                 ? at.packed_tiles_per_head - first_packed_tile
                                 : (length + PACKED_TILE_TOKENS - 1) / PACKED_TILE_TOKENS;
    halves = packed_tiles * TILES * 2;
  }
  // The half in this thread block's slot.
  __device__ __forceinline__ int half(int slot) const { return slot * CLUSTER + rank; }
};

// The first tokens' positions are loaded together with the block's edges, which only say how many
// there are. So the first tile waits for memory once less. Volatile: the load stands where it is
// written.
__device__ __forceinline__ void load_share(const Arguments& at, const Share& s, u32 tiles) {
  const int lane = threadIdx.x & 31;
  const Dense& from = s.is_value ? at.value : at.key;
  // The first block begins with the sequence.
  const int start =
      s.block ? (int)at.offsets[(long long)s.sequence * (at.blocks + 1) + s.block] : 0;
  const long long* index = at.index + (long long)s.sequence * at.taken + start;
  const char* states =
      from.data + s.sequence * from.batch + (s.head - s.sequence * at.kv_heads) * from.head;
  const auto position_of = [&](int token) {
    return *(const volatile int*)(index + min(token, at.taken - 1 - start));
  };
  int slot = s.first_slot, position = position_of(s.half(slot) * TILE + lane);
  for (; s.half(slot) * TILE < s.length; slot += SLOTS) {
    const int token = s.half(slot) * TILE + lane;
    copy_tile(tiles + slot * TILE_BYTES, states, from.token, token < s.length ? position : -1, lane,
              s.part, SHARERS);
    position = position_of(s.half(slot + SLOTS) * TILE + lane);
  }
  wait_for_copies();
  wait_for_sharers();
}

// Bounds of two channels over the tokens of a warp and of those who share them.
__device__ __forceinline__ void bound_pair(Pair& low, Pair& high, const Share& s, u32 tiles,
                                           int channel) {
  low = pair_of(INFINITE, INFINITE), high = pair_of(-INFINITE, -INFINITE);
  for (int slot = s.first_slot; s.half(slot) * TILE < s.length; slot += SLOTS) {
    const int tokens = min(s.length - s.half(slot) * TILE, TILE);
    const u32 column = tiles + slot * TILE_BYTES + channel * ELEMENT_BYTES;
#pragma unroll 8
    for (int token = 0; token < tokens; token++) {
      const Pair x = load_pair(column + token * ROW_BYTES);
      low = least(low, x), high = greatest(high, x);
    }
  }
}
// Passes the bounds of what this thread block holds to all of the cluster.
__device__ __forceinline__ void bound_share(const Share& s, u32 memory, const Agreement& all) {
  const u32 seen = memory + s.first_slot * SLOT_BYTES;
  for (int c = (32 * s.part + (threadIdx.x & 31)) * 2; c < D; c += 64 * SHARERS) {
    Pair low, high;
    bound_pair(low, high, s, memory + BEFORE_TILES, c);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      store_shared(seen + (c + n) * 4, __float_as_uint(number(low, n)));
      store_shared(seen + (D + c + n) * 4, __float_as_uint(number(high, n)));
    }
  }
  __syncthreads();
  all.wait_for_listeners();
  for (int c = threadIdx.x; c < CHANNELS; c += WARPS * 32) {
    float low = INFINITE, high = -INFINITE;
#pragma unroll
    for (int n = 0; n < SLOTS; n++) {
      low = least(low, __uint_as_float(load_shared(memory + n * SLOT_BYTES + c * 4)));
      high = greatest(high, __uint_as_float(load_shared(memory + n * SLOT_BYTES + (D + c) * 4)));
    }
    all.pass(s.rank, c, pair_of(low, high));
  }
}
