// Put before every source file: types, and reductions whose order depends on nothing but the shape.
#include <cuda_fp16.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr int kWarp = 32;
constexpr int kPage = 32;        // tokens of a KV page
constexpr float kMostHalf = 65504.0f;
#define kInfinity __int_as_float(0x7f800000)

// Consecutive floats that travel together.
template <int kCount>
struct alignas(4 * kCount) Floats {
  float values[kCount];
  __device__ __forceinline__ float& operator[](int i) { return values[i]; }
  __device__ __forceinline__ float operator[](int i) const { return values[i]; }
};

template <int kCount>
__device__ __forceinline__ Floats<kCount>* floats(float* at) {
  return reinterpret_cast<Floats<kCount>*>(at);
}

template <int kCount>
__device__ __forceinline__ const Floats<kCount>* floats(const float* at) {
  return reinterpret_cast<const Floats<kCount>*>(at);
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}

// Sum over a block of whole warps; every thread gets it. shared: one float per warp.
__device__ __forceinline__ float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < blockDim.x / kWarp; ++warp) total += shared[warp];
  return total;
}

__device__ __forceinline__ float block_max(float value, float* shared) {
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  float most = shared[0];
  for (int warp = 1; warp < blockDim.x / kWarp; ++warp) most = fmaxf(most, shared[warp]);
  return most;
}

__device__ __forceinline__ float exponent_of_two(int exponent) {  // 2**exponent, -126 to 127
  return __int_as_float((exponent + 127) << 23);
}

// Exponent e such that most * 2**-e lies in [2**14, 2**15), where halves are precise and finite.
__device__ __forceinline__ int half_exponent(float most) {
  const int exponent = (__float_as_int(most) >> 23 & 255) - 127;
  if (most == 0.0f || exponent > 127) return 0;
  return max(exponent - 14, -100);
}
