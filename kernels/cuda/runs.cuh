// Put before few.cu: runs of 256 inputs of quantised rows as operands of the tensor cores. Products of
// the integers of a group are summed exactly; its scale multiplies what comes of that.

constexpr int kRun = 256, kRunWarps = 8, kTokens = 8;
constexpr int kGroups = kRun / 32;      // 32 inputs are one step of the tensor cores
constexpr int kRunParts = kGroups + 1;  // and one more has the sums of each 16 inputs
constexpr float kSumParts = 16.0f;      // by which those are divided, so that halves hold them

__device__ __forceinline__ __half2 as_halves(u32 bits) { return *reinterpret_cast<__half2*>(&bits); }

__device__ __forceinline__ u32 as_bits(__half2 halves) { return *reinterpret_cast<u32*>(&halves); }

// Bytes of a word chosen by `selector` (0 to 3 each, in its nibbles 0 and 2), less `bias`, as halves:
// 0x6400 and a byte are 1024 + byte.
__device__ __forceinline__ u32 byte_halves(u32 word, u32 selector, float bias) {
  const u32 bits = __byte_perm(word, 0x64646464u, selector | 0x4040u);
  return as_bits(__hsub2(as_halves(bits), __float2half2_rn(1024.0f + bias)));
}

__device__ __forceinline__ int unsigned_byte(u32 word, int number) {
  return __byte_perm(word, 0, 0x4440 | number);
}

__device__ __forceinline__ int signed_byte(u32 word, int number) {
  int value;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(word), "r"(number * 0x1111 | 0x8880));
  return value;
}

// c (16, 8) = x (16, 32) · (first, second) (32, 8), signed bytes: PTX, mma.m16n8k32
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const uint4& x, u32 first, u32 second) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(first), "r"(second), "r"(0));
}

// c (16, 8) = (upper, lower) (16, 16) · weight (16, 8), signed bytes: PTX, mma.m16n8k16
__device__ __forceinline__ void multiply_bytes(int (&c)[4], u32 upper, u32 lower, u32 weight) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(upper), "r"(lower), "r"(weight), "r"(0));
}

// c (16, 8) += x (16, 16) · (even, odd) (16, 8), halves; see common.cuh
__device__ __forceinline__ void add_product(float (&c)[4], const uint4& x, u32 even, u32 odd) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(even), "r"(odd));
}

// The upper and the lower bytes of the tokens are rows of their own.
__device__ __forceinline__ float joined(int upper, int lower) {
  return __fmaf_rn(256.0f, float(upper), float(lower));
}

__device__ __forceinline__ u32 word_at(const u8* at) { return *reinterpret_cast<const u32*>(at); }

