// Put before every source file, and blocks.cuh after it: types, reductions whose order depends on the
// shape alone, and the tensor cores' product.
#include <cuda_fp16.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr int kWarp = 32;
constexpr int kPage = 32;        // tokens of a KV page
constexpr float kMostHalf = 65504.0f;
#define kInfinity __int_as_float(0x7f800000)

// For kernels launched while those ahead still run (launch.py): lets the next one start, and returns
// when what those ahead write is there and what they read may be written.
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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

// Exponent e such that most * 2**-e lies in [2**10, 2**11): halves hold sums of 16 such values.
__device__ __forceinline__ int run_exponent(float most) {
  const int exponent = (__float_as_int(most) >> 23 & 255) - 127;
  if (most == 0.0f || exponent > 127) return 0;
  return max(exponent - 10, -116);
}

// Finite values stay finite; a NaN stays one, which fminf and fmaxf alone would hide.
__device__ __forceinline__ __half nearest_half(float value) {
  return __float2half_rn(value != value ? value : fminf(fmaxf(value, -kMostHalf), kMostHalf));
}

// c (16, 8) += a (16, 16) · b (16, 8): PTX, mma.m16n8k16
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += rows `quad` (upper) and `quad` + 8 (lower) of a times column `quad` of b, over 32 inputs.
// Each thread t of a quad gives 8 inputs in a row, 8t to 8t + 7, of each operand. They stand for
// those that the instruction calls 2t, 2t + 1, 2t + 8, 2t + 9 in two steps: in both operands alike,
// so that the sum is over the same products.
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& upper, const uint4& lower,
                                         const uint4& b) {
  multiply(c, upper.x, lower.x, upper.y, lower.y, b.x, b.y);
  multiply(c, upper.z, lower.z, upper.w, lower.w, b.z, b.w);
}
