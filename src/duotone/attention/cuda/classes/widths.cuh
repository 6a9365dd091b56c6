// Channels of K and of V with codes of 4, 2 and 1 bits, in columns of 16. The last column of a
// width is filled up. Of 4 and 2 bits it is a half column where 8 channels are enough. K has these
// twice: slots 0 to 7 for the first 32 tokens of a tile, slots 8 to 15 for the others. V's slots 8
// to 15 are empty then. A slot is one of a column, a rank that of a channel that has codes.
//
// Expects KN4, KN2, KN1, VN4, VN2, VN1: channels of each width.

template <int N4, int N2, int N1>
struct Classes {
  static constexpr int C4 = (N4 + 15) / 16, C2 = (N2 + 15) / 16, C1 = (N1 + 15) / 16;
  static constexpr int H4 = N4 % 16 && N4 % 16 <= 8, H2 = N2 % 16 && N2 % 16 <= 8;  // half columns
  static constexpr int W4 = 4 * C4 - 2 * H4, W2 = 2 * C2 - H2;                      // words
  static constexpr int COLUMNS = C4 + C2 + C1, WORDS = W4 + W2 + C1;
  static constexpr int CODED = N4 + N2 + N1;

  static __device__ constexpr int bits(int column) {
    return column < C4 ? 4 : column < C4 + C2 ? 2 : 1;
  }
  static __device__ constexpr int columns(int bits) { return bits == 4 ? C4 : bits == 2 ? C2 : C1; }
  // Columns but the half one.
  static __device__ constexpr int whole(int bits) {
    return columns(bits) - (bits == 4 ? H4 : bits == 2 ? H2 : 0);
  }
  static __device__ constexpr bool is_half(int column) {
    return column - first_column(bits(column)) == whole(bits(column));
  }
  static __device__ constexpr int first_column(int bits) {
    return bits == 4 ? 0 : bits == 2 ? C4 : C4 + C2;
  }
  static __device__ constexpr int first_word(int bits) {
    return bits == 4 ? 0 : bits == 2 ? W4 : W4 + W2;
  }
  // Largest code at a rank; 0 without codes.
  static __device__ __forceinline__ int top(int rank) {
    return rank < N4 ? 15 : rank < N4 + N2 ? 3 : rank < CODED ? 1 : 0;
  }
  // The slot of K that has a slot's channel first.
  static __device__ __forceinline__ int once(int slot) {
    return is_half(slot / 16) ? slot & ~8 : slot;
  }
  // First slot of a rank; -1 without codes.
  static __device__ __forceinline__ int slot(int rank) {
    if (rank < N4) return rank;
    if (rank < N4 + N2) return 16 * C4 + rank - N4;
    return rank < CODED ? 16 * (C4 + C2) + rank - N4 - N2 : -1;
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
