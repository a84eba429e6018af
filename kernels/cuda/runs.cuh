// Put before few.cu: runs of 256 inputs of quantised rows as operands of the tensor cores. Products of
// the integers of a group are summed exactly; its scale multiplies what comes of that.

constexpr int kRun = 256, kRunWarps = 8;
constexpr int kTokens = 8, kSetTokens = 4;    // of a product; and their two parts are 8 columns
constexpr int kGroups = kRun / 32;            // 32 inputs are one step of the tensor cores
constexpr int kChunks = kGroups / 2;          // a thread gets those of two steps at once
constexpr int kPartBytes = kRun + 16;         // of a token's run: its bytes, its groups' sums
constexpr int kTokenBytes = 2 * kPartBytes;   // upper and lower
constexpr int kSumUnit = 1024;                // of the upper part of a group's sum

__device__ __forceinline__ __half2 as_halves(u32 bits) { return *reinterpret_cast<__half2*>(&bits); }

__device__ __forceinline__ u32 as_bits(__half2 halves) { return *reinterpret_cast<u32*>(&halves); }

// Two bytes of a word, from byte 0 or 2 on, as halves: 0x6400 and a byte are 1024 + byte.
__device__ __forceinline__ u32 byte_halves(u32 word, int first) {
  const u32 bits = __byte_perm(word, 0x64646464u, first | (first + 1) << 8 | 0x4040u);
  return as_bits(__hsub2(as_halves(bits), __float2half2_rn(1024.0f)));
}

__device__ __forceinline__ int unsigned_byte(u32 word, int number) {
  return __byte_perm(word, 0, 0x4440 | number);
}

__device__ __forceinline__ int signed_byte(u32 word, int number) {
  int value;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(value) : "r"(word), "r"(number * 0x1111 | 0x8880));
  return value;
}

