// Scales and zero-points of a row: fp16, or in 8 bits after an exponent (quant/small_floats.py).
//
// SMALL: in 8 bits. SIGNED: zero-points. A row has n numbers.
template <bool SMALL, bool SIGNED>
struct ParameterRow {
  const unsigned char* bytes;

  __device__ __forceinline__ ParameterRow(const void* all, size_t row, int n)
      : bytes((const unsigned char*)all + row * (SMALL ? n + 1 : 2 * n)) {}
  __device__ __forceinline__ u16 half(int i) const {
    if constexpr (!SMALL) return ((const u16*)bytes)[i];
    const u32 code = bytes[1 + i];
    return SIGNED ? (u16)((code & 0x80) << 8 | (code & 0x7F) << 6) : (u16)(code << 6);
  }
  // Unit of the halves.
  __device__ __forceinline__ float factor() const {
    return SMALL ? __uint_as_float((u32)bytes[0] << 23) : 1.f;
  }
  __device__ __forceinline__ float number(int i) const {
    return SMALL ? half_to_float(half(i)) * factor() : half_to_float(half(i));
  }
};
