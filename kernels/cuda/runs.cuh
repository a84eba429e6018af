// Put before few.cu: runs of 256 inputs of quantised rows as operands of the tensor cores. Integers of
// a few bits, and their products with a group's scale, are exact as halves; what is not is a factor of
// the sums.

constexpr int kRun = 256, kRunWarps = 8, kTokens = 8;
constexpr int kSteps = kRun / 16;       // 16 inputs of a run are one step of the tensor cores
constexpr int kRunParts = kSteps + 1;   // and one more for the sums of each 16 inputs
constexpr u32 kMagic = 0x64006400u;     // as halves, 1024 + the lowest 10 bits

__device__ __forceinline__ __half2 as_halves(u32 bits) { return *reinterpret_cast<__half2*>(&bits); }

__device__ __forceinline__ u32 as_bits(__half2 halves) { return *reinterpret_cast<u32*>(&halves); }

// a · b + c, each a pair of halves
__device__ __forceinline__ u32 fused(u32 a, __half2 b, __half2 c) {
  return as_bits(__hfma2(as_halves(a), b, c));
}

__device__ __forceinline__ __half2 times(__half2 halves, float factor) {
  return __hmul2(halves, __float2half2_rn(factor));
}

// Bytes of a word chosen by `selector` (0 to 3 each, in its nibbles 0 and 2), less `bias`, over
// kParts: 1, 16 or 256. As halves, 0x6400 and a byte are 1024 + byte; 0x5400: 64 + byte / 16; and so on.
template <int kParts = 1>
__device__ __forceinline__ __half2 byte_halves(u32 word, u32 selector, float bias) {
  constexpr u32 kTop = kParts == 1 ? 0x64646464u : kParts == 16 ? 0x54545454u : 0x44444444u;
  const u32 bits = __byte_perm(word, kTop, selector | 0x4040u);
  return __hsub2(as_halves(bits), __float2half2_rn((1024.0f + bias) / kParts));
}

// c (16, 8) += x (16, 16) · (even, odd) (16, 8); see common.cuh
__device__ __forceinline__ void add_product(float (&c)[4], const uint4& x, u32 even, u32 odd) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(even), "r"(odd));
}

__device__ __forceinline__ float both(const float (&c)[4], int output) {
  return c[output] + c[2 + output];  // what is rounded, and what that left
}

__device__ __forceinline__ u32 word_at(const u8* at) { return *reinterpret_cast<const u32*>(at); }

