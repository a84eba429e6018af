// Products of few tokens: each byte of a weight is read once for 8 tokens and goes from there to the
// tensor cores as an integer.
//
// A token's inputs are 16-bit integers times a scale for each run of 256. Their upper and their lower
// bytes are columns of one operand, which holds 4 tokens; its rows are 16 outputs. Runs go to eight
// warps in turn, whose sums are added in the order of the warps: the same for any number of tokens,
// so a token's bytes depend on it alone.

constexpr float kMost = 32512.0f;  // 127 * 256: its upper byte, rounded, is still one

// A run of a token as operands, by a warp. target: (4 chunks, 2 parts, 4 t) words by four, then
// (2 parts, 8 groups) sums of the groups as halves
template <typename Type>
__device__ __forceinline__ void split_run(const float* __restrict__ run, u8* target, float* scale) {
  const int lane = threadIdx.x % kWarp, group = lane / 4, j = lane % 4;
  const auto* from = floats<4>(run) + 2 * lane;
  const Floats<4> x[2] = {from[0], from[1]};
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float size = fabsf(x[i / 4][i % 4]);
    most = fmaxf(most, size < kInfinity ? size : kInfinity);  // a NaN counts as infinite
  }
  most = warp_max(most);
  const float factor = most > 1e-33f ? kMost / most : 0.0f;
  int sum = 0;
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    u32 upper = 0, lower = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int value = __float2int_rn(__fmul_rn(x[w][i], factor));
      upper |= (value + 128 >> 8 & 255) << 8 * i;
      lower |= (value & 255) << 8 * i;
      sum += value;
    }
    const Place place = Runs<Type>::place(group, j, w);
    u32* words = reinterpret_cast<u32*>(target) + place.chunk * 32 + place.t * 4 + place.word;
    words[0] = upper;
    words[16] = lower;
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const int above = sum + kSumUnit / 2 >> 10;
  if (j < 2) {
    __half* sums = reinterpret_cast<__half*>(target + 2 * kRun) + j * kGroups + group;
    *sums = __int2half_rn(j == 0 ? above : sum - above * kSumUnit);
  }
  if (lane == 0) *scale = most < kInfinity ? most / kMost : kInfinity - kInfinity;
}

// parts: (groups, runs, 8 tokens, kTokenBytes); scales: (groups, runs, 8). A block per run and group
// of 8 tokens, a warp per token.
template <typename Type>
__global__ void __launch_bounds__(kTokens* kWarp)
    split_tokens(int num_tokens, int num_inputs, const float* __restrict__ x,
                 u8* __restrict__ parts, float* __restrict__ scales) {
  const i64 token = blockIdx.y * kTokens + threadIdx.x / kWarp, run = blockIdx.x;
  wait_for_others();
  if (token >= num_tokens) return;
  const i64 at = (blockIdx.y * i64(gridDim.x) + run) * kTokens + threadIdx.x / kWarp;
  split_run<Type>(x + token * num_inputs + run * kRun, parts + at * kTokenBytes, scales + at);
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

// What a block multiplies: `kTiles * 16` outputs, then those gridDim.x times as many further on, and so
// on, of each eight runs at a time. Their bytes come to kStages places in turn. A warp copies every
// eighth row, 512 bytes in a row at a time: whole lines, which is what memory is fast at.
template <typename Type, int kTiles, int kStages>
struct Ring {
  using Run = Runs<Type>;
  static constexpr int kRows = kTiles * 16, kBytes = 8 * Run::kBytes, kPieces = kBytes / 16;
  static constexpr int kStageBytes = kRows * Run::kStride;
  const u8* blocks;
  int num_outputs, row_nbytes;
  u32 target;
  int stage = 0, first_row, left;  // next to be fetched; pieces of a row from the thread's on
  const u8* sources[kTiles * 2];

  __device__ __forceinline__ Ring(const u8* shared, const u8* blocks, int num_outputs,
                                  int row_nbytes)
      : blocks(blocks), num_outputs(num_outputs), row_nbytes(row_nbytes) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    target = u32(__cvta_generic_to_shared(shared)) + warp * Run::kStride + lane * 16;
    begin_rows(blockIdx.x * kRows);
  }

  __device__ __forceinline__ void begin_rows(int first) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    first_row = first;
    left = row_nbytes / 16 - lane;
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {  // rows past the last repeat it
      const int row = min(first_row + i * 8 + warp, num_outputs - 1);
      sources[i] = blocks + row * i64(row_nbytes) + lane * 16;
    }
  }

  // The next eight runs of the rows, or the first of the next rows, where there are any.
  __device__ __forceinline__ void fetch() {
    if (first_row < num_outputs) {
      const int lane = threadIdx.x % kWarp, end = min(left, kPieces - lane);
#pragma unroll
      for (int i = 0; i < kTiles * 2; ++i) {
#pragma unroll
        for (int piece = 0; piece < kPieces; piece += kWarp) {
          const u32 to = target + stage * kStageBytes + i * 8 * Run::kStride + piece * 16;
          if (piece < end) copy_async(to, sources[i] + piece * 16);
        }
        sources[i] += kBytes;
      }
      left -= kPieces;
      if (left + lane <= 0) begin_rows(first_row + gridDim.x * kRows);
    }
    end_copies();
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
};

