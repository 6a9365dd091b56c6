// Channels of K and of V with codes of 4, 2 and 1 bits, in columns of 16. The last column of a
// width is filled up. A slot is one of a column, a rank that of a channel that has codes.
//
// Expects KN4, KN2, KN1, VN4, VN2, VN1: channels of each width.

template <int N4, int N2, int N1>
struct Classes {
  static constexpr int C4 = (N4 + 15) / 16, C2 = (N2 + 15) / 16, C1 = (N1 + 15) / 16;
  static constexpr int COLUMNS = C4 + C2 + C1, WORDS = 4 * C4 + 2 * C2 + C1;
  static constexpr int CODED = N4 + N2 + N1;

  static __device__ constexpr int bits(int column) {
    return column < C4 ? 4 : column < C4 + C2 ? 2 : 1;
  }
  static __device__ constexpr int columns(int bits) { return bits == 4 ? C4 : bits == 2 ? C2 : C1; }
  static __device__ constexpr int first_column(int bits) {
    return bits == 4 ? 0 : bits == 2 ? C4 : C4 + C2;
  }
  static __device__ constexpr int first_word(int bits) {
    return bits == 4 ? 0 : bits == 2 ? 4 * C4 : 4 * C4 + 2 * C2;
  }
  // Largest code at a rank; 0 without codes.
  static __device__ __forceinline__ int top(int rank) {
    return rank < N4 ? 15 : rank < N4 + N2 ? 3 : rank < CODED ? 1 : 0;
  }
  // Rank of the channel at a slot; -1 where a column is filled up.
  static __device__ __forceinline__ int rank(int slot) {
    if (slot < 16 * C4) return slot < N4 ? slot : -1;
    if (slot < 16 * (C4 + C2)) return slot - 16 * C4 < N2 ? slot - 16 * C4 + N4 : -1;
    return slot - 16 * (C4 + C2) < N1 ? slot - 16 * (C4 + C2) + N4 + N2 : -1;
  }
};
typedef Classes<KN4, KN2, KN1> Keys;
typedef Classes<VN4, VN2, VN1> Values;