// Where a thread reads: the bytes of the output that it decodes (tile 0, output `quad`), from the
// run's first on; the same of the first output that it sums (2t); the tokens' side of the run, in
// shared memory if kOwn.
template <bool kOwn>
struct Source {
  const u8 *decoded, *summed;
  const uint4* tokens;
  int t, skew;
  u32 magic;
  __device__ __forceinline__ uint4 step(int number) const {
    if constexpr (kOwn) return tokens[number * 4];
    return __ldg(tokens + number * 4);
  }
  template <int kFirst, int kStep>  // steps kFirst, kFirst + kStep, ...
  __device__ __forceinline__ void load(uint4 (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = step(kFirst + i * kStep);
  }
  // Fields of two bytes' bits as halves above 1024; one instruction.
  __device__ __forceinline__ u32 fields(u32 word, u32 mask) const { return word & mask | magic; }
};

// Types whose blocks go to the tensor cores. A run of a row is kBytes long. Rows of eight runs lie
// kStride apart in shared memory: 4 words more than a multiple of 32, so that threads of all rows
// read words without conflict.
// add: sums[tile][j] += the run's inputs times output tile * 8 + t * 2 + j, for the thread's token.
// A thread decodes the output tile * 8 + quad: of each step, inputs 4t to 4t + 3.
template <typename Type> struct Runs;

template <> struct Runs<Q4_K> {
  static constexpr int kBytes = 144, kStride = 8 * kBytes + 16;

  template <int kTiles>
  struct Scales {  // of eight groups of 32 inputs: kernels/quants.py, _k_scales
    u32 scales[kTiles][2], minima[kTiles][2];
    __device__ __forceinline__ explicit Scales(const u8* decoded) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* at = decoded + tile * 8 * kStride + 4;
        const u32 first = word_at(at), second = word_at(at + 4), third = word_at(at + 8);
        scales[tile][0] = first & 0x3f3f3f3fu;
        scales[tile][1] = third & 0x0f0f0f0fu | first >> 2 & 0x30303030u;
        minima[tile][0] = second & 0x3f3f3f3fu;
        minima[tile][1] = third >> 4 & 0x0f0f0f0fu | second >> 2 & 0x30303030u;
      }
    }
  };

  template <int kChunk, int kTiles, bool kOwn>  // 64 inputs: two groups
  static __device__ __forceinline__ void chunk(const Source<kOwn>& source, const Scales<kTiles>& k,
                                               const uint4 (&x)[4], float (&c)[kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u8* at = source.decoded + tile * 8 * kStride + 16 + kChunk * 32 + source.t * 4;
      const u32 packed = k.scales[tile][kChunk / 2];
      constexpr u32 kByte = kChunk % 2 * 2;
      const __half2 low = byte_halves(packed, kByte * 0x101, 0.0f);
      const __half2 high = byte_halves<16>(packed, (kByte + 1) * 0x101, 0.0f);
      const __half2 low_offset = times(low, -1024.0f), high_offset = times(high, -1024.0f);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 even = word_at(at + 16 * i), odd = even >> 8;
        add_product(c[tile], x[i], fused(source.fields(even, 0x000f000fu), low, low_offset),
                    fused(source.fields(odd, 0x000f000fu), low, low_offset));
        add_product(c[tile], x[2 + i], fused(source.fields(even, 0x00f000f0u), high, high_offset),
                    fused(source.fields(odd, 0x00f000f0u), high, high_offset));
      }
    }
  }

  template <int kTiles, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kOwn>& source, const uint4 (&first)[4],
                                             float (&sums)[kTiles][2]) {
    const Scales<kTiles> k(source.decoded);
    float c[kTiles][4] = {}, offsets[kTiles][4] = {};
    uint4 second[4], third[4], fourth[4];
    source.template load<4, 1>(second);
    chunk<0>(source, k, first, c);
    source.template load<8, 1>(third);
    chunk<1>(source, k, second, c);
    source.template load<12, 1>(fourth);
    chunk<2>(source, k, third, c);
    const uint4 token_sums = source.step(kSteps);
    chunk<3>(source, k, fourth, c);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u32 at = source.t % 2 * 2;  // minima 2t and 2t + 1: of sums 4t to 4t + 3
      const u32 word = source.t < 2 ? k.minima[tile][0] : k.minima[tile][1];
      const u32 pair = as_bits(byte_halves(word, at | (at + 1) << 8, 0.0f));
      add_product(offsets[tile], token_sums, pair, pair);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 halves = word_at(source.summed + (tile * 8 + j) * kStride);
        const float2 factors = __half22float2(as_halves(halves));
        sums[tile][j] = __fmaf_rn(factors.x, both(c[tile], j), sums[tile][j]);
        sums[tile][j] = __fmaf_rn(-factors.y, both(offsets[tile], j), sums[tile][j]);
      }
    }
  }
};

