// Causal attention over KV pages on tensor cores, as partials over blocks of 256 positions.
//
// A thread block takes some query rows (token, head of a group) of one segment and KV head, four
// warps. Scores: each warp takes 64 positions. o = P V: each warp takes every fourth tile of 8
// dimensions. Keys lie by position, values by dimension, so that both are read 16 bytes at a time
// as operands: the inputs 8t to 8t+7 of thread t of a quad stand for those the instruction calls
// 2t, 2t+1, 2t+8, 2t+9 of two steps, in both operands alike, which leaves the sum as it is.
// With a float32 pool each operand is a half and the half of what that left over.

constexpr int kBlock = 256, kWarps = 4, kBlockPages = kBlock / kPage;
constexpr float kLog2E = 1.4426950408889634f;

// What a task is: engine-side layout in kernels/cuda/plan.py.
struct Task {
  int segment, token, position, first_row, num_rows, first_block, end_block, partial;
};

template <typename T> struct Operand;  // 8 inputs of one row

template <> struct Operand<__half> {
  static constexpr int kParts = 1;
  uint4 parts[1];
  __device__ __forceinline__ void load(const __half* at, int count) {
    parts[0] = *reinterpret_cast<const uint4*>(at);
    if (count >= 8) return;
    u32* words = reinterpret_cast<u32*>(parts);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] &= (2 * i < count ? 0xffffu : 0u) | (2 * i + 1 < count ? 0xffff0000u : 0u);
    }
  }
};

template <> struct Operand<float> {
  static constexpr int kParts = 2;
  uint4 parts[2];
  __device__ __forceinline__ void load(const float* at, int count) {
    __half* high = reinterpret_cast<__half*>(&parts[0]);
    __half* low = reinterpret_cast<__half*>(&parts[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = i < count ? at[i] : 0.0f;
      high[i] = __float2half_rn(value != value ? value : fminf(fmaxf(value, -kMostHalf), kMostHalf));
      low[i] = __float2half_rn(value - __half2float(high[i]));
    }
  }
};

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += 16 rows of a (those of `upper`, then `lower`) times b, over 32 inputs
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& upper, const uint4& lower,
                                         const uint4& b) {
  multiply(c, upper.x, lower.x, upper.y, lower.y, b.x, b.y);
  multiply(c, upper.z, lower.z, upper.w, lower.w, b.z, b.w);
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4 (&upper)[Operand<T>::kParts],
                                         const uint4 (&lower)[Operand<T>::kParts],
                                         const Operand<T>& b) {
  multiply(c, upper[0], lower[0], b.parts[0]);
  if constexpr (Operand<T>::kParts == 2) {
    multiply(c, upper[0], lower[0], b.parts[1]);
    multiply(c, upper[1], lower[1], b.parts[0]);
  }
}

// (m, l, o) of a row and of its next block merge with these weights. -inf: nothing seen there.
struct Merge {
  float top, old_weight, new_weight;
  __device__ __forceinline__ Merge(float old_most, float new_most, float scale) {
    top = fmaxf(old_most, new_most);
    old_weight = old_most == -kInfinity ? 0.0f : exp2f((old_most - top) * scale);
    new_weight = new_most == -kInfinity ? 0.0f : exp2f((new_most - top) * scale);
  }
  __device__ __forceinline__ float operator()(float old_value, float new_value) const {
    return __fmaf_rn(old_value, old_weight, __fmul_rn(new_value, new_weight));
  }
};

template <typename T, int kRows, int kWidth>
struct Matrix {  // halves in shared memory, one part or two
  static constexpr int kStride = kWidth + 8;
  __half parts[Operand<T>::kParts][kRows][kStride];
  __device__ __forceinline__ void store(int row, int column, float value) {
    const __half high = __float2half_rn(value);
    parts[0][row][column] = high;
    if constexpr (Operand<T>::kParts == 2) {
      parts[1][row][column] = __float2half_rn(value - __half2float(high));
    }
  }
  __device__ __forceinline__ float at(int row, int column) const {
    float value = __half2float(parts[0][row][column]);
    if constexpr (Operand<T>::kParts == 2) value += __half2float(parts[1][row][column]);
    return value;
  }
  __device__ __forceinline__ void load(int row, int column,
                                       uint4 (&out)[Operand<T>::kParts]) const {
#pragma unroll
    for (int part = 0; part < Operand<T>::kParts; ++part) {
      out[part] = *reinterpret_cast<const uint4*>(&parts[part][row][column]);
    }
  }
};