// c (16, 8) = a (16, 32) · b (32, 8): PTX, mma.m16n8k32. a: unsigned bytes, b: signed ones
__device__ __forceinline__ void multiply_unsigned(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// The same, all bytes signed.
__device__ __forceinline__ void multiply_signed(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// c (16, 8) = a (16, 16) · b (16, 8), signed bytes: PTX, mma.m16n8k16
__device__ __forceinline__ void multiply_signed(int (&c)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// c (16, 8) = a (16, 8) · b (8, 8), halves: PTX, mma.m16n8k8
__device__ __forceinline__ void multiply_halves(float (&c)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

// The upper and the lower parts of a token are columns of their own.
__device__ __forceinline__ float joined(int upper, int lower) {
  return __fmaf_rn(256.0f, float(upper), float(lower));
}

__device__ __forceinline__ u32 and_xor(u32 value, u32 mask, u32 other) {
  u32 result;  // one instruction: left alone, the compiler moves terms and takes more
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(value), "r"(mask), "r"(other));
  return result;
}

__device__ __forceinline__ u32 word_at(const u8* at) { return *reinterpret_cast<const u32*>(at); }

// Where a thread of quad q and number t in it reads a run: of outputs q and q + 8 the bytes, `skew`
// bytes early where they have to be a multiple of 4; of its column, token q / 2 and part q % 2, the
// inputs, in shared memory if kOwn. Other tiles lie 16 rows further on.
template <int kSets, bool kOwn>
struct Source {
  const u8* row;
  const u8* tokens[kSets];
  int t, skew;
  __device__ __forceinline__ void chunk(int number, uint4 (&x)[kSets]) const {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const auto* at = reinterpret_cast<const uint4*>(tokens[set] + number * 128);
      if constexpr (kOwn) x[set] = *at;
      else x[set] = __ldg(at);
    }
  }
  __device__ __forceinline__ u32 sums(int set) const {  // of groups 2t and 2t + 1
    const auto* at = reinterpret_cast<const u32*>(tokens[set] + kChunks * 128 - 12 * place());
    if constexpr (kOwn) return *at;
    else return __ldg(at);
  }
  __device__ __forceinline__ int place() const { return threadIdx.x / 4 % 2 * 4 + t; }
};

// Where a token's inputs 8j + 4w to 8j + 4w + 3 of a group go: to which thread of a quad, in which
// chunk, as which of its words.
struct Place {
  int chunk, word, t;
};

// Types whose blocks go to the tensor cores. A run of a row is kBytes long; rows of eight runs lie
// kStride apart in shared memory, so that threads of all rows read without conflict.
// add: out[tile][set][i] += the run's inputs of token t times output tile * 16 + q + 8 i.
template <typename Type> struct Runs;

template <> struct Runs<Q4_K> {
  static constexpr int kBytes = 144, kStride = 8 * kBytes + 32;

  static __device__ __forceinline__ Place place(int group, int j, int w) {
    return {group / 2, group % 2 * 2 + w, j};
  }

  // Of an output; scales, minima: kernels/quants.py, _k_scales
  struct Header {
    u32 scales[2];  // of four groups in a word
    u32 minima;     // of groups 2t and 2t + 1, as halves
    float2 factors;
    __device__ __forceinline__ Header(const u8* row, int t) {
      const uint4 words = *reinterpret_cast<const uint4*>(row);
      factors = __half22float2(as_halves(words.x));
      const u32 above = words.y >> 2 & 0x30303030u;
      scales[0] = words.y & 0x3f3f3f3fu;
      scales[1] = words.w & 0x0f0f0f0fu | above;
      const u32 last = words.w >> 4 & 0x0f0f0f0fu | words.z >> 2 & 0x30303030u;
      minima = byte_halves(t < 2 ? words.z & 0x3f3f3f3fu : last, t % 2 * 2);
    }
  };

  template <int kTiles, int kSets, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kSets, kOwn>& source,
                                             float (&out)[kTiles][kSets][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u8* rows[2] = {source.row + tile * 16 * kStride,
                           source.row + (tile * 16 + 8) * kStride};
      const Header headers[2] = {{rows[0], source.t}, {rows[1], source.t}};
      int low[kSets][4] = {}, high[kSets][4] = {};  // the latter 16 times too large
#pragma unroll
      for (int pair = 0; pair < kGroups / 2; ++pair) {
        uint4 x[kSets];
        source.chunk(pair, x);
        uint2 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[i] = *reinterpret_cast<const uint2*>(rows[i] + 16 + pair * 32 + source.t * 8);
        }
        add_group(words, 0x0f0f0f0fu, headers, pair * 2, x, low);
        add_group(words, 0xf0f0f0f0u, headers, pair * 2 + 1, x, high);
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        float offsets[4];
        multiply_halves(offsets, headers[0].minima, headers[1].minima, source.sums(set));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int upper = low[set][2 * i] * 16 + high[set][2 * i];
          const int lower = low[set][2 * i + 1] * 16 + high[set][2 * i + 1];
          const float offset = __fmaf_rn(kSumUnit, offsets[2 * i], offsets[2 * i + 1]);
          float& sum = out[tile][set][i];
          sum = __fmaf_rn(headers[i].factors.x / 16.0f, joined(upper, lower), sum);
          sum = __fmaf_rn(-headers[i].factors.y, offset, sum);
        }
      }
    }
  }

  template <int kSets>
  static __device__ __forceinline__ void add_group(const uint2 (&words)[2], u32 mask,
                                                   const Header (&headers)[2], int group,
                                                   const uint4 (&x)[kSets], int (&sums)[kSets][4]) {
    const u32 a[4] = {words[0].x & mask, words[1].x & mask, words[0].y & mask, words[1].y & mask};
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      int c[4];
      if (group % 2 == 0) multiply_unsigned(c, a, x[set].x, x[set].y);
      else multiply_unsigned(c, a, x[set].z, x[set].w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[set][i] += unsigned_byte(headers[i / 2].scales[group / 4], group % 4) * c[i];
      }
    }
  }
};

