// GGUF blocks to values. A thread decodes 8 consecutive values, which always share one scale.
// Field order and packing: kernels/quants.py. Each operation is rounded on its own, as there.

__device__ __forceinline__ float half_at(const u8* at) {
  return __half2float(__ushort_as_half(*reinterpret_cast<const u16*>(at)));
}

// 8 bytes at an even address.
struct Bytes8 {
  u16 words[4];
  __device__ __forceinline__ explicit Bytes8(const u8* at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const u16*>(at)[i];
  }
  __device__ __forceinline__ int operator[](int i) const { return words[i / 2] >> 8 * (i % 2) & 255; }
};

__device__ __forceinline__ float scaled(float scale, int q) { return __fmul_rn(scale, float(q)); }

struct F32 {
  static constexpr int kSize = 8, kBytes = 32;
  static __device__ __forceinline__ void decode(const u8* block, int, float* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = reinterpret_cast<const float*>(block)[i];
  }
};

struct F16 {
  static constexpr int kSize = 8, kBytes = 16;
  static __device__ __forceinline__ void decode(const u8* block, int, float* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = half_at(block + 2 * i);
  }
};

struct BF16 {
  static constexpr int kSize = 8, kBytes = 16;
  static __device__ __forceinline__ void decode(const u8* block, int, float* out) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = __int_as_float(int(reinterpret_cast<const u16*>(block)[i]) << 16);
    }
  }
};

struct Q4_0 {
  static constexpr int kSize = 32, kBytes = 18;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block);
    const Bytes8 q(block + 2 + first % 16);
    const int shift = first / 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(d, (q[i] >> shift & 15) - 8);
  }
};

struct Q4_1 {
  static constexpr int kSize = 32, kBytes = 20;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block), m = half_at(block + 2);
    const Bytes8 q(block + 4 + first % 16);
    const int shift = first / 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fadd_rn(scaled(d, q[i] >> shift & 15), m);
  }
};

// The fifth bits of values `first` to `first` + 7 are one byte.
struct Q5_0 {
  static constexpr int kSize = 32, kBytes = 22;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block);
    const int high = block[2 + first / 8];
    const Bytes8 q(block + 6 + first % 16);
    const int shift = first / 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = scaled(d, (q[i] >> shift & 15 | (high >> i & 1) << 4) - 16);
    }
  }
};

struct Q5_1 {
  static constexpr int kSize = 32, kBytes = 24;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block), m = half_at(block + 2);
    const int high = block[4 + first / 8];
    const Bytes8 q(block + 8 + first % 16);
    const int shift = first / 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = __fadd_rn(scaled(d, q[i] >> shift & 15 | (high >> i & 1) << 4), m);
    }
  }
};

struct Q8_0 {
  static constexpr int kSize = 32, kBytes = 34;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block);
    const Bytes8 q(block + 2 + first);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(d, static_cast<signed char>(q[i]));
  }
};

struct Q2_K {
  static constexpr int kSize = 256, kBytes = 84;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const int packed = block[first / 16];
    const float scale = scaled(half_at(block + 80), packed & 15);
    const float offset = scaled(half_at(block + 82), packed >> 4);
    const Bytes8 q(block + 16 + first / 128 * 32 + first % 32);
    const int shift = first / 32 % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fsub_rn(scaled(scale, q[i] >> shift & 3), offset);
  }
};

struct Q3_K {
  static constexpr int kSize = 256, kBytes = 110;
  static __device__ __forceinline__ int scale_of(const u8* packed, int group) {
    const int low = packed[group % 8] >> group / 8 * 4 & 15;
    const int high = packed[8 + group % 4] >> group / 4 * 2 & 3;
    return (low | high << 4) - 32;
  }
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float scale = scaled(half_at(block + 108), scale_of(block + 96, first / 16));
    const Bytes8 mask(block + first % 32);
    const Bytes8 q(block + 32 + first / 128 * 32 + first % 32);
    const int shift = first / 32 % 4 * 2, plane = first / 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = scaled(scale, (q[i] >> shift & 3) + (mask[i] >> plane & 1) * 4 - 4);
    }
  }
};

