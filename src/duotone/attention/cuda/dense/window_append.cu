// The newest token of every sequence into its slot of the windows of K and V.
//
// Compiled by NVRTC with these macros:
//   ROW_BYTES  bytes of one head's K (and V) of a token in the windows, a multiple of 16
//   OVERLAP    1: the launch begins early, and waits before it reads
//   ARGUMENTS_BYTES  size of Arguments on the host
struct Arguments {
  const char* from[2];  // K and V of one token
  char* to[2];          // windows; tokens of a head are adjacent
  const long long* at;  // [batch] slots
  long long from_batch[2], from_head[2], to_batch[2], to_head[2];  // bytes
  int kv_heads, rows, tokens;  // rows: batch * kv_heads; tokens: slots of a window
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
#define VECTORS (ROW_BYTES / 16)


extern "C" __global__ void window_append(const __grid_constant__ Arguments at) {
#if OVERLAP && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x, vector = i % VECTORS, row = i / VECTORS;
  const int which = row >= at.rows, mine = row - which * at.rows;
  if (mine >= at.rows) return;
  const int sequence = mine / at.kv_heads, head = mine - sequence * at.kv_heads;
  // A window that is full must stop the device, not overwrite.
  if ((unsigned long long)at.at[sequence] >= at.tokens) __trap();
  const char* from = at.from[which] + sequence * at.from_batch[which] + head * at.from_head[which];
  char* to = at.to[which] + sequence * at.to_batch[which] + head * at.to_head[which] +
             at.at[sequence] * ROW_BYTES;
  ((uint4*)to)[vector] = ((const uint4*)from)[vector];
}
