// Rows of codes in canonical order (quant/packing.py): a token's classes of channels one after the
// other, the widest first, each in whole bytes. With codes of one width all channels are one class.
//
// A place is a channel's number in the order of the codes, a slot that of a code in the bytes.
// Classes begin at multiples of 8 slots, so that a byte's slots are aligned.

template <int C4, int C2, int C1>
struct Row {
  static constexpr int B4 = (C4 + 1) / 2, B2 = (C2 + 3) / 4, B1 = (C1 + 7) / 8;
  static constexpr int S2 = (2 * B4 + 7) / 8 * 8, S1 = S2 + (4 * B2 + 7) / 8 * 8;
  static constexpr int BYTES = B4 + B2 + B1, SLOTS = S1 + 8 * B1, CODED = C4 + C2 + C1;

  static __device__ __forceinline__ int bits(int place) {
    return place < C4 ? 4 : place < C4 + C2 ? 2 : 1;
  }
  static __device__ __forceinline__ int slot(int place) {
    return place < C4 ? place : place < C4 + C2 ? S2 + place - C4 : S1 + place - C4 - C2;
  }
  // The byte of a row that has the code of a place, and how far up in it.
  static __device__ __forceinline__ void find(int place, unsigned char* byte,
                                              unsigned char* shift) {
    const int width = bits(place), each = 8 / width;
    const int within = place - (width == 4 ? 0 : width == 2 ? C4 : C4 + C2);
    *byte = (width == 4 ? 0 : width == 2 ? B4 : B4 + B2) + within / each;
    *shift = 8 - width * (1 + within % each);
  }
};
