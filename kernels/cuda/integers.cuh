// Integers of pages of 8 bits and their scales, as operands of products.

struct Integers {  // eight, as loaded
  uint2 bytes;
  __device__ __forceinline__ void load(const signed char* at) {
    bytes = *reinterpret_cast<const uint2*>(at);
  }
};

// Eight scales. 127 times the largest of all would not be a half, so that the one below it serves.
struct Scales {
  __half2 pairs[4];
  __device__ __forceinline__ void load(const __half* at) {
    const __half2 most = __half2half2(__ushort_as_half(0x6007));  // 515.5
    *reinterpret_cast<uint4*>(pairs) = *reinterpret_cast<const uint4*>(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __hmin2_nan(pairs[i], most);
  }
};

// Two bytes, 128 added to each, times their scales. The half 0x6400 + n is 1024 + n.
__device__ __forceinline__ __half2 scaled_pair(u32 bytes, u32 places, __half2 scales) {
  const u32 words = __byte_perm(bytes, 0x64646464u, places);
  const __half2 offset = __half2half2(__ushort_as_half(0x6480));  // 1024 + 128
  return __hmul2(__hsub2(*reinterpret_cast<const __half2*>(&words), offset), scales);
}

__device__ __forceinline__ Operand<__half> scaled_halves(const Integers& integers,
                                                         const Scales& scales) {
  Operand<__half> operand;
  __half2* pairs = reinterpret_cast<__half2*>(operand.parts);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 bytes = (i < 2 ? integers.bytes.x : integers.bytes.y) ^ 0x80808080u;
    pairs[i] = scaled_pair(bytes, i % 2 ? 0x4342 : 0x4140, scales.pairs[i]);
  }
  return operand;
}
