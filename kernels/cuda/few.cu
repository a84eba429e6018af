// Products of few tokens: each byte of a weight is read once for 8 tokens and goes from there to the
// tensor cores as small integers, which halves hold exactly.
//
// A token's inputs are split into a half and the half of what that left over, 22 bits together; both
// are rows of one operand: tokens 0 to 7 rounded, then what rounding left. Its columns are outputs.
// Runs of 256 inputs go to eight warps in turn, whose sums are added in the order of the warps: the
// same for any number of tokens, so a token's bytes depend on it alone.

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

// Bytes of a word chosen by `selector` (0 to 3 each, in its nibbles 0 and 2), less `bias`
__device__ __forceinline__ __half2 byte_halves(u32 word, u32 selector, float bias) {
  const u32 bits = __byte_perm(word, 0x64646464u, selector | 0x4040u);
  return __hsub2(as_halves(bits), __float2half2_rn(1024.0f + bias));
}

// parts: (groups, runs, 17, 8 tokens, 4 quads) of 16 bytes: the halves of inputs 0 and 2 of four in a
// row, what they left, the halves of inputs 1 and 3, what they left. The 17th step holds the sums of
// each 16 inputs. scales: (groups, runs, 8), the power of two by which those of a token are to be
// multiplied. A block per run and group of 8 tokens, a warp per token.
struct Quad {
  uint4 packed;
  __device__ __forceinline__ Quad(const float* values) {
    __half high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = __float2half_rn(values[i]);
      low[i] = __float2half_rn(values[i] - __half2float(high[i]));
    }
    packed = {as_bits(__halves2half2(high[0], high[2])), as_bits(__halves2half2(low[0], low[2])),
              as_bits(__halves2half2(high[1], high[3])), as_bits(__halves2half2(low[1], low[3]))};
  }
};

extern "C" __global__ void __launch_bounds__(kTokens* kWarp)
    split_tokens(int num_tokens, int num_inputs, const float* __restrict__ x,
                 uint4* __restrict__ parts, float* __restrict__ scales) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const i64 token = blockIdx.y * kTokens + warp, run = blockIdx.x;
  if (token >= num_tokens) return;
  const auto* from = floats<4>(x + token * num_inputs + run * kRun) + 2 * lane;
  const Floats<4> first = from[0], second = from[1];
  float values[8], most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] = i < 4 ? first[i] : second[i - 4];
    most = fmaxf(most, fabsf(values[i]));
  }
  const int exponent = run_exponent(warp_max(most));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] *= exponent_of_two(-exponent);
    sum += values[i];
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = __shfl_sync(~0u, sum, lane % 4 * 8 + 2 * i);

  const i64 group_run = blockIdx.y * i64(gridDim.x) + run;
  uint4* target = parts + group_run * kRunParts * kWarp + warp * 4;
  const int step = lane / 2, quad = lane % 2 * 2;
  target[step * kWarp + quad] = Quad(values).packed;
  target[step * kWarp + quad + 1] = Quad(values + 4).packed;
  if (lane < 4) target[kSteps * kWarp + lane] = Quad(sums).packed;
  if (lane == 0) scales[group_run * kTokens + warp] = exponent_of_two(exponent);
}

// 16 bytes to shared memory, past the first-level cache
__device__ __forceinline__ void copy_async(void* target, const void* source) {
  const u32 at = u32(__cvta_generic_to_shared(target));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(source));
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The tokens' side of a run: a thread's quad of a step.
struct TokenParts {
  const uint4* parts;
  bool inside;
  __device__ __forceinline__ uint4 operator[](int step) const {
    return inside ? __ldg(parts + step * kWarp) : uint4{0, 0, 0, 0};
  }
};

__device__ __forceinline__ void multiply(float (&c)[4], const uint4& x, u32 even, u32 odd) {
  multiply(c, x.x, x.y, x.z, x.w, even, odd);
}

__device__ __forceinline__ float both(const float (&c)[4], int output) {
  return c[output] + c[2 + output];  // what is rounded, and what that left
}

__device__ __forceinline__ u32 word_at(const u8* at) { return *reinterpret_cast<const u32*>(at); }

// Types whose blocks go to the tensor cores. A run of a row is kPieces pieces of 16 bytes from
// `begin` on; rows lie kStride apart in shared memory, by 4 words more or less than a multiple of
// 32, so that threads of all rows read words without conflict.
// add: sums[tile][j] += the run's inputs times output tile * 8 + t * 2 + j, for the thread's token.
// A thread decodes the output tile * 8 + quad: of each step, inputs 4t to 4t + 3.
template <typename Type> struct Runs;

