// K and V of 16 tokens as operands A of the products, and their type's conversions.
#if KV == 1
#define KV_TYPE "bf16"
#else
#define KV_TYPE "f16"
#endif

__device__ __forceinline__ void mma(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KV_TYPE "." KV_TYPE
      ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn." KV_TYPE "x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float low_half(u32 x) {
  return KV == 1 ? __uint_as_float(x << 16) : half_to_float((u16)x);
}
// x as two digits: x rounded, and what is left.
__device__ __forceinline__ u32 two_digits(float x) {
  const float rest = x - low_half(pack2(x, 0.f));
  return pack2(x, rest);
}
// Four 8x8 matrices of 16 bits; a lane's address is that of a row.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32* a, u32 address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

// Chunk number `chunk` of 16 channels. K: rows are tokens. OF_VALUES: rows are channels.
template <bool OF_VALUES>
__device__ __forceinline__ void load_chunk(u32* a, u32 rows, int chunk, int lane) {
  const int row = OF_VALUES ? (lane & 7) + (lane >> 4) * 8 : lane & 15;
  const u32 offset = (OF_VALUES ? lane >> 3 & 1 : lane >> 4) * 16;
  load_matrices<OF_VALUES>(a, rows + row * ROW_BYTES + offset + chunk * 32);
}