// kKey: key length rounded up to 32; kValue: value length; kTiles: tiles of 16 query rows
template <typename T, int kKey, int kValue, int kTiles>
__global__ void __launch_bounds__(kWarps* kWarp)
    attention(int num_heads, int num_kv_heads, int key_length, float scale,
              const Task* __restrict__ tasks, const int* __restrict__ pages, int max_pages,
              i64 first_page, const float* __restrict__ q, const T* __restrict__ keys,
              const T* __restrict__ values, float* __restrict__ out,
              float* __restrict__ partial_sums, float2* __restrict__ partial_stats) {
  constexpr int kRows = 16 * kTiles, kParts = Operand<T>::kParts;
  constexpr int kValueTiles = kValue / 8, kOwnTiles = (kValueTiles + kWarps - 1) / kWarps;
  constexpr int kPagesAtOnce = kParts == 1 && kOwnTiles <= 4 ? 2 : 1;  // in flight, in registers
  __shared__ __align__(16) Matrix<T, kRows, kKey> queries;
  __shared__ __align__(16) Matrix<T, kRows, kBlock> weights;
  __shared__ float warp_mosts[kWarps][kRows], warp_totals[kWarps][kRows];
  __shared__ float query_scales[kRows];

  const Task task = tasks[blockIdx.x];
  const int kv_head = blockIdx.y, group = num_heads / num_kv_heads;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int quad = lane / 4, t = lane % 4;
  const int* row_pages = pages + task.segment * i64(max_pages);
  const int last_position = task.position + (task.first_row + task.num_rows - 1) / group;
  const int num_pages = last_position / kPage + 1;
  scale *= kLog2E;

  for (int row = warp; row < kRows; row += kWarps) {
    const int at = task.first_row + row;
    const i64 head = i64(task.token + at / group) * num_heads + kv_head * group + at % group;
    const bool used = row < task.num_rows;
    float most = 0.0f;
    for (int i = lane; used && i < key_length; i += kWarp) {
      most = fmaxf(most, fabsf(q[head * key_length + i]));
    }
    const int exponent = half_exponent(warp_max(most));
    for (int i = lane; i < kKey; i += kWarp) {
      const float value = used && i < key_length ? q[head * key_length + i] : 0.0f;
      queries.store(row, i, value * exponent_of_two(-exponent));
    }
    if (lane == 0) query_scales[row] = exponent_of_two(exponent);
  }
  __syncthreads();

  int limits[kTiles][2];  // last position that the row sees
  float mosts[kTiles][2], totals[kTiles][2], sums[kTiles][kOwnTiles][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limits[tile][half] = task.position + (task.first_row + tile * 16 + half * 8 + quad) / group;
      mosts[tile][half] = -kInfinity;
      totals[tile][half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[tile][i][j] = 0.0f;
    }
  }

  for (int block = task.first_block; block < task.end_block; ++block) {
    float scores[kTiles][8][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[tile][n][j] = 0.0f;
      }
    }
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      const int number = block * kBlockPages + warp * 2 + own;
      if (number >= num_pages) continue;
      const i64 page = (first_page + row_pages[number]) * num_kv_heads + kv_head;
      const T* key_page = keys + page * kPage * kKey;
#pragma unroll
      for (int span = 0; span < kKey; span += 32) {
        Operand<T> key[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) key[n].load(key_page + (n * 8 + quad) * kKey + span + t * 8, 8);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint4 upper[kParts], lower[kParts];
          queries.load(tile * 16 + quad, span + t * 8, upper);
          queries.load(tile * 16 + 8 + quad, span + t * 8, lower);
#pragma unroll
          for (int n = 0; n < 4; ++n) multiply<T>(scores[tile][own * 4 + n], upper, lower, key[n]);
        }
      }
    }
    const int first = block * kBlock + warp * 64 + t * 2;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * 16 + half * 8 + quad;
        const float query_scale = query_scales[row];
        float most = -kInfinity;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& score = scores[tile][n][half * 2 + j];
            score = first + n * 8 + j <= limits[tile][half] ? score * query_scale : -kInfinity;
            most = fmaxf(most, score);
          }
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        if (t == 0) warp_mosts[warp][row] = most;
      }
    }
    __syncthreads();
    float block_mosts[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * 16 + half * 8 + quad;
        float most = warp_mosts[0][row];
        for (int other = 1; other < kWarps; ++other) most = fmaxf(most, warp_mosts[other][row]);
        block_mosts[tile][half] = most;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const bool seen = first + n * 8 + j <= limits[tile][half];
            const float score = scores[tile][n][half * 2 + j];
            const int column = warp * 64 + n * 8 + t * 2 + j;
            weights.store(row, column, seen ? exp2f((score - most) * scale) : 0.0f);
            total += weights.at(row, column);
          }
        }
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (t == 0) warp_totals[warp][row] = total;
      }
    }
    __syncthreads();
    float block_sums[kTiles][kOwnTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) block_sums[tile][i][j] = 0.0f;
      }
    }
    for (int in_block = 0; in_block < kBlockPages; in_block += kPagesAtOnce) {
      if (block * kBlockPages + in_block >= num_pages) break;
      Operand<T> value[kPagesAtOnce][kOwnTiles] = {};
#pragma unroll
      for (int ahead = 0; ahead < kPagesAtOnce; ++ahead) {
        const int number = block * kBlockPages + in_block + ahead;
        if (number >= num_pages) continue;
        const i64 page = (first_page + row_pages[number]) * num_kv_heads + kv_head;
        const T* value_page = values + page * kValue * kPage;
        const int count = last_position + 1 - number * kPage - t * 8;
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
          const int dimension = (warp + i * kWarps) * 8 + quad;
          if (dimension < kValue) {
            value[ahead][i].load(value_page + dimension * kPage + t * 8, count);
          }
        }
      }