// Sums of the warps, in their order: (8 warps, 4 kSets tokens, outputs) in shared memory.
template <int kTiles, int kSets>
struct Totals {
  static constexpr int kRows = kTiles * 16, kColumns = kSets * kSetTokens;
  float* values;
  __device__ __forceinline__ void put(const float (&sums)[kTiles][kSets][2]) const {
    const int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        float* at = values + (warp * kColumns + set * kSetTokens + t) * kRows + tile * 16 + quad;
        at[0] = sums[tile][set][0];
        at[8] = sums[tile][set][1];
      }
    }
  }
  __device__ __forceinline__ void store(int first_row, int num_tokens, int num_outputs, int stride,
                                        const float* __restrict__ bias, int accumulate,
                                        float* __restrict__ out) const {
    const int token = threadIdx.x / kRows, row = threadIdx.x % kRows, output = first_row + row;
    if (token >= num_tokens || output >= num_outputs) return;
    float total = values[token * kRows + row];
    for (int warp = 1; warp < kRunWarps; ++warp) {
      total += values[(warp * kColumns + token) * kRows + row];
    }
    float* target = out + i64(token) * stride + output;
    const float start = accumulate ? *target : 0.0f;
    *target = start + (bias ? bias[output] : 0.0f) + total;
  }
};

// out (num_tokens, stride) = or += tokens · weightᵀ (+ bias), columns [0, num_outputs); num_tokens up
// to 4 kSets. Of eight runs each of a block's 8 warps takes one. kBlocks: how many blocks are to be
// in a processor at once. kOwn: there is one token, which is split here, from x, rather than found in
// parts and scales.
template <typename Type, int kTiles, int kSets, int kStages, int kBlocks, bool kOwn>
__global__ void __launch_bounds__(kRunWarps* kWarp, kBlocks)
    few_product(int num_tokens, int num_outputs, int num_runs, int row_nbytes, int stride,
                const u8* __restrict__ blocks, const float* __restrict__ x, const u8* parts,
                const float* scales, const float* __restrict__ bias, int accumulate,
                float* __restrict__ out) {
  using Run = Runs<Type>;
  constexpr int kRows = kTiles * 16, kStageBytes = kRows * Run::kStride;
  extern __shared__ __align__(16) u8 shared[];
  const int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  const Totals<kTiles, kSets> totals{reinterpret_cast<float*>(shared + kStages * kStageBytes)};
  Ring<Type, kTiles, kStages> ring(shared, blocks, num_outputs, row_nbytes);
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) ring.fetch();
  wait_for_others();  // not for the weights, which nobody writes
  const int tokens_apart = kOwn ? 1 : kTokens;
  u8* own = reinterpret_cast<u8*>(totals.values + kRunWarps * totals.kColumns * kRows);
  float* own_scales = reinterpret_cast<float*>(own + num_runs * kTokenBytes);
  if constexpr (kOwn) {  // a warp needs the runs that it splits, and no others
    for (int run = warp; run < num_runs; run += kRunWarps) {
      split_run<Type>(x + run * kRun, own + run * kTokenBytes, own_scales + run);
    }
    __syncwarp();
  }
  const u8* run_tokens = kOwn ? own : parts;
  const float* run_scales = kOwn ? own_scales : scales;
  Source<kSets, kOwn> source;
  source.t = t;
  source.skew = warp * Run::kBytes % 4;
  int stage = 0;
  for (int first_row = blockIdx.x * kRows; first_row < num_outputs; first_row += gridDim.x * kRows) {
    float sums[kTiles][kSets][2] = {};
    for (int run = warp; run < num_runs + warp; run += kRunWarps) {
      wait_copies<kStages - 2>();
      __syncthreads();  // all have copied what is next, and are done with what came before it
      ring.fetch();
      if (run < num_runs) {
        float factors[kSets];
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          // Columns of tokens that are not there repeat the last one; what they give is not stored.
          const int column = min(set * kSetTokens + quad / 2, num_tokens - 1);
          const int token = min(set * kSetTokens + t, num_tokens - 1);
          source.tokens[set] = run_tokens + (run * tokens_apart + column) * kTokenBytes +
                               (quad % 2 * 4 + t) * 16;
          factors[set] = run_scales[run * tokens_apart + token];
        }
        source.row = shared + stage * kStageBytes + warp * Run::kBytes - source.skew +
                     quad * Run::kStride;
        float run_sums[kTiles][kSets][2] = {};
        Run::add(source, run_sums);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& sum = sums[tile][set][i];
              sum = __fmaf_rn(factors[set], run_sums[tile][set][i], sum);
            }
          }
        }
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    totals.put(sums);
    __syncthreads();
    totals.store(first_row, num_tokens, num_outputs, stride, bias, accumulate, out);
  }
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
  wait_for_others();
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
