// Merges the parts of a kv head: what the block that ends last, the last launch of a call,
// shared/merge_parts.cu and rotate/merge.cu do. Expects call.cuh.
static_assert(CHANNELS % 4 == 0, "lanes read four channels");

// Four channels of a q head: the sum of its parts under the largest of their maxima.
struct Merged {
  float m = -1e30f, l = 0.f, sum[4] = {0.f, 0.f, 0.f, 0.f};

  // Raises the maximum: what was summed so far becomes less.
  __device__ __forceinline__ void raise(float top) {
    const float by = exp2_fast(m - top);
    m = top, l *= by;
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] *= by;
  }
  __device__ __forceinline__ void add(float2 weight, float4 x) {
    const float z = exp2_fast(weight.x - m);
    l = fmaf(z, weight.y, l);
    sum[0] = fmaf(z, x.x, sum[0]), sum[1] = fmaf(z, x.y, sum[1]);
    sum[2] = fmaf(z, x.z, sum[2]), sum[3] = fmaf(z, x.w, sum[3]);
  }
};

// `parts` of them, AT_ONCE at most; from one to the next are G rows.
template <int AT_ONCE>
__device__ __forceinline__ void merge(Merged& all, const float2* weights, const float* sums,
                                      int parts) {
  float2 weight[AT_ONCE];
  float4 x[AT_ONCE];
  float top = all.m;
#pragma unroll
  for (int s = 0; s < AT_ONCE; s++) {
    weight[s] = make_float2(-1e30f, 0.f), x[s] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (s < parts) {
      weight[s] = __ldcg(weights + s * G);
      x[s] = __ldcg((const float4*)(sums + s * G * CHANNELS));
    }
  }
#pragma unroll
  for (int s = 0; s < AT_ONCE; s++) top = fmaxf(top, weight[s].x);
  all.raise(top);
#pragma unroll
  for (int s = 0; s < AT_ONCE; s++) all.add(weight[s], x[s]);
}

// Parts `first` to `last` of q head h of a kv head, channels c to c + 3. AT_ONCE: parts that a lane
// loads together, weights and sums, since each time takes as long as an answer of L2.
template <int AT_ONCE>
__device__ __forceinline__ Merged merged(const Call& at, int head, int h, int c, int first,
                                         int last) {
  const size_t row = (size_t)head * at.all_parts * G + h;
  Merged all;
  for (int s = first; s < last; s += AT_ONCE)
    merge<AT_ONCE>(all, at.weights + row + s * G, at.partial + (row + s * G) * CHANNELS + c,
                   last - s);
  return all;
}

// All parts of a row, written.
template <int AT_ONCE>
__device__ __forceinline__ void merge_row(const Call& at, int head, int h, int c) {
  const Merged all = merged<AT_ONCE>(at, head, h, c, 0, at.all_parts);
  write_out(at, head, h, c, all.m, all.l, all.sum);
}
