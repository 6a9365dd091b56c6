"""Products and transposes of a warp on a CPU, for sources that `units_on_cpu` compiles.

Sources have a macro KV: numbers of 16 bits are fp16 (0) or bf16 (1).
"""

LANES = """
static u32 told[16][32][6];
static bool __any_sync(u32 mask, bool x) { return __ballot_sync(mask, x); }
static float number_of(u16 x) {
  return KV == 1 ? __uint_as_float((u32)x << 16) : half_to_float_here(x);
}
static u16 bits_of(float x) {
  const u32 bits = __float_as_uint(x);
  return KV == 1 ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : float_to_half(x);
}
static u32 (*tell(const u32* x, int words))[6] {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  memcpy(told[warp][lane], x, 4 * words);
  __syncwarp();
  return told[warp];
}
static void load_each(u32* y, u32 row, int matrices, bool turned) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto rows = tell(&row, 1);
  for (int m = 0; m < matrices; m++) {
    u16 halves[2];
    for (unsigned i = 0; i < 2; i++) {
      const unsigned r = turned ? 2 * t + i : g, column = turned ? g : 2 * t + i;
      memcpy(halves + i, shared + rows[8 * m + r][0] + 2 * column, 2);
    }
    y[m] = halves[0] | (u32)halves[1] << 16;
  }
  __syncwarp();
}
static u32 turned(u32 x) {
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto all = tell(&x, 1);
  u32 y = 0;
  for (unsigned i = 0; i < 2; i++)
    y |= (all[4 * (2 * t + i) + g / 2][0] >> 16 * (g % 2) & 0xFFFF) << 16 * i;
  __syncwarp();
  return y;
}
static void multiply(float* c, const u32* a, const u32* b) {
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  auto all = tell(mine, 6);
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k++) {
      const u32 x = all[4 * g + k % 8 / 2][i / 2 + k / 8 * 2];
      const u32 y = all[4 * (2 * t + i % 2) + k % 8 / 2][4 + k / 8];
      c[i] += number_of(x >> 16 * (k % 2)) * number_of(y >> 16 * (k % 2));
    }
  __syncwarp();
}
"""
# What assembly does, by a word of it.
PRODUCTS = {
    "movmatrix": "y = turned(x);",
    "{%10,%10": "",
    "m16n8k8": "",
    "m16n8k16": "multiply(c, a, b);",
}
