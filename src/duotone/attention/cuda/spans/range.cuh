// Score calibration: the range of the scores, agreed on by all parts of a kv head.
// Where biased products are positive, they order as their bits do: three at a time.
__device__ __forceinline__ float lowest(float a, float b, float c) {
  if (SMALL_DOTS)
    return __int_as_float(__vimin3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
  return fminf(a, fminf(b, c));
}
__device__ __forceinline__ float highest(float a, float b, float c) {
  if (SMALL_DOTS)
    return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
  return fmaxf(a, fmaxf(b, c));
}

// Takes 64 biased products into the range so far, those of the first `left` keys.
__device__ __forceinline__ void fold_range(float* low, float* high, const float (*f)[8], int left,
                                           int g) {
#pragma unroll
  for (int h = 0; h < HT; h++)
#pragma unroll
    for (int x = 0; x < 8; x += 2) {
      float a = f[h][x], b = f[h][x + 1];
      if (left < TILE) {  // a key that is not there changes nothing
        const bool first = 8 * x + g < left, second = 8 * x + 8 + g < left;
        low[h] = lowest(low[h], first ? a : low[h], second ? b : low[h]);
        high[h] = highest(high[h], first ? a : high[h], second ? b : high[h]);
      } else
        low[h] = lowest(low[h], a, b), high[h] = highest(high[h], a, b);
    }
}

// The range of a unit's scores, to bounds[4 HT][2], from what each lane saw of them.
__device__ __forceinline__ void agree_in_block(const Unit& u, float* low, float* high,
                                               float (*warps)[HEADS][2], float (*bounds)[2]) {
#pragma unroll
  for (int h = 0; h < HT; h++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      low[h] = fminf(low[h], __shfl_xor_sync(FULL, low[h], o));
      high[h] = fmaxf(high[h], __shfl_xor_sync(FULL, high[h], o));
    }
    if (u.g == 0) {
      float* mine = warps[u.warp][h * 4 + u.t];
      mine[0] = low[h], mine[1] = high[h];
    }
  }
  __syncthreads();
  if (u.tid < HEADS) {
    float a = -MINUS_INFINITY, b = MINUS_INFINITY;
    for (int w = 0; w < WARPS; w++)
      a = fminf(a, warps[w][u.tid][0]), b = fmaxf(b, warps[w][u.tid][1]);
    bounds[u.tid][0] = a, bounds[u.tid][1] = b;
  }
}

// Smallest and largest score (log2 units) of each q head in a unit, to bounds[4 HT][2]; reads K
// only.
__device__ __forceinline__ void score_range(Ring& ring, const Unit& u, const Query& q,
                                            float (*warps)[HEADS][2], float (*bounds)[2]) {
  float low[HT], high[HT];
#pragma unroll
  for (int h = 0; h < HT; h++)
    low[h] = -MINUS_INFINITY, high[h] = SMALL_DOTS ? 0.f : MINUS_INFINITY;
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<TILES * K_BYTES, 0>(u, next);
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float f[HT][8];
      q.dot(f, here + tile * K_BYTES, u.lane);
      fold_range(low, high, f, left - tile * TILE, u.g);
    }
    ring.advance(next);
  }
  ring.start<PACKED_TILE_BYTES, 0>(u);  // the next pass, while the range is agreed on
#pragma unroll
  for (int h = 0; h < HT; h++) {
    const bool any = low[h] < -MINUS_INFINITY;
    low[h] = any ? fmaf(low[h] - BIAS, q.scale[h], q.offset[h]) : -MINUS_INFINITY;
    high[h] = any ? fmaf(high[h] - BIAS, q.scale[h], q.offset[h]) : MINUS_INFINITY;
  }
  agree_in_block(u, low, high, warps, bounds);
}

// The range over all parts of a kv head; every block of the head must be resident.
__device__ __forceinline__ void agree_on_range(const Arguments& at, const Unit& u,
                                               float (*bounds)[2]) {
  const int parts = at.blocks * at.splits;
  float* shared_ranges = at.ranges + (size_t)u.head * parts * G * 2;
  if (u.tid < G)
    __stcg((float2*)shared_ranges + u.part * G + u.tid,
           make_float2(bounds[u.tid][0], bounds[u.tid][1]));
  __threadfence();
  __syncthreads();
  if (u.tid == 0) {
    atomicAdd(at.counters + 2 * u.head + 1, 1);
    while (*(volatile int*)(at.counters + 2 * u.head + 1) < parts) {
    }
  }
  __syncthreads();
  __threadfence();
  if (u.tid < G)
    for (int s = 0; s < parts; s++) {
      const float2 other = __ldcg((const float2*)shared_ranges + s * G + u.tid);
      bounds[u.tid][0] = fminf(bounds[u.tid][0], other.x),
      bounds[u.tid][1] = fmaxf(bounds[u.tid][1], other.y);
    }
}

#ifdef CLUSTER
// This range where the parts of a kv head are a cluster, which read each other's shared memory. A
// part keeps its own `bounds` until `leave_cluster`.
__device__ __forceinline__ void agree_in_cluster(const Unit& u, float (*bounds)[2],
                                                 float (*agreed)[2]) {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
  if (u.tid < HEADS) {
    float low = -MINUS_INFINITY, high = MINUS_INFINITY;
#pragma unroll
    for (int s = 0; s < CLUSTER; s++) {
      u32 there;
      float a, b;
      asm("mapa.shared::cluster.u32 %0,%1,%2;"
          : "=r"(there)
          : "r"(shared_address(bounds[u.tid])), "r"(s));
      asm volatile("ld.shared::cluster.v2.f32 {%0,%1},[%2];" : "=f"(a), "=f"(b) : "r"(there));
      low = fminf(low, a), high = fmaxf(high, b);
    }
    agreed[u.tid][0] = low, agreed[u.tid][1] = high;
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

// Score calibration (CalibQuant eq. 7-8): scores become slope * score + offset.
__device__ __forceinline__ void calibrate(const Arguments& at, const Unit& u, Query& q,
                                          const float (*bounds)[2]) {
#pragma unroll
  for (int h = 0; h < HT; h++) {
    const float low = bounds[h * 4 + u.t][0], high = bounds[h * 4 + u.t][1], width = high - low;
    const float slope =
        width > MIN_WIDTH ? fmaxf(1.f + (at.tau1 - at.tau2) / width, MIN_SLOPE) : 1.f;
    q.scale[h] *= slope;
    q.offset[h] = q.offset[h] * slope + (high - at.tau2 - slope * high);
  }
}