template <> struct Runs<Q4_K> {
  static constexpr int kPieces = 9, kStride = 144;
  static __device__ __forceinline__ i64 begin(int run) { return run * i64(144); }

  template <int kTiles>
  static __device__ __forceinline__ void add(const u8* rows, int, int quad, int t,
                                             const TokenParts& x, float (&sums)[kTiles][2]) {
    float c[kTiles][4] = {}, offsets[kTiles][4] = {};
    u32 scales[kTiles][2], minima[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {  // kernels/quants.py, _k_scales
      const u8* at = rows + (tile * 8 + quad) * kStride + 4;
      const u32 first = word_at(at), second = word_at(at + 4), third = word_at(at + 8);
      scales[tile][0] = first & 0x3f3f3f3fu;
      scales[tile][1] = third & 0x0f0f0f0fu | first >> 2 & 0x30303030u;
      minima[tile][0] = second & 0x3f3f3f3fu;
      minima[tile][1] = third >> 4 & 0x0f0f0f0fu | second >> 2 & 0x30303030u;
    }
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      uint4 tokens[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) tokens[i] = x[chunk * 4 + i];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* at = rows + (tile * 8 + quad) * kStride + 16 + chunk * 32 + t * 4;
        const u32 packed = scales[tile][chunk / 2], byte = chunk % 2 * 2;
        const __half2 low = byte_halves(packed, byte * 0x101, 0.0f);
        const __half2 high = times(byte_halves(packed, (byte + 1) * 0x101, 0.0f), 1.0f / 16);
        const __half2 low_offset = times(low, -1024.0f), high_offset = times(high, -1024.0f);
        const u32 words[2] = {word_at(at), word_at(at + 16)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 even = words[i], odd = words[i] >> 8;
          multiply(c[tile], tokens[i], fused(even & 0x000f000fu | kMagic, low, low_offset),
                   fused(odd & 0x000f000fu | kMagic, low, low_offset));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 even = words[i], odd = words[i] >> 8;
          multiply(c[tile], tokens[2 + i], fused(even & 0x00f000f0u | kMagic, high, high_offset),
                   fused(odd & 0x00f000f0u | kMagic, high, high_offset));
        }
      }
    }
    const uint4 token_sums = x[kSteps];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u32 at = t % 2 * 2;  // minima 2t and 2t + 1: of inputs 64t on, in sums of 16 inputs
      const u32 pair = as_bits(byte_halves(t < 2 ? minima[tile][0] : minima[tile][1],
                                           at | (at + 1) << 8, 0.0f));
      multiply(offsets[tile], token_sums, pair, pair);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 word = word_at(rows + (tile * 8 + t * 2 + j) * kStride);
        const float2 factors = __half22float2(as_halves(word));
        sums[tile][j] = __fmaf_rn(factors.x, both(c[tile], j), sums[tile][j]);
        sums[tile][j] = __fmaf_rn(-factors.y, both(offsets[tile], j), sums[tile][j]);
      }
    }
  }
};

