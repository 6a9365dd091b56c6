// Shapes of kernels on packed tiles of spans, from their macros, and their arguments.
//
// KEPT_SCORES is defined in spans/calibrated.cu alone, and so is CLUSTER.
#define D ((CHANNELS + 31) / 32 * 32)
#define HT ((G + 3) / 4)  // tiles of 4 q heads: 8 columns of B, a high and a low digit each
#define MT (D / 16)       // tiles of 16 channels of V
#define KPB (8 / KB)      // codes per byte of a word, where those of 3 bits are nibbles
#define VPB (8 / VB)
#define K_STEP (8 / KPB)  // bits from one code of a byte to the next
#define V_STEP (8 / VPB)
#define KREGS (D / 16)        // registers of A per row of K
#define KWORDS (D * KB / 16)  // words per lane and tile of 64 keys
#define VWORDS (D * VB / 16)
#define TILE 64
#define KEYS (TILES * TILE)
#define K_BYTES (KWORDS * 128)
#define V_BYTES (VWORDS * 128)
#define PACKED_TILE_BYTES (TILES * (K_BYTES + V_BYTES))
// Where positions inside a byte differ between the rows of a tile, codes are shifted down instead.
#define K_ALIGNED (KREGS % 4 == 0 || KB != 1)
#define V_ALIGNED (2 * MT % VPB == 0)
// The last code of a byte comes from the unmasked word.
#define V_RAW (MT % VPB == 0 && VB < 8 && VB == V_STEP)
#define V_SIGNED (V_RAW && VB == 1)  // and the one before it from the same word as signed bytes
#define SMALL_DOTS (KB == 1 && D <= 128)  // Q_TOP * D < 2^22: both digits fit one biased integer
// How far a code of register r stands above the lowest bits of its byte; q makes up for it.
#define K_BIT(r) (K_ALIGNED ? ((r) * K_STEP) & 3 : 0)
#define Q_SHIFT (K_ALIGNED ? (KB == 1 ? 3 : KB == 2 ? 2 : 0) : 0)

#define BIAS 12582912.f  // 1.5 * 2^23: an integer below 2^22 added to its bits is a float
#define BIAS_BITS 0x4B400000
#define P_BIAS 8388608.f  // 2^23: a float below 2^16 added to it has its integer in the low bits
#define Q_TOP 32639.f     // 127 * 256 + 127
#define P_TOP 15.999f
#define MIN_SLOPE 1e-3f  // as in quant.calibration
#define MIN_WIDTH 1e-20f
#define LIFT 3.f  // how far below 2^16 a new maximum enters
#define HEADS (HT * 4)
#include "shared/common.cuh"
#include "spans/codes.cuh"

struct Arguments : Call {
  // [batch * kv_heads * blocks, CHANNELS] in fp16, or in 8 bits after an exponent.
  const void *k_scale, *k_zero, *v_scale, *v_zero;
  float* ranges;     // [batch * kv_heads, blocks * splits, G, 2]: scores' ranges, with TAU
  float tau1, tau2;  // times log2(e)
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