// 6-bit scale and minimum of 32 values: kernels/quants.py, _k_scales.
struct KScale {
  int scale, minimum;
  __device__ __forceinline__ KScale(const u8* packed, int group) {
    if (group < 4) {
      scale = packed[group] & 63;
      minimum = packed[group + 4] & 63;
    } else {
      scale = packed[group + 4] & 15 | packed[group - 4] >> 2 & 48;
      minimum = packed[group + 4] >> 4 | packed[group] >> 2 & 48;
    }
  }
};

struct Q4_K {
  static constexpr int kSize = 256, kBytes = 144;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const KScale k(block + 4, first / 32);
    const float scale = scaled(half_at(block), k.scale);
    const float offset = scaled(half_at(block + 2), k.minimum);
    const Bytes8 q(block + 16 + first / 64 * 32 + first % 32);
    const int shift = first / 32 % 2 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fsub_rn(scaled(scale, q[i] >> shift & 15), offset);
  }
};

struct Q5_K {
  static constexpr int kSize = 256, kBytes = 176;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const KScale k(block + 4, first / 32);
    const float scale = scaled(half_at(block), k.scale);
    const float offset = scaled(half_at(block + 2), k.minimum);
    const Bytes8 high(block + 16 + first % 32);
    const Bytes8 q(block + 48 + first / 64 * 32 + first % 32);
    const int shift = first / 32 % 2 * 4, plane = first / 32;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int value = q[i] >> shift & 15 | (high[i] >> plane & 1) << 4;
      out[i] = __fsub_rn(scaled(scale, value), offset);
    }
  }
};

struct Q6_K {
  static constexpr int kSize = 256, kBytes = 210;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const int group_scale = static_cast<signed char>(block[192 + first / 16]);
    const float scale = scaled(half_at(block + 208), group_scale);
    const Bytes8 low(block + first / 128 * 64 + first % 64);
    const Bytes8 high(block + 128 + first / 128 * 32 + first % 32);
    const int shift = first / 64 % 2 * 4, plane = first / 32 % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = scaled(scale, (low[i] >> shift & 15 | (high[i] >> plane & 3) << 4) - 32);
    }
  }
};

// values: num_groups * 8 halves, rounded to nearest from the exact float32 value
template <typename Type>
__global__ void dequantize(i64 num_groups, const u8* __restrict__ blocks,
                           __half* __restrict__ values) {
  constexpr int kGroups = Type::kSize / 8;
  const i64 group = blockIdx.x * i64(blockDim.x) + threadIdx.x;
  if (group >= num_groups) return;
  float decoded[8];
  Type::decode(blocks + group / kGroups * Type::kBytes, group % kGroups * 8, decoded);
  __half2 halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    halves[i] = __floats2half2_rn(decoded[2 * i], decoded[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(values + group * 8) = *reinterpret_cast<const uint4*>(halves);
}

// out[t] = row token_ids[t] - first_row, where the tensor holds it; one block per token
template <typename Type>
__global__ void gather_rows(int num_inputs, int first_row, int num_rows, i64 row_nbytes,
                            const u8* __restrict__ blocks, const int* __restrict__ token_ids,
                            float* __restrict__ out) {
  const i64 token = blockIdx.x, row = token_ids[token] - first_row;
  if (row < 0 || row >= num_rows) return;
  constexpr int kGroups = Type::kSize / 8;
  for (int group = threadIdx.x; group < num_inputs / 8; group += blockDim.x) {
    float decoded[8];
    const u8* block = blocks + row * row_nbytes + i64(group / kGroups) * Type::kBytes;
    Type::decode(block, group % kGroups * 8, decoded);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[token * num_inputs + group * 8 + i] = decoded[i];
  }
}