template <> struct Runs<Q6_K> {
  static constexpr int kPieces = 14, kStride = 240;
  static __device__ __forceinline__ i64 begin(int run) { return run * i64(210) & ~i64(15); }

  // Four bytes of a row whose first byte is at `skew`, an even number.
  static __device__ __forceinline__ u32 load(const u8* row, int skew, int at) {
    const u32* words = reinterpret_cast<const u32*>(row + (skew & ~3) + at);
    return __funnelshift_r(words[0], words[1], (skew & 2) * 8);
  }

  template <int kTiles>
  static __device__ __forceinline__ void add(const u8* rows, int run, int quad, int t,
                                             const TokenParts& x, float (&sums)[kTiles][2]) {
    const int skew = run * 210 & 15;
    float low_sums[kTiles][4] = {}, high_sums[kTiles][4] = {}, offsets[kTiles][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 scales[kTiles][2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* row = rows + (tile * 8 + quad) * kStride;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scales[tile][i] = load(row, skew, 192 + half * 8 + i * 4) ^ 0x80808080u;
        }
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint4 tokens[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) tokens[i] = x[half * 8 + u + 2 * i];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const u8* row = rows + (tile * 8 + quad) * kStride;
          const u32 high = load(row, skew, 128 + half * 32 + u * 16 + t * 4);
          const u32 low[2] = {load(row, skew, half * 64 + u * 16 + t * 4),
                              load(row, skew, half * 64 + (u + 2) * 16 + t * 4)};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // The bits of the low part are at 4 (i / 2) of their byte, those of the high one at 2i.
            const __half2 scale =
                byte_halves(scales[tile][i / 2], (u + i % 2 * 2) * 0x101, 128.0f);
            const __half2 factor = times(scale, i < 2 ? 1.0f / 16 : 1.0f / 256);
            const __half2 offset = times(scale, i < 2 ? -64.0f : -4.0f);
            const u32 mask = i < 2 ? 0x000f000fu : 0x00f000f0u, word = low[i % 2];
            multiply(low_sums[tile], tokens[i], fused(word & mask | kMagic, factor, offset),
                     fused(word >> 8 & mask | kMagic, factor, offset));
            const __half2 high_factor = times(scale, 1.0f / (16 << 2 * i));
            const __half2 high_offset = times(scale, -64.0f / (1 << 2 * i));
            const u32 high_mask = 0x00030003u << 2 * i;
            multiply(high_sums[tile], tokens[i],
                     fused(high & high_mask | kMagic, high_factor, high_offset),
                     fused(high >> 8 & high_mask | kMagic, high_factor, high_offset));
          }
        }
      }
    }
    const uint4 token_sums = x[kSteps];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u8* row = rows + (tile * 8 + quad) * kStride;
      const u32 word = load(row, skew, 192 + t * 4) ^ 0x80808080u;
      multiply(offsets[tile], token_sums, as_bits(byte_halves(word, 0x200, 128.0f)),
               as_bits(byte_halves(word, 0x301, 128.0f)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float d = half_at(rows + (tile * 8 + t * 2 + j) * kStride + skew + 208);
        const float low = 16.0f * both(low_sums[tile], j);
        const float high = __fmaf_rn(256.0f, both(high_sums[tile], j), low);
        const float all = __fmaf_rn(-32.0f, both(offsets[tile], j), high);
        sums[tile][j] = __fmaf_rn(d, all, sums[tile][j]);
      }
    }
  }
};

template <> struct Runs<Q8_0> {
  static constexpr int kPieces = 17, kStride = 272;
  static __device__ __forceinline__ i64 begin(int run) { return run * i64(272); }

  template <int kTiles>
  static __device__ __forceinline__ void add(const u8* rows, int, int quad, int t,
                                             const TokenParts& x, float (&sums)[kTiles][2]) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // of blocks: 68 bytes
      uint4 tokens[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) tokens[i] = x[pair * 4 + i];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const u8* row = rows + (tile * 8 + quad) * kStride + pair * 68 + t * 4;
        const u32 words[4] = {__funnelshift_r(word_at(row), word_at(row + 4), 16),
                              __funnelshift_r(word_at(row + 16), word_at(row + 20), 16),
                              word_at(row + 36), word_at(row + 52)};
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          float c[4] = {};
#pragma unroll
          for (int i = block * 2; i < block * 2 + 2; ++i) {
            const u32 word = words[i] ^ 0x80808080u;  // signed to 0 ... 255
            multiply(c, tokens[i], as_bits(byte_halves(word, 0x200, 128.0f)),
                     as_bits(byte_halves(word, 0x301, 128.0f)));
          }
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const u8* at = rows + (tile * 8 + t * 2 + j) * kStride + pair * 68 + block * 34;
            sums[tile][j] = __fmaf_rn(half_at(at), both(c, j), sums[tile][j]);
          }
        }
      }
    }
  }
};

// What a block takes: its outputs' bytes of a run, in kStages places for each warp.
template <typename Type, int kTiles, int kStages>
struct Ring {
  static constexpr int kRows = kTiles * 8;
  static constexpr int kCopies = (kRows * Runs<Type>::kPieces + kWarp - 1) / kWarp;  // of a thread
  static constexpr int kStageBytes = kRows * Runs<Type>::kStride;
  u8* stages;
  const u8* sources;
  int from[kCopies], to[kCopies];

  // sources: the block's first row. Rows from `last` on repeat that one.
  __device__ __forceinline__ Ring(u8* shared, const u8* first, int row_nbytes, int last)
      : stages(shared + threadIdx.x / kWarp * kStages * kStageBytes), sources(first) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int piece = i * kWarp + threadIdx.x % kWarp, row = piece / Runs<Type>::kPieces;
      const int inside = piece % Runs<Type>::kPieces * 16;
      from[i] = row < kRows ? min(row, last) * row_nbytes + inside : -1;
      to[i] = row * Runs<Type>::kStride + inside;
    }
  }

  __device__ __forceinline__ void fetch(int run, int stage) const {
    const u8* source = sources + Runs<Type>::begin(run);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (from[i] >= 0) copy_async(stages + stage * kStageBytes + to[i], source + from[i]);
    }
  }
};

