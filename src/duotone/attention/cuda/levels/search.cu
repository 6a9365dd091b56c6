// Levels of every channel of a block of tokens (quant.levels): those that codes are chosen by, and
// those that codes stand for, sorted by class. levels/sums.cu has run before.
// levels/call.cuh has the macros, and
//   STRIP  channels of a block of threads, which has them in shared memory: few, or all of them in
//          the order of their classes
//   LANES  threads of a channel
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/tile.cuh"
#include "packing/units.cuh"
#include "levels/call.cuh"
#include "levels/order.cuh"
#include "levels/sub_block.cuh"
#include "levels/lloyd.cuh"
#define STRIPS ((CHANNELS + STRIP - 1) / STRIP)
#define SUB_BLOCKS (THREADS / LANES)
#define STRIP_UNIT (ALIGN < STRIP * ELEMENT_BYTES ? ALIGN : STRIP * ELEMENT_BYTES)
#define UNIT_ELEMENTS (STRIP_UNIT / ELEMENT_BYTES)
#define MIN_GAIN 0.5f
#define MAX_GAIN 3.f

// Channels [first, first + count) of all tokens, transposed.
__device__ __forceinline__ void load_strip(Element* strip, const Block& block, int stride, int row,
                                           int first, int count) {
  const int total = count / UNIT_ELEMENTS * block.tokens;
#pragma unroll 4
  for (int n = threadIdx.x; n < total; n += THREADS) {
    const int unit = n / block.tokens, token = n - unit * block.tokens;
    const char* from = block.data + (long long)token * stride + first * ELEMENT_BYTES;
    u32 y[4];
    load_unit<STRIP_UNIT>(y, from + unit * STRIP_UNIT);
    Element* target = strip + unit * UNIT_ELEMENTS * row + token;
#pragma unroll
    for (int i = 0; i < UNIT_ELEMENTS; i++) {
#if INPUT == 2
      target[i * row] = __uint_as_float(y[i]);
#else
      target[i * row] = (u16)(y[i / 2] >> 16 * (i % 2));
#endif
    }
  }
}

__device__ __forceinline__ Moments moments_of(const SubBlock& sub_block) {
  float bounds[2] = {-INFINITE, -INFINITE}, sums[2] = {};
  sub_block.each([&](float x, int) {
    bounds[0] = greatest(bounds[0], -x), bounds[1] = greatest(bounds[1], x);
    sums[0] += x, sums[1] += x * x;
  });
  sub_block.greatest_of<2>(bounds);
  sub_block.sum<2>(sums);
  const float count = (float)max(sub_block.tokens, 1);
  if (sub_block.tokens == 0) bounds[0] = bounds[1] = 0.f;
  return {count, -bounds[0], bounds[1], sums[0] / count, sums[1] / count};
}

// Between the bounds of the elements as they are (quant.ranges.uniform_range).
__device__ __forceinline__ void between_bounds(float& scale, float& zero, const Moments& raw,
                                               float shrink, int bits) {
  const float factor = raw.high > raw.low ? shrink : 1.f;
  zero = __fmul_rn(raw.low, factor);
  scale = __fsub_rn(__fmul_rn(raw.high, factor), zero) / (float)((1 << bits) - 1);
}

// The gain of a channel by least squares over tokens by their weights (quant.ranges.energy_gain).
__device__ __forceinline__ float energy_gain(const SubBlock& sub_block, const float* weights,
                                             Levels l, float offset, int bits) {
  Descent levels = {l.scale, offset};
  const float width = (float)(1 << bits), unit = 1.f / width;
  levels.prepare<false>(unit);
  float sums[2] = {};
  sub_block.each([&](float x, int t) {
    const float decoded = levels.code<false>(x, unit) * width * l.scale + offset;
    const float weighed = weights[t] * decoded;
    sums[0] += weighed * x, sums[1] += weighed * decoded;
  });
  sub_block.sum<2>(sums);
  return sums[1] > 0.f ? fminf(fmaxf(sums[0] / sums[1], MIN_GAIN), MAX_GAIN) : 1.f;
}

// All levels of a channel whose sub-block is here, written by its first lane to a slot.
__device__ __forceinline__ void find_levels(const Arguments& at, const Block& block,
                                            SubBlock sub_block, int slot, int channel, bool real) {
  const int bits = real ? bits_of_slot(slot) : 0;
  float scale = 0.f, zero = sub_block.mean;
  if (LLOYD) {
    lloyd(scale, zero, sub_block, moments_of(sub_block), bits);
  } else {
    SubBlock raw = sub_block;
    raw.mean = 0.f;
    const Moments raw_moments = moments_of(raw);
    if (bits) between_bounds(scale, zero, raw_moments, at.shrink, bits);
  }
  Levels chosen;
  chosen.set(bits ? scale : 0.f, bits ? zero : sub_block.mean);
  const float* weights = at.weight + (long long)block.head * at.tokens + block.first;
  float offset = chosen.zero - sub_block.mean;
  const float own = ENERGY ? energy_gain(sub_block, weights, chosen, offset, bits) : 1.f;
  scale = own * chosen.scale, offset *= own;
  if (!real || sub_block.lane) return;
  const long long row = block.row;
  at.order[row * CHANNELS + slot] = channel;
  if (slot < CODED) {
    at.chosen_scale[row * CODED + slot] = chosen.scale_bits;
    at.chosen_zero[row * CODED + slot] = chosen.zero_bits;
  }
  if (GAIN == 2) {
    float* fine = at.fine + row * 3 * CHANNELS + slot;
    fine[0] = sub_block.mean, fine[CHANNELS] = scale, fine[2 * CHANNELS] = offset;
  } else {
    const bool moved = GAIN || ENERGY;
    at.zero[row * CHANNELS + slot] =
        moved ? float_to_half(sub_block.mean + at.gain * offset) : chosen.zero_bits;
    if (slot < CODED)
      at.scale[row * CODED + slot] = moved ? float_to_half(at.gain * scale) : chosen.scale_bits;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    level_search(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __shared__ ChannelOrder order;
  __shared__ float means[STRIP];
  const Block block(at, blockIdx.x / STRIPS);
  const int first = blockIdx.x % STRIPS * STRIP;
  const int count = min(STRIP, CHANNELS - first);
  load_strip((Element*)shared, block, at.x.token, at.strip_row, first, count);
  for (int c = threadIdx.x; c < count; c += THREADS) means[c] = mean_of(at, block, first + c);
  order.find(at, block);
  const int sub_block = threadIdx.x / LANES;
#pragma unroll 1
  for (int start = 0; start < STRIP; start += SUB_BLOCKS) {
    const bool real = start + sub_block < count;
    const int task = real ? start + sub_block : 0;
    const int channel = STRIP == CHANNELS ? order.channel[task] : first + task;
    const SubBlock at_work = {(const Element*)shared + (channel - first) * at.strip_row,
                              real ? block.tokens : 0, (int)threadIdx.x % LANES,
                              means[channel - first]};
    find_levels(at, block, at_work, order.slot[channel], channel, real);
  }
}
