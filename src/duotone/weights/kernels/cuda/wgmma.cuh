// D[64 x N] += A[64 x 32] B[32 x N] of int8 codes on Hopper's tensor cores, A and B from shared
// memory.
//
// Expects N, a multiple of 16 up to 256. For each eight columns j, thread t of the warpgroup has
//   sums[4 j + 0, 1]: row 16 (t / 32) + t % 32 / 4,     columns 8 j + 2 (t % 4) + 0, 1
//   sums[4 j + 2, 3]: row 16 (t / 32) + t % 32 / 4 + 8, the same columns
//
// The assembler wants every register named: L and O list those of 16 columns each.
#define L1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L2 L1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L3 L2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define L4 L3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define L5 L4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define L6 L5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define L7 L6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define L8 L7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define L9 L8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define L10 L9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define L11 L10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define L12 L11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define L13 L12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define L14 L13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define L15 L14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define L16 L15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define R8(i)                                                                                     \
  "+r"(d[8 * i]), "+r"(d[8 * i + 1]), "+r"(d[8 * i + 2]), "+r"(d[8 * i + 3]), "+r"(d[8 * i + 4]), \
      "+r"(d[8 * i + 5]), "+r"(d[8 * i + 6]), "+r"(d[8 * i + 7])
#define O1 R8(0)
#define O2 O1, R8(1)
#define O3 O2, R8(2)
#define O4 O3, R8(3)
#define O5 O4, R8(4)
#define O6 O5, R8(5)
#define O7 O6, R8(6)
#define O8 O7, R8(7)
#define O9 O8, R8(8)
#define O10 O9, R8(9)
#define O11 O10, R8(10)
#define O12 O11, R8(11)
#define O13 O12, R8(12)
#define O14 O13, R8(13)
#define O15 O14, R8(14)
#define O16 O15, R8(15)
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

// SIXTEENS is N / 16; A_OPERAND, B_OPERAND and D_OPERAND the numbers after the sums' registers.
__device__ __forceinline__ void multiply(int (&d)[N / 2], u64 a, u64 b, int add) {
  asm volatile(
      "{.reg .pred p;\n setp.ne.b32 p,%" TEXT(D_OPERAND) ",0;\n"
      "wgmma.mma_async.sync.aligned.m64n" TEXT(N) "k32.s32.s8.s8 {" PASTE(L, SIXTEENS) "},"
      "%" TEXT(A_OPERAND) ",%" TEXT(B_OPERAND) ",p;\n}"
      : PASTE(O, SIXTEENS)
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void multiply_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most LEFT of the committed groups are not done.
template <int LEFT>
__device__ __forceinline__ void multiply_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// After a wait for all: nothing that reads these sums moves before it.
__device__ __forceinline__ void settle(int (&d)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+r"(d[i])::"memory");
}
// Descriptor of a tile whose rows are 128 bytes, as TMA lays them out with 128-byte swizzles. Eight
// rows take 1,024 bytes. Its address is a multiple of 1,024; 32 bytes further on add 2.
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
