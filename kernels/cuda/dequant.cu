// GGUF blocks to halves or floats in memory; a thread decodes 8 values (blocks.cuh).

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
  wait_for_others();
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
