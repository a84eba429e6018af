// sums (256, num_outputs) = x (256, num_inputs) · weightᵀ, halves with float32 sums, rows of sums
// `stride` apart; a tile of 256 tokens per blockIdx.y. Each sum is one chain over the inputs, 16 at a
// time; operands come straight from memory, 16 bytes a thread.

constexpr int kWarpOutputs = 32, kWarpTokens = 64;  // of one warp; 4 warps take 256 tokens

__device__ __forceinline__ uint4 load(const __half* row, int at, int num_inputs, bool inside) {
  return inside && at < num_inputs ? *reinterpret_cast<const uint4*>(row + at) : uint4{0, 0, 0, 0};
}

// A block of 4 warps: 256 tokens times 32 outputs.
extern "C" __global__ void __launch_bounds__(128)
    tile_product(int num_outputs, int num_inputs, i64 stride, const __half* __restrict__ x,
                 const __half* __restrict__ weight, float* __restrict__ sums) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int quad = lane / 4, t = lane % 4;
  const i64 first_token = blockIdx.y * 256 + warp * kWarpTokens;
  const i64 first_output = blockIdx.x * i64(kWarpOutputs);
  float c[kWarpTokens / 16][kWarpOutputs / 8][4] = {};
  for (int at = t * 8; at < num_inputs + t * 8; at += 32) {
    uint4 b[kWarpOutputs / 8];
#pragma unroll
    for (int n = 0; n < kWarpOutputs / 8; ++n) {
      const i64 output = first_output + n * 8 + quad;
      b[n] = load(weight + output * num_inputs, at, num_inputs, output < num_outputs);
    }
#pragma unroll
    for (int m = 0; m < kWarpTokens / 16; ++m) {
      const __half* row = x + (first_token + m * 16 + quad) * num_inputs;
      const uint4 upper = load(row, at, num_inputs, true);
      const uint4 lower = load(row + i64(8) * num_inputs, at, num_inputs, true);
#pragma unroll
      for (int n = 0; n < kWarpOutputs / 8; ++n) {
        multiply(c[m][n], upper, lower, b[n]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kWarpTokens / 16; ++m) {
#pragma unroll
    for (int n = 0; n < kWarpOutputs / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const i64 token = first_token + m * 16 + quad + i / 2 * 8;
        const i64 output = first_output + n * 8 + t * 2 + i % 2;
        if (output < num_outputs) sums[token * stride + output] = c[m][n][i];
      }
    }
  }
}