// Where a thread reads: the bytes of the output that it decodes (tile 0, output `quad`), from the
// run's first on; the same of the first output that it sums (2t); both `skew` bytes early, where they
// have to be a multiple of 4; the tokens' side of the run, in shared memory if kOwn.
template <bool kOwn>
struct Source {
  const u8 *decoded, *summed;
  const uint4* tokens;
  int t, skew;
  __device__ __forceinline__ uint4 step(int number) const {
    if constexpr (kOwn) return tokens[number * 4];
    return __ldg(tokens + number * 4);
  }
  __device__ __forceinline__ void load(int first, uint4 (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = step(first + i);
  }
};

// Types whose blocks go to the tensor cores. A run of a row is kBytes long. Rows of eight runs lie
// kStride apart in shared memory: 4 words more than a multiple of 32, so that threads of all rows
// read words without conflict.
// add: sums[tile][j] += the run's inputs times output tile * 8 + t * 2 + j, for the thread's token;
// x: the tokens' side of groups 0 to 3. A thread decodes the output tile * 8 + quad: of each group,
// inputs 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3.
template <typename Type> struct Runs;

template <> struct Runs<Q4_K> {
  static constexpr int kBytes = 144, kStride = 8 * kBytes + 16;

  template <int kTiles>
  struct Sums {
    u32 scales[kTiles][2][2];  // by output, of four groups in a word: kernels/quants.py, _k_scales
    int upper[kTiles][2] = {}, lower[kTiles][2] = {};
    __device__ __forceinline__ explicit Sums(const u8* summed) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u8* at = summed + (tile * 8 + j) * kStride + 4;
          const u32 first = word_at(at), third = word_at(at + 8);
          scales[tile][j][0] = first & 0x3f3f3f3fu;
          scales[tile][j][1] = third & 0x0f0f0f0fu | first >> 2 & 0x30303030u;
        }
      }
    }
    __device__ __forceinline__ void add(int tile, int group, const int (&c)[4]) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int scale = unsigned_byte(scales[tile][j][group / 4], group % 4);
        upper[tile][j] += scale * c[j];
        lower[tile][j] += scale * c[2 + j];
      }
    }
  };

  template <int kHalf, int kTiles>  // four groups: 64 bytes
  static __device__ __forceinline__ void half(const u8* decoded, const uint4 (&x)[4],
                                              Sums<kTiles>& sums) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* at = decoded + tile * 8 * kStride + 16 + (kHalf * 2 + pair) * 32;
        const u32 first = word_at(at), second = word_at(at + 16);
        int c[4];
        multiply_bytes(c, x[pair * 2], first & 0x0f0f0f0fu, second & 0x0f0f0f0fu);
        sums.add(tile, kHalf * 4 + pair * 2, c);
        multiply_bytes(c, x[pair * 2 + 1], first >> 4 & 0x0f0f0f0fu, second >> 4 & 0x0f0f0f0fu);
        sums.add(tile, kHalf * 4 + pair * 2 + 1, c);
      }
    }
  }

  // minima 2t and 2t + 1, which go with sums 4t to 4t + 3
  static __device__ __forceinline__ u32 minima(const u8* row, int t) {
    const u32 first = word_at(row + 8), third = word_at(row + 12);
    const u32 word = t < 2 ? first & 0x3f3f3f3fu
                           : third >> 4 & 0x0f0f0f0fu | first >> 2 & 0x30303030u;
    const u32 at = t % 2 * 2;
    return byte_halves(word, at | (at + 1) << 8, 0.0f);
  }

  template <int kTiles, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kOwn>& source, const uint4 (&x)[4],
                                             float (&out)[kTiles][2]) {
    uint4 second[4];
    source.load(4, second);
    const uint4 token_sums = source.step(kGroups);
    const u8* decoded = source.decoded + source.t * 4;
    Sums<kTiles> sums(source.summed);
    half<0>(decoded, x, sums);
    half<1>(decoded, second, sums);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u32 pair = minima(source.decoded + tile * 8 * kStride, source.t);
      float offsets[4] = {};
      add_product(offsets, token_sums, pair, pair);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 halves = word_at(source.summed + (tile * 8 + j) * kStride);
        const float2 factors = __half22float2(as_halves(halves));
        const float offset = kSumParts * (offsets[j] + offsets[2 + j]);
        const float sum = joined(sums.upper[tile][j], sums.lower[tile][j]);
        out[tile][j] = __fmaf_rn(factors.x, sum, out[tile][j]);
        out[tile][j] = __fmaf_rn(-factors.y, offset, out[tile][j]);
      }
    }
  }
};