template <> struct Runs<Q6_K> {
  static constexpr int kBytes = 210, kStride = 8 * kBytes;

  // Four bytes of the thread's output, `at` bytes from the run's first.
  template <bool kOwn>
  static __device__ __forceinline__ u32 load(const Source<kOwn>& source, int tile, int at) {
    const u32* words = reinterpret_cast<const u32*>(source.decoded + tile * 8 * kStride + at);
    return __funnelshift_r(words[0], words[1], (source.skew & 2) * 8);
  }

  // Steps 8 half + u + 2i. Low: 4 bits, high: the 2 above them, whose sums are apart, since a scale
  // times all six would not be exact as a half.
  template <int kHalf, int kU, int kTiles, bool kOwn>
  static __device__ __forceinline__ void chunk(const Source<kOwn>& source, const u32 (&scales)[kTiles][2],
                                               const uint4 (&x)[4], float (&low)[kTiles][4],
                                               float (&high)[kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int t4 = source.t * 4;
      const u32 above = load(source, tile, 128 + kHalf * 32 + kU * 16 + t4);
      const u32 words[2] = {load(source, tile, kHalf * 64 + kU * 16 + t4),
                            load(source, tile, kHalf * 64 + (kU + 2) * 16 + t4)};
      const u32 pairs[2] = {above, above >> 2};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The low bits are at 4 (i / 2) of their byte, and so are the high ones, of pairs[i % 2].
        const u32 packed = scales[tile][i / 2], byte = (kU + i % 2 * 2) * 0x101;
        const __half2 factor = i < 2 ? byte_halves<16>(packed, byte, 128.0f)
                                     : byte_halves<256>(packed, byte, 128.0f);
        const __half2 offset = times(factor, -1024.0f);
        const u32 word = words[i % 2], pair = pairs[i % 2];
        const u32 mask = i < 2 ? 0x000f000fu : 0x00f000f0u;
        add_product(low[tile], x[i], fused(source.fields(word, mask), factor, offset),
                    fused(source.fields(word >> 8, mask), factor, offset));
        const u32 pair_mask = i < 2 ? 0x00030003u : 0x00300030u;
        add_product(high[tile], x[i], fused(source.fields(pair, pair_mask), factor, offset),
                    fused(source.fields(pair >> 8, pair_mask), factor, offset));
      }
    }
  }

  template <int kHalf, int kTiles, bool kOwn>
  static __device__ __forceinline__ void load_scales(const Source<kOwn>& source,
                                                     u32 (&scales)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scales[tile][i] = load(source, tile, 192 + kHalf * 8 + i * 4) ^ 0x80808080u;
      }
    }
  }

  template <int kTiles, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kOwn>& source, const uint4 (&first)[4],
                                             float (&sums)[kTiles][2]) {
    float low[kTiles][4] = {}, high[kTiles][4] = {}, offsets[kTiles][4] = {};
    u32 scales[kTiles][2];
    uint4 second[4], third[4], fourth[4];
    load_scales<0>(source, scales);
    source.template load<1, 2>(second);
    chunk<0, 0>(source, scales, first, low, high);
    source.template load<8, 2>(third);
    chunk<0, 1>(source, scales, second, low, high);
    load_scales<1>(source, scales);
    source.template load<9, 2>(fourth);
    chunk<1, 0>(source, scales, third, low, high);
    const uint4 token_sums = source.step(kSteps);
    chunk<1, 1>(source, scales, fourth, low, high);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u32 word = load(source, tile, 192 + source.t * 4) ^ 0x80808080u;
      add_product(offsets[tile], token_sums, as_bits(byte_halves(word, 0x200, 128.0f)),
                  as_bits(byte_halves(word, 0x301, 128.0f)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float d = half_at(source.summed + (tile * 8 + j) * kStride + 208);
        const float four = 16.0f * both(low[tile], j);
        const float six = __fmaf_rn(256.0f, both(high[tile], j), four);
        const float all = __fmaf_rn(-32.0f, both(offsets[tile], j), six);
        sums[tile][j] = __fmaf_rn(d, all, sums[tile][j]);
      }
    }
  }
};

template <> struct Runs<Q8_0> {
  static constexpr int kBytes = 272, kStride = 8 * kBytes + 16;

  template <int kPair, int kTiles, bool kOwn>  // of blocks: 68 bytes
  static __device__ __forceinline__ void chunk(const Source<kOwn>& source, const uint4 (&x)[4],
                                               float (&sums)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u8* row = source.decoded + tile * 8 * kStride + kPair * 68 + source.t * 4;
      const u32 words[4] = {__funnelshift_r(word_at(row), word_at(row + 4), 16),
                            __funnelshift_r(word_at(row + 16), word_at(row + 20), 16),
                            word_at(row + 36), word_at(row + 52)};
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        float c[4] = {};
#pragma unroll
        for (int i = block * 2; i < block * 2 + 2; ++i) {
          const u32 word = words[i] ^ 0x80808080u;  // signed to 0 ... 255
          add_product(c, x[i], as_bits(byte_halves(word, 0x200, 128.0f)),
                      as_bits(byte_halves(word, 0x301, 128.0f)));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u8* at = source.summed + (tile * 8 + j) * kStride + kPair * 68 + block * 34;
          sums[tile][j] = __fmaf_rn(half_at(at), both(c, j), sums[tile][j]);
        }
      }
    }
  }

  template <int kTiles, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kOwn>& source, const uint4 (&first)[4],
                                             float (&sums)[kTiles][2]) {
    uint4 second[4], third[4], fourth[4];
    source.template load<4, 1>(second);
    chunk<0>(source, first, sums);
    source.template load<8, 1>(third);
    chunk<1>(source, second, sums);
    source.template load<12, 1>(fourth);
    chunk<2>(source, third, sums);
    chunk<3>(source, fourth, sums);
  }
};

template <typename Type> constexpr int kFirstStep = 1;  // between the first four steps of a run
template <> constexpr int kFirstStep<Q6_K> = 2;
