// Put before sampling.cu: passes of a block of 1,024 threads over a row of logits, as in
// kernels/cpu/selection.py.

using u64 = unsigned long long;

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kCuts = 7;  // a step of a search divides its range by 8
constexpr int kMostLogprobs = 20;
constexpr i64 kOneWeight = i64(1) << 42;  // of the most likely token
constexpr float kHighest = 3.4028234663852886e38f;
constexpr int kOk = 0, kNotFinite = 1, kAllMasked = 2;

// Consecutive items of one warp, so that warps in order are items in order.
struct Range {
  int begin, end;
  __device__ __forceinline__ explicit Range(int count) {
    const int span = (count + kThreads - 1) / kThreads * kWarp;
    begin = min(int(threadIdx.x) / kWarp * span, count);
    end = min(begin + span, count);
  }
};

template <typename T>
__device__ __forceinline__ T warp_total(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Sums over the block, for every thread.
template <typename T, int kCount>
__device__ void block_totals(T (&values)[kCount]) {
  __shared__ T sums[kWarps][kCount];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  __syncthreads();  // the sums of an earlier call have been read
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T total = warp_total(values[i]);
    if (lane == 0) sums[warp][i] = total;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = warp_total(sums[lane][i]);
}

__device__ __forceinline__ int block_most(int value) {
  __shared__ int mosts[kWarps];
  __syncthreads();
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % kWarp == 0) mosts[threadIdx.x / kWarp] = value;
  __syncthreads();
  return __reduce_max_sync(~0u, mosts[threadIdx.x % kWarp]);
}

// The bits of a float as an int that orders like it, and back again; both zeros are one.
__device__ __forceinline__ int key_of(float value) {
  const int bits = __float_as_int(value == 0.0f ? 0.0f : value);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

__device__ __forceinline__ float value_of(int key) {
  return __int_as_float(key ^ (key >> 31 & 0x7fffffff));
}

// ---- weights -------------------------------------------------------------------------------

// exp(x) in units of 2**-42 for x <= 0, as selection.py computes it
__device__ __forceinline__ i64 weight_of(double x) {
  constexpr double kRound = 6755399441055744.0, kMantissa = 4503599627370496.0;
  constexpr i64 kMantissaBits = (i64(1) << 52) - 1;
  x = x < -40.0 ? -40.0 : x;
  const double k = __dsub_rn(__fma_rn(x, 1.4426950408889634, kRound), kRound);
  const double r =
      __fma_rn(-k, 1.90821492927058770002e-10, __fma_rn(-k, 6.93147180369123816490e-01, x));
  double p = __fma_rn(1.0 / 39916800.0, r, 1.0 / 3628800.0);
  p = __fma_rn(p, r, 1.0 / 362880.0);
  p = __fma_rn(p, r, 1.0 / 40320.0);
  p = __fma_rn(p, r, 1.0 / 5040.0);
  p = __fma_rn(p, r, 1.0 / 720.0);
  p = __fma_rn(p, r, 1.0 / 120.0);
  p = __fma_rn(p, r, 1.0 / 24.0);
  p = __fma_rn(p, r, 1.0 / 6.0);
  p = __fma_rn(p, r, 0.5);
  p = __fma_rn(p, r, 1.0);
  p = __fma_rn(p, r, 1.0);
  const i64 fixed = __double_as_longlong(__fma_rn(p, double(kOneWeight), kMantissa)) & kMantissaBits;
  return i64(u64(fixed) >> (__double_as_longlong(__dsub_rn(kMantissa, k)) & kMantissaBits));
}

struct Weights {  // stored: room for them where they are looked at many times, or null
  const float* values;
  int count;
  double high, scale;
  i64* stored;
  __device__ __forceinline__ i64 fresh(int i) const {
    return weight_of(__dmul_rn(__dsub_rn(double(values[i]), high), scale));
  }
  __device__ __forceinline__ i64 operator[](int i) const { return stored ? stored[i] : fresh(i); }
};

// Their sum; they are stored where there is room.
__device__ i64 weigh(const Weights& weights) {
  i64 total[1] = {0};
  for (int i = threadIdx.x; i < weights.count; i += kThreads) {
    const i64 weight = weights.fresh(i);
    if (weights.stored) weights.stored[i] = weight;
    total[0] += weight;
  }
  block_totals(total);  // its barriers also order the stores before what reads them
  return total[0];
}

// ---- searches ------------------------------------------------------------------------------

struct ByValue {  // items are values, each counts as one
  using Mass = int;
  const float* values;
  __device__ __forceinline__ void load(int i, i64& key, Mass& mass) const {
    key = key_of(values[i]);
    mass = 1;
  }
};

struct ByWeight {  // items are weights
  using Mass = i64;
  const i64* weights;
  __device__ __forceinline__ void load(int i, i64& key, Mass& mass) const {
    key = mass = weights[i];
  }
};

// The largest key in [low, above) from which on the items have at least the mass `target`, which
// those from `low` on have. mass_above: of the items with larger keys; none are at `above`.
template <typename Items>
__device__ i64 search(const Items& items, int count, i64 low, i64 above,
                      typename Items::Mass target, typename Items::Mass& mass_above) {
  using Mass = typename Items::Mass;
  mass_above = 0;
  while (above - low > 1) {
    i64 cuts[kCuts];
    Mass masses[kCuts] = {};
#pragma unroll
    for (int j = 0; j < kCuts; ++j) {
      cuts[j] = low + ((above - low) * (j + 1) + kCuts) / (kCuts + 1);
    }
    for (int i = threadIdx.x; i < count; i += kThreads) {
      i64 key;
      Mass mass;
      items.load(i, key, mass);
#pragma unroll
      for (int j = 0; j < kCuts; ++j) masses[j] += key >= cuts[j] ? mass : 0;
    }
    block_totals(masses);
    i64 next_low = low, next_above = above;
#pragma unroll
    for (int j = 0; j < kCuts; ++j) {
      if (masses[j] >= target) next_low = cuts[j];
    }
#pragma unroll
    for (int j = kCuts - 1; j >= 0; --j) {
      if (masses[j] < target && cuts[j] < above) {
        next_above = cuts[j];
        mass_above = masses[j];
      }
    }
    low = next_low;
    above = next_above;
  }
  return low;
}

// For every warp, the sum of what the warps before it have; `total`: of all.
template <typename T>
__device__ T before_warp(T own, T& total) {
  __shared__ T sums[kWarps];
  const int warp = threadIdx.x / kWarp;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) sums[warp] = own;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other == warp) before = total;
    total += sums[other];
  }
  return before;
}