#pragma unroll
      for (int ahead = 0; ahead < kPagesAtOnce; ++ahead) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int column = (in_block + ahead) * kPage + t * 8;
          uint4 upper[kParts], lower[kParts];
          weights.load(tile * 16 + quad, column, upper);
          weights.load(tile * 16 + 8 + quad, column, lower);
#pragma unroll
          for (int i = 0; i < kOwnTiles; ++i) {
            if (warp + i * kWarps < kValueTiles) {
              multiply<T>(block_sums[tile][i], upper, lower, value[ahead][i]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * 16 + half * 8 + quad;
        float total = warp_totals[0][row];
        for (int other = 1; other < kWarps; ++other) total += warp_totals[other][row];
        if (task.partial >= 0) {  // one block alone: left for merge_partials
          mosts[tile][half] = block_mosts[tile][half];
          totals[tile][half] = total;
        } else {
          const Merge merge(mosts[tile][half], block_mosts[tile][half], scale);
          mosts[tile][half] = merge.top;
          totals[tile][half] = merge(totals[tile][half], total);
#pragma unroll
          for (int i = 0; i < kOwnTiles; ++i) {
#pragma unroll
            for (int j = half * 2; j < half * 2 + 2; ++j) {
              sums[tile][i][j] = merge(sums[tile][i][j], block_sums[tile][i][j]);
            }
          }
        }
      }
      if (task.partial >= 0) {
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[tile][i][j] = block_sums[tile][i][j];
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * 16 + half * 8 + quad;
      if (row >= task.num_rows) continue;
      const int at = task.first_row + row;
      const i64 head = i64(task.token + at / group) * num_heads + kv_head * group + at % group;
      const int num_blocks = last_position / kBlock + 1;
      const i64 slot = task.partial + (i64(at) * num_kv_heads + kv_head) * num_blocks + task.first_block;
      const bool is_partial = task.partial >= 0;
      float* target = is_partial ? partial_sums + slot * kValue : out + head * kValue;
      if (is_partial && warp == 0 && t == 0) {
        partial_stats[slot] = make_float2(mosts[tile][half], totals[tile][half]);
      }
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        const int dimension = (warp + i * kWarps) * 8 + t * 2;
        if (dimension >= kValue) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float sum = sums[tile][i][half * 2 + j];
          target[dimension + j] = is_partial ? sum : sum / totals[tile][half];
        }
      }
    }
  }
}

// out of a query row from the partials of its blocks, in order; a block per row and KV head.
// merges: (token, head of the group, first slot, blocks) per row
extern "C" __global__ void merge_partials(int num_heads, int num_kv_heads, int value_length,
                                          float scale, const int4* __restrict__ merges,
                                          const float* __restrict__ partial_sums,
                                          const float2* __restrict__ partial_stats,
                                          float* __restrict__ out) {
  const int4 row = merges[blockIdx.x];
  const int kv_head = blockIdx.y, group = num_heads / num_kv_heads;
  const i64 first = row.z + i64(kv_head) * row.w;
  const i64 head = i64(row.x) * num_heads + kv_head * group + row.y;
  scale *= kLog2E;
  for (int i = threadIdx.x; i < value_length; i += blockDim.x) {
    float most = -kInfinity, total = 0.0f, sum = 0.0f;
    for (int block = 0; block < row.w; ++block) {
      const float2 stats = partial_stats[first + block];
      const Merge merge(most, stats.x, scale);
      most = merge.top;
      total = merge(total, stats.y);
      sum = merge(sum, partial_sums[(first + block) * value_length + i]);
    }
    out[head * value_length + i] = sum / total;
  }
}