template <> struct Runs<Q6_K> {
  static constexpr int kBytes = 210, kStride = 8 * kBytes;

  // A chunk has the same 16 of each 32 inputs of half a run.
  static __device__ __forceinline__ Place place(int group, int j, int w) {
    return {group / 4 * 2 + j / 2, group % 4, j % 2 * 2 + w};
  }

  // Four bytes, `at` bytes from the run's first; `row` is a multiple of 4.
  template <int kSkew>
  static __device__ __forceinline__ u32 load(const u8* row, int at) {
    if constexpr (kSkew == 0) return word_at(row + at);
    else return __funnelshift_r(word_at(row + at), word_at(row + at + 4), kSkew * 8);
  }

  // Of an output, four bytes of a chunk's low halves, of the other low halves, of upper bits.
  struct Words {
    u32 fours[2], twos;
    template <int kSkew>
    __device__ __forceinline__ void read(const u8* row, int chunk, int t) {
      const int at = chunk / 2 * 64 + chunk % 2 * 16 + t * 4;
      fours[0] = load<kSkew>(row, at);
      fours[1] = load<kSkew>(row, at + 32);
      twos = load<kSkew>(row, 128 + chunk * 16 + t * 4);
    }
    // Four inputs of a group, less 32 and times 4: signed bytes. That is 4 times as much, as an
    // unsigned byte, with its upper bit the other way round.
    __device__ __forceinline__ u32 values(int group) const {
      const u32 four = group < 2 ? fours[group] << 2 : fours[group - 2] >> 2;
      const u32 low = and_xor(four, 0x3c3c3c3cu, 0x80808080u);
      return and_xor(twos << (6 - 2 * group), 0xc0c0c0c0u, low);
    }
  };

  template <int kTiles, int kSets, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kSets, kOwn>& source,
                                             float (&out)[kTiles][kSets][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (source.skew == 0) add_tile<0>(source, tile, out[tile]);
      else add_tile<2>(source, tile, out[tile]);
    }
  }

  template <int kSkew, int kSets, bool kOwn>
  static __device__ __forceinline__ void add_tile(const Source<kSets, kOwn>& source, int tile,
                                                  float (&out)[kSets][2]) {
    const u8* rows[2] = {source.row + tile * 16 * kStride, source.row + (tile * 16 + 8) * kStride};
    Words words[2][kChunks];
    u32 scales[2][kChunks];  // of an output: of two groups in a word
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        words[i][chunk].template read<kSkew>(rows[i], chunk, source.t);
        scales[i][chunk] = load<kSkew>(rows[i], 192 + chunk * 4);
      }
    }
    int sums[kSets][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint4 x[kSets];
      source.chunk(chunk, x);
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const u32 first = words[0][chunk].values(group), second = words[1][chunk].values(group);
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          int c[4];
          const u32 column[4] = {x[set].x, x[set].y, x[set].z, x[set].w};
          multiply_signed(c, first, second, column[group]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const u32 four = scales[i / 2][chunk / 2 * 2 + group / 2];
            sums[set][i] += signed_byte(four, group % 2 * 2 + chunk % 2) * c[i];
          }
        }
      }
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float d = half_at(rows[i] + kSkew + 208) / 4.0f;
        const float sum = joined(sums[set][2 * i], sums[set][2 * i + 1]);
        out[set][i] = __fmaf_rn(d, sum, out[set][i]);
      }
    }
  }
};

template <> struct Runs<Q8_0> {
  static constexpr int kBytes = 272, kStride = 8 * kBytes + 16;

  static __device__ __forceinline__ Place place(int group, int j, int w) {
    return {group / 2, group % 2 * 2 + j / 2, j % 2 * 2 + w};
  }

  template <int kTiles, int kSets, bool kOwn>
  static __device__ __forceinline__ void add(const Source<kSets, kOwn>& source,
                                             float (&out)[kTiles][kSets][2]) {
#pragma unroll
    for (int pair = 0; pair < kGroups / 2; ++pair) {  // of blocks: 68 bytes
      uint4 x[kSets];
      source.chunk(pair, x);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* rows[2] = {source.row + tile * 16 * kStride + pair * 68,
                             source.row + (tile * 16 + 8) * kStride + pair * 68};
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u8* at = rows[i] + source.t * 4;
          a[0][i] = __funnelshift_r(word_at(at), word_at(at + 4), 16);
          a[0][i + 2] = __funnelshift_r(word_at(at + 16), word_at(at + 20), 16);
          a[1][i] = word_at(at + 36);
          a[1][i + 2] = word_at(at + 52);
        }
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const float d[2] = {half_at(rows[0] + block * 34), half_at(rows[1] + block * 34)};
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            int c[4];
            if (block == 0) multiply_signed(c, a[0], x[set].x, x[set].y);
            else multiply_signed(c, a[1], x[set].z, x[set].w);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& sum = out[tile][set][i];
              sum = __fmaf_rn(d[i], joined(c[2 * i], c[2 * i + 1]), sum);
            }
          }
        }
      }
    }
  }
};