// The k largest of a row, equal ones lowest position first, in order of position; k <= count.
__device__ void keep_top(const float* row, int count, int k, float high, float* values, int* ids) {
  int num_above;
  const i64 lowest = key_of(-kHighest), above = i64(key_of(high)) + 1;
  const float floor = value_of(int(search(ByValue{row}, count, lowest, above, k, num_above)));
  const int num_equal_kept = k - num_above;
  const Range range(count);
  const int lane = threadIdx.x % kWarp;
  int greater = 0, equal = 0, num_greater, num_equal;
  for (int i = range.begin + lane; i < range.end; i += kWarp) {
    greater += row[i] > floor;
    equal += row[i] == floor;
  }
  const int greater_before = before_warp(warp_total(greater), num_greater);
  int equal_before = before_warp(warp_total(equal), num_equal);
  int kept = greater_before + min(equal_before, num_equal_kept);
  const u32 lower = (1u << lane) - 1;
  for (int base = range.begin; base < range.end; base += kWarp) {
    const int i = base + lane;
    const float value = i < range.end ? row[i] : -kInfinity;
    const u32 equals = __ballot_sync(~0u, value == floor);
    const bool keeps = value > floor || (value == floor &&
                       equal_before + __popc(equals & lower) < num_equal_kept);
    const u32 keepers = __ballot_sync(~0u, keeps);
    if (keeps) {
      values[kept + __popc(keepers & lower)] = value;
      ids[kept + __popc(keepers & lower)] = i;
    }
    kept += __popc(keepers);
    equal_before += __popc(equals);
  }
  __syncthreads();
}
