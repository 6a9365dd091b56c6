// Codes of several widths as operands of integer products: A from packed words.
#include "shared/integer_products.cuh"
#include "classes/widths.cuh"

// The largest power of two, at most `most`, that divides n.
__device__ constexpr int power_in(int n, int most) {
  int power = 1;
  while (power < most && n % (2 * power) == 0) power *= 2;
  return power;
}

// Bit of their bytes at which the codes of one column stand, in all its registers. It is 3 at most
// in K: q makes up for it, and has that many bits less. Half columns stand at bit 0.
__device__ constexpr int key_bit(int column) {
  if (Keys::is_half(column)) return 0;
  const int bits = Keys::bits(column), within = column - Keys::first_column(bits);
  return within % power_in(Keys::whole(bits), 4 / bits) * bits;
}
// Bit for a column of V and a half of its 16 channels; the output makes up for it.
__device__ constexpr int value_bit(int column, int half) {
  if (Values::is_half(column)) return 0;
  const int bits = Values::bits(column), columns = Values::whole(bits);
  const int within = half * columns + column - Values::first_column(bits);
  return within % power_in(2 * columns, 8 / bits) * bits;
}

// A register of a column: number E of its class, whose codes stand `BIT` bits up.
template <class C, int COLUMN, int E, int BIT>
__device__ __forceinline__ u32 code_register(const u32* words) {
  constexpr int bits = C::bits(COLUMN), per_byte = 8 / bits;
  constexpr u32 mask = (((1u << bits) - 1) << BIT) * 0x01010101u;
  constexpr int shift = E % per_byte * bits - BIT;
  return (words[C::first_word(bits) + E / per_byte] >> shift) & mask;
}
// Keys 8 EIGHT to 8 EIGHT + 7 of a column of K. first: all bits in lanes of slots 0 to 7, else none.
template <int COLUMN, int EIGHT>
__device__ __forceinline__ u32 key_register(const u32* words, u32 first) {
  constexpr int bits = Keys::bits(COLUMN), whole = Keys::whole(bits);
  if constexpr (Keys::is_half(COLUMN)) {
    const u32 codes = code_register<Keys, COLUMN, 8 * whole + EIGHT % 4, 0>(words);
    return codes & (EIGHT < 4 ? first : ~first);
  } else {
    constexpr int e = EIGHT * whole + COLUMN - Keys::first_column(bits);
    return code_register<Keys, COLUMN, e, key_bit(COLUMN)>(words);
  }
}
// Register A of a column of V: keys half A / 4, channels half A % 2.
template <int COLUMN, int A>
__device__ __forceinline__ u32 value_register(const u32* words) {
  constexpr int bits = Values::bits(COLUMN), whole = Values::whole(bits);
  if constexpr (Values::is_half(COLUMN)) {
    return A % 2 ? 0 : code_register<Values, COLUMN, 8 * whole + A / 2, 0>(words);
  } else {
    constexpr int e = A * whole + COLUMN - Values::first_column(bits);
    return code_register<Values, COLUMN, e, value_bit(COLUMN, A % 2)>(words);
  }
}

// Products of 16 keys: the columns two by two, an odd last one by itself.
template <int SUB, int COLUMN>
__device__ __forceinline__ void dot_keys(int (*c)[4], const u32* words,
                                         const u32 (*digits)[Keys::COLUMNS], const int* bias,
                                         u32 first) {
  constexpr bool pair = COLUMN + 1 < Keys::COLUMNS;
  u32 a[4] = {key_register<COLUMN, 2 * SUB>(words, first),
              key_register<COLUMN, 2 * SUB + 1>(words, first)};
  if constexpr (pair)
    a[2] = key_register<COLUMN + 1, 2 * SUB>(words, first),
    a[3] = key_register<COLUMN + 1, 2 * SUB + 1>(words, first);
#pragma unroll
  for (int h = 0; h < HT; h++) {
    const int* before = COLUMN == 0 ? bias : c[h];
    if constexpr (pair)
      mma_k_first(c[h], a, digits[h] + COLUMN, before);
    else
      mma_k_half(c[h], a, digits[h] + COLUMN, before);
  }
  if constexpr (COLUMN + 2 < Keys::COLUMNS)
    dot_keys<SUB, COLUMN + 2>(c, words, digits, bias, first);
}
// Sums of p * code over 32 keys, column by column.
template <int U, int COLUMN>
__device__ __forceinline__ void add_values(int (*acc)[Values::COLUMNS][4], const u32* words,
                                           const u32 (*p)[2][2]) {
  u32 a[4] = {value_register<COLUMN, 4 * U>(words), value_register<COLUMN, 4 * U + 1>(words),
              value_register<COLUMN, 4 * U + 2>(words), value_register<COLUMN, 4 * U + 3>(words)};
#pragma unroll
  for (int h = 0; h < HT; h++) mma_v(acc[h][COLUMN], a, p[h][U]);
  if constexpr (COLUMN + 1 < Values::COLUMNS) add_values<U, COLUMN + 1>(acc, words, p);
}