// out (num_tokens, stride) = or += tokens · weightᵀ (+ bias), columns [0, num_outputs); num_tokens up
// to 8. A block of 8 warps: kTiles * 8 outputs; each warp takes every eighth run.
template <typename Type, int kTiles, int kStages>
__global__ void __launch_bounds__(kRunWarps* kWarp, 2)
    few_product(int num_tokens, int num_outputs, int num_runs, int row_nbytes, int stride,
                const u8* __restrict__ blocks, const uint4* __restrict__ parts,
                const float* __restrict__ scales, const float* __restrict__ bias, int accumulate,
                float* __restrict__ out) {
  constexpr int kRows = kTiles * 8;
  extern __shared__ __align__(16) u8 shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, quad = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * kRows;
  const Ring<Type, kTiles, kStages> ring(shared, blocks + first_row * i64(row_nbytes), row_nbytes,
                                         num_outputs - 1 - first_row);
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) {
    const int run = warp + ahead * kRunWarps;
    if (run < num_runs) ring.fetch(run, ahead);
    end_copies();
  }
  float sums[kTiles][2] = {};
  int stage = 0;
  for (int run = warp; run < num_runs; run += kRunWarps) {
    const int next = run + (kStages - 1) * kRunWarps;
    if (next < num_runs) ring.fetch(next, stage == 0 ? kStages - 1 : stage - 1);
    end_copies();
    wait_copies<kStages - 1>();
    __syncwarp();
    const TokenParts x{parts + i64(run) * kRunParts * kWarp + lane, quad < num_tokens};
    const float scale = x.inside ? __ldg(scales + run * kTokens + quad) : 0.0f;
    float run_sums[kTiles][2] = {};
    Runs<Type>::add(ring.stages + stage * ring.kStageBytes, run, quad, t, x, run_sums);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[tile][j] = __fmaf_rn(scale, run_sums[tile][j], sums[tile][j]);
      }
    }
    __syncwarp();
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  wait_copies<0>();
  __syncthreads();
  float* totals = reinterpret_cast<float*>(shared);  // (8 warps, 8 tokens, outputs)
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      totals[(warp * kTokens + quad) * kRows + tile * 8 + t * 2 + j] = sums[tile][j];
    }
  }
  __syncthreads();
  const int token = threadIdx.x / kRows, row = threadIdx.x % kRows, output = first_row + row;
  if (token >= num_tokens || output >= num_outputs) return;
  float total = totals[token * kRows + row];
  for (int other = 1; other < kRunWarps; ++other) {
    total += totals[(other * kTokens + token) * kRows + row];
  }
  float* target = out + i64(token) * stride + output;
  const float start = accumulate ? *target : 0.0f;
  *target = start + (bias ? bias[output] : 0.0f) + total;
}

// The same for any type and size, by multiply-adds on decoded values: a warp per output, each thread
// every 32nd group of 8 inputs.
template <typename Type, int kCount>
__global__ void __launch_bounds__(128)
    few_dots(int num_tokens, int num_outputs, int num_inputs, i64 row_nbytes, int stride,
             const u8* __restrict__ blocks, const float* __restrict__ x,
             const float* __restrict__ bias, int accumulate, float* __restrict__ out) {
  constexpr int kGroups = Type::kSize / 8;
  const int lane = threadIdx.x % kWarp, output = blockIdx.x * 4 + threadIdx.x / kWarp;
  if (output >= num_outputs) return;
  const u8* row = blocks + output * row_nbytes;
  float sums[kCount] = {};
#pragma unroll 4
  for (int group = lane; group < num_inputs / 8; group += kWarp) {
    float decoded[8];
    Type::decode(row + i64(group / kGroups) * Type::kBytes, group % kGroups * 8, decoded);
#pragma unroll
    for (int token = 0; token < kCount; ++token) {
      if (token >= num_tokens) break;
      const auto* from = floats<4>(x + i64(token) * num_inputs + group * 8);
      const Floats<4> first = from[0], second = from[1];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sums[token] = __fmaf_rn(decoded[i], i < 4 ? first[i] : second[i - 4], sums[token]);
      }
    }
  }
#pragma unroll
  for (int token = 0; token < kCount; ++token) {
    const float total = warp_sum(sums[token]);
    if (lane != 0 || token >= num_tokens) continue;
    float* target = out + i64(token) * stride + output;
    const float start = accumulate ? *target : 0.0f;
    *target = start + (bias ? bias[output] : 0.0f) + total;
  }
}