template <> struct Runs<Q6_K> {
  static constexpr int kBytes = 210, kStride = 8 * kBytes;

  // Four bytes, `at` bytes from the run's first; `row` is a multiple of 4, `skew` 0 or 2.
  static __device__ __forceinline__ u32 load(const u8* row, int skew, int at) {
    return __funnelshift_r(word_at(row + at), word_at(row + at + 4), skew * 8);
  }

  // Groups 4 kHalf to 4 kHalf + 3: 128 inputs.
  template <int kHalf, int kTiles, bool kOwn>
  static __device__ __forceinline__ void half(const Source<kOwn>& source, const uint4 (&x)[4],
                                              int (&upper)[kTiles][2], int (&lower)[kTiles][2]) {
    const int t4 = source.t * 4, skew = source.skew;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u8* row = source.decoded + tile * 8 * kStride;
      u32 scales[2][2];  // by output, of 64 inputs in a word
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u8* at = source.summed + (tile * 8 + j) * kStride;
        scales[j][0] = load(at, skew, 192 + kHalf * 8);
        scales[j][1] = load(at, skew, 192 + kHalf * 8 + 4);
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {  // of each group, inputs 16u to 16u + 15
        const u32 above = load(row, skew, 128 + kHalf * 32 + u * 16 + t4);
        const u32 words[2] = {load(row, skew, kHalf * 64 + u * 16 + t4),
                              load(row, skew, kHalf * 64 + (u + 2) * 16 + t4)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 four = (i < 2 ? words[i] : words[i - 2] >> 4) & 0x0f0f0f0fu;
          const u32 two = i < 2 ? above << (4 - 2 * i) : above >> (2 * i - 4);
          int c[4];
          multiply_bytes(c, u == 0 ? x[i].x : x[i].z, u == 0 ? x[i].y : x[i].w,
                         four | two & 0x30303030u);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int scale = signed_byte(scales[j][i / 2], i % 2 * 2 + u);
            upper[tile][j] += scale * c[j];
            lower[tile][j] += scale * c[2 + j];
          }
        }
      }
    }
  }

  template <int kTiles, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kOwn>& source, const uint4 (&x)[4],
                                             float (&out)[kTiles][2]) {
    uint4 second[4];
    source.load(4, second);
    const uint4 token_sums = source.step(kGroups);
    int upper[kTiles][2] = {}, lower[kTiles][2] = {};
    half<0>(source, x, upper, lower);
    half<1>(source, second, upper, lower);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u8* row = source.decoded + tile * 8 * kStride;
      const u32 word = load(row, source.skew, 192 + source.t * 4) ^ 0x80808080u;
      float offsets[4] = {};  // of values that are 32 too large
      add_product(offsets, token_sums, byte_halves(word, 0x200, 128.0f),
                  byte_halves(word, 0x301, 128.0f));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float d = half_at(source.summed + (tile * 8 + j) * kStride + source.skew + 208);
        const float sum = joined(upper[tile][j], lower[tile][j]);
        const float all = __fmaf_rn(-32.0f * kSumParts, offsets[j] + offsets[2 + j], sum);
        out[tile][j] = __fmaf_rn(d, all, out[tile][j]);
      }
    }
  }
};

template <> struct Runs<Q8_0> {
  static constexpr int kBytes = 272, kStride = 8 * kBytes + 16;

  template <int kHalf, int kTiles, bool kOwn>  // four blocks: 136 bytes
  static __device__ __forceinline__ void half(const Source<kOwn>& source, const uint4 (&x)[4],
                                              float (&out)[kTiles][2]) {
#pragma unroll
    for (int pair = kHalf * 2; pair < kHalf * 2 + 2; ++pair) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* row = source.decoded + tile * 8 * kStride + pair * 68 + source.t * 4;
        const u32 words[4] = {__funnelshift_r(word_at(row), word_at(row + 4), 16),
                              __funnelshift_r(word_at(row + 16), word_at(row + 20), 16),
                              word_at(row + 36), word_at(row + 52)};
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          int c[4];
          multiply_bytes(c, x[pair % 2 * 2 + block], words[2 * block], words[2 * block + 1]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const u8* at = source.summed + (tile * 8 + j) * kStride + pair * 68 + block * 34;
            out[tile][j] = __fmaf_rn(half_at(at), joined(c[j], c[2 + j]), out[tile][j]);
          }
        }
      }
    }
  }

  template <int kTiles, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kOwn>& source, const uint4 (&x)[4],
                                             float (&out)[kTiles][2]) {
    uint4 second[4];
    source.load(4, second);
    half<0>(source, x, out);
    half<1>(source, second, out);
  }
};
