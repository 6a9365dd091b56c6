// Scales and zero-points of a row: fp16, or in 8 bits after an exponent (quant/small_floats.py).
// In 8 bits the zero-points are the middle of the levels.

// fp16 number of 8 bits, in units of the row's factor. SIGNED: of a zero-point.
template <bool SIGNED>
__device__ __forceinline__ u16 small_half(u32 code) {
  return SIGNED ? (u16)((code & 0x80) << 8 | (code & 0x7F) << 6) : (u16)(code << 6);
}
__device__ __forceinline__ float small_factor(u32 exponent) {
  return __uint_as_float(exponent << 23);
}

// A row of n numbers. SMALL: in 8 bits.
template <bool SMALL, bool SIGNED>
struct ParameterRow {
  const unsigned char* bytes;

  __device__ __forceinline__ ParameterRow(const void* all, size_t row, int n)
      : bytes((const unsigned char*)all + row * (SMALL ? n + 1 : 2 * n)) {}
  __device__ __forceinline__ u16 half(int i) const {
    if constexpr (!SMALL) return ((const u16*)bytes)[i];
    return small_half<SIGNED>(bytes[1 + i]);
  }
  __device__ __forceinline__ float number(int i) const {
    const float x = half_to_float(half(i));
    return SMALL ? x * small_factor(bytes[0]) : x;
  }
};
