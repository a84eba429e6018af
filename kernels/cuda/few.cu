// Products of few tokens: each byte of a weight is read once for 8 tokens and goes from there to the
// tensor cores as small integers, which halves hold exactly.
//
// A token's inputs are split into a half and the half of what that left over, 22 bits together; both
// are rows of one operand: tokens 0 to 7 rounded, then what rounding left. Its columns are outputs.
// Runs of 256 inputs go to eight warps in turn, whose sums are added in the order of the warps: the
// same for any number of tokens, so a token's bytes depend on it alone.

// Four inputs in a row: the halves of 0 and 2, what they left, the halves of 1 and 3, what they left.
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

// parts: (groups, runs, 17, 8 tokens, 4 quads); the 17th step holds the sums of each 16 inputs.
// scales: (groups, runs, 8), the power of two by which those of a token are to be multiplied.
// A block per run and group of 8 tokens, a warp per token.
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
__device__ __forceinline__ void copy_async(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source));
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A warp's outputs' bytes of a run, in kStages places. Four threads take a row's 64 bytes at a time.
template <typename Type, int kTiles, int kStages>
struct Ring {
  using Run = Runs<Type>;
  static constexpr int kStageBytes = kTiles * 8 * Run::kStride;
  u32 target;
  const u8* sources[kTiles];

  // first: the block's first row. Rows from `last` on repeat that one.
  __device__ __forceinline__ Ring(const u8* stages, const u8* first, int row_nbytes, int last) {
    const int warp = threadIdx.x / kWarp, row = threadIdx.x % kWarp / 4, inside = threadIdx.x % 4 * 16;
    target = u32(__cvta_generic_to_shared(stages)) + row * Run::kStride + inside;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      sources[tile] = first + min(tile * 8 + row, last) * i64(row_nbytes) +
                      (warp * Run::kBytes & ~15) + inside;
    }
  }

  // The next of the warp's runs.
  __device__ __forceinline__ void fetch(int stage) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int piece = 0; piece < Run::kPieces; piece += 4) {
        const u32 to = target + stage * kStageBytes + tile * 8 * Run::kStride + piece * 16;
        if (piece + 4 <= Run::kPieces || threadIdx.x % 4 < Run::kPieces - piece) {
          copy_async(to, sources[tile] + piece * 16);
        }
      }
      sources[tile] += Run::kEighth;
    }
  }
};

// out (num_tokens, stride) = or += tokens · weightᵀ (+ bias), columns [0, num_outputs); num_tokens up
// to 8. A block of 8 warps: kTiles * 8 outputs; each warp takes every eighth run. kBlocks: how many are
// to be in a processor at once.
template <typename Type, int kTiles, int kStages, int kBlocks>
__global__ void __launch_bounds__(kRunWarps* kWarp, kBlocks)
    few_product(int num_tokens, int num_outputs, int num_runs, int row_nbytes, int stride,
                const u8* __restrict__ blocks, const uint4* __restrict__ parts,
                const float* __restrict__ scales, const float* __restrict__ bias, int accumulate,
                float* __restrict__ out) {
  using Run = Runs<Type>;
  constexpr int kRows = kTiles * 8, kStageBytes = kRows * Run::kStride;
  extern __shared__ __align__(16) u8 shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, quad = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * kRows;
  const u8* stages = shared + warp * kStages * kStageBytes;
  Ring<Type, kTiles, kStages> ring(stages, blocks + first_row * i64(row_nbytes), row_nbytes,
                                   num_outputs - 1 - first_row);
  int left = (num_runs - warp + kRunWarps - 1) / kRunWarps, left_to_fetch = left;
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) {
    if (left_to_fetch-- > 0) ring.fetch(ahead);
    end_copies();
  }
  // Rows of tokens that are not there repeat the last one; what they give is not stored.
  const int token = min(quad, num_tokens - 1);
  Source source;
  source.tokens = parts + i64(warp) * kRunParts * kWarp + token * 4 + t;
  source.t = t;
  source.skew = warp * Run::kBytes % 16;
  source.magic = kMagic | u32(num_tokens >> 31);  // not known to the compiler: see `fields`
  const float* scale = scales + warp * kTokens + token;
  float sums[kTiles][2] = {};
  for (int stage = 0; left > 0; --left) {
    if (left_to_fetch-- > 0) ring.fetch(stage == 0 ? kStages - 1 : stage - 1);
    end_copies();
    uint4 first[4];
    source.load<0, kFirstStep<Type>>(first);
    const float run_scale = __ldg(scale);
    wait_copies<kStages - 1>();
    __syncwarp();
    const u8* rows = stages + stage * kStageBytes;
    source.decoded = rows + quad * Run::kStride + (source.skew & ~3);
    source.summed = rows + t * 2 * Run::kStride;
    float run_sums[kTiles][2] = {};
    Run::add(source, first, run_sums);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[tile][j] = __fmaf_rn(run_scale, run_sums[tile][j], sums[tile][j]);
      }
    }
    source.tokens += kRunWarps * kRunParts * kWarp;
    scale += kRunWarps * kTokens;
    stage = stage == kStages - 1 ? 0 : stage + 1;
    __syncwarp();
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
  const int to = threadIdx.x / kRows, row = threadIdx.x % kRows, output = first_row + row;
  if (to >= num_tokens || output >= num_outputs) return;
  float total = totals[to * kRows + row];
  for (int other = 1; other < kRunWarps; ++other) {
    total += totals[(other * kTokens + to) * kRows + row];
  }
  float* target = out + i64(to) * stride + output;
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
