// GGUF blocks to values. A thread decodes 8 consecutive values, which always share one scale.
// Field order and packing: kernels/quants.py. Each operation is rounded on its own, as there.

__device__ __forceinline__ float half_at(const u8* at) {
  return __half2float(__ushort_as_half(*reinterpret_cast<const u16*>(at)));
}

// 8 bytes; kAlign: what every block of the type keeps their address a multiple of
template <int kAlign>
__device__ __forceinline__ uint2 load8(const u8* at) {
  if constexpr (kAlign == 8) return *reinterpret_cast<const uint2*>(at);
  if constexpr (kAlign == 4) {
    const u32* words = reinterpret_cast<const u32*>(at);
    return {words[0], words[1]};
  }
  const u16* words = reinterpret_cast<const u16*>(at);
  return {words[0] | u32(words[1]) << 16, words[2] | u32(words[3]) << 16};
}

// The bits `mask` of each byte, from bit `shift` on.
__device__ __forceinline__ uint2 bits(uint2 bytes, int shift, u32 mask) {
  mask *= 0x01010101u;
  return {bytes.x >> shift & mask, bytes.y >> shift & mask};
}

__device__ __forceinline__ uint2 join(uint2 low, uint2 high, int shift) {
  return {low.x | high.x << shift, low.y | high.y << shift};
}

// Bit i of `packed` as byte i, 0 or 1.
__device__ __forceinline__ uint2 spread(u32 packed) {
  return {(packed & 15) * 0x00204081u & 0x01010101u, (packed >> 4) * 0x00204081u & 0x01010101u};
}

// Byte i less `bias`, times scale. 2**23 + byte is exact, and so is what is left of it.
__device__ __forceinline__ float scaled(float scale, uint2 bytes, int i, int bias) {
  const u32 word = __byte_perm(i < 4 ? bytes.x : bytes.y, 0x4b000000u, 0x7650 | i % 4);
  return __fmul_rn(scale, __fsub_rn(__int_as_float(word), 8388608.0f + bias));
}

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
    const uint2 q = bits(load8<2>(block + 2 + first % 16), first / 16 * 4, 15);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(d, q, i, 8);
  }
};

struct Q4_1 {
  static constexpr int kSize = 32, kBytes = 20;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block), m = half_at(block + 2);
    const uint2 q = bits(load8<4>(block + 4 + first % 16), first / 16 * 4, 15);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fadd_rn(scaled(d, q, i, 0), m);
  }
};

// The fifth bits of values `first` to `first` + 7 are one byte.
struct Q5_0 {
  static constexpr int kSize = 32, kBytes = 22;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block);
    const uint2 low = bits(load8<2>(block + 6 + first % 16), first / 16 * 4, 15);
    const uint2 q = join(low, spread(block[2 + first / 8]), 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(d, q, i, 16);
  }
};

struct Q5_1 {
  static constexpr int kSize = 32, kBytes = 24;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block), m = half_at(block + 2);
    const uint2 low = bits(load8<8>(block + 8 + first % 16), first / 16 * 4, 15);
    const uint2 q = join(low, spread(block[4 + first / 8]), 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fadd_rn(scaled(d, q, i, 0), m);
  }
};

struct Q8_0 {
  static constexpr int kSize = 32, kBytes = 34;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const float d = half_at(block);
    const uint2 q = load8<2>(block + 2 + first);
    const uint2 offset = {q.x ^ 0x80808080u, q.y ^ 0x80808080u};  // signed to 0 ... 255
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(d, offset, i, 128);
  }
};

struct Q2_K {
  static constexpr int kSize = 256, kBytes = 84;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const int packed = block[first / 16];
    const float scale = __fmul_rn(half_at(block + 80), float(packed & 15));
    const float offset = __fmul_rn(half_at(block + 82), float(packed >> 4));
    const uint2 bytes = load8<4>(block + 16 + first / 128 * 32 + first % 32);
    const uint2 q = bits(bytes, first / 32 % 4 * 2, 3);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fsub_rn(scaled(scale, q, i, 0), offset);
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
    const float scale = __fmul_rn(half_at(block + 108), float(scale_of(block + 96, first / 16)));
    const uint2 high = bits(load8<2>(block + first % 32), first / 32, 1);
    const uint2 bytes = load8<2>(block + 32 + first / 128 * 32 + first % 32);
    const uint2 q = join(bits(bytes, first / 32 % 4 * 2, 3), high, 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(scale, q, i, 4);
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
    const float scale = __fmul_rn(half_at(block), float(k.scale));
    const float offset = __fmul_rn(half_at(block + 2), float(k.minimum));
    const uint2 bytes = load8<8>(block + 16 + first / 64 * 32 + first % 32);
    const uint2 q = bits(bytes, first / 32 % 2 * 4, 15);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fsub_rn(scaled(scale, q, i, 0), offset);
  }
};

struct Q5_K {
  static constexpr int kSize = 256, kBytes = 176;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const KScale k(block + 4, first / 32);
    const float scale = __fmul_rn(half_at(block), float(k.scale));
    const float offset = __fmul_rn(half_at(block + 2), float(k.minimum));
    const uint2 high = bits(load8<8>(block + 16 + first % 32), first / 32, 1);
    const uint2 bytes = load8<8>(block + 48 + first / 64 * 32 + first % 32);
    const uint2 q = join(bits(bytes, first / 32 % 2 * 4, 15), high, 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __fsub_rn(scaled(scale, q, i, 0), offset);
  }
};

struct Q6_K {
  static constexpr int kSize = 256, kBytes = 210;
  static __device__ __forceinline__ void decode(const u8* block, int first, float* out) {
    const int group_scale = static_cast<signed char>(block[192 + first / 16]);
    const float scale = __fmul_rn(half_at(block + 208), float(group_scale));
    const uint2 low = load8<2>(block + first / 128 * 64 + first % 64);
    const uint2 high = load8<2>(block + 128 + first / 128 * 32 + first % 32);
    const uint2 q = join(bits(low, first / 64 % 2 * 4, 15), bits(high, first / 32 % 4 * 2, 3), 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = scaled(scale, q, i, 32);
  }
};
