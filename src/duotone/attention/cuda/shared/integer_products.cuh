// Products of codes in bytes with digits of q (signed) or of p, and sums of two digits.
//
// Digits that a column of B has of four integers of q, which are in the low bits of words. Even
// columns have the high digits, odd ones the low digits.
__device__ __forceinline__ u32 digits_of(int4 x, int column) {
  const int round = column & 1 ? 0 : 128;
  const u32 pick = column & 1 ? 0x0040 : 0x0051;
  return __byte_perm(__byte_perm(x.x + round, x.y + round, pick),
                     __byte_perm(x.z + round, x.w + round, pick), 0x5410);
}
__device__ __forceinline__ void mma_k(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_k_first(int* c, const u32* a, const u32* b, const int* bias) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%10,%11,%12,%13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(bias[0]),
        "r"(bias[1]), "r"(bias[2]), "r"(bias[3]));
}
// Products of 16 k: half of A and of B.
__device__ __forceinline__ void mma_k_half(int* c, const u32* a, const u32* b, const int* before) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(before[0]), "r"(before[1]), "r"(before[2]),
        "r"(before[3]));
}
__device__ __forceinline__ void mma_v(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void shift_digits(int* c,
                                             int by) {  // the high digit's remainder moves on
  const int mask = by < 16 ? (1 << by) - 1 : 0;
  c[1] = (c[1] + ((c[0] & mask) << 8)) >> by;
  c[0] >>= by;
  c[3] = (c[3] + ((c[2] & mask) << 8)) >> by;
  c[2] >>= by;
}
