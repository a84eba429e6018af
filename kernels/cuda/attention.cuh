// Causal attention over KV pages on tensor cores, as partials over blocks of 256 positions: all but
// the kernels, which say where the pages lie (attention.cu, attention_int8.cu).
//
// A thread block takes some query rows (token, head of a group) of one segment and KV head, four
// warps. Scores: each warp takes 64 positions. o = P V: each warp takes every fourth tile of 8
// dimensions. Keys lie by position, values by dimension, so that both are read 16 bytes at a time
// as operands.
// With a float32 pool each operand is a half and the half of what that left over.

constexpr int kRows = 16;  // query rows of a task
constexpr int kBlock = 256, kWarps = 4, kBlockPages = kBlock / kPage;
constexpr float kLog2E = 1.4426950408889634f;

// A row of the table that kernels/cuda/plan.py makes.
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
      high[i] = nearest_half(value);
      low[i] = __float2half_rn(value - __half2float(high[i]));
    }
  }
};

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

template <typename T, int kHeight, int kWidth>
struct Matrix {  // halves in shared memory, one part or two
  static constexpr int kStride = kWidth + 8;
  __half parts[Operand<T>::kParts][kHeight][kStride];
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

// Where a thread is: its warp, the row of its quad in a tile, its place in the quad.
struct Place {
  int warp = threadIdx.x / kWarp, quad = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  __device__ __forceinline__ int row(int half) const { return half * 8 + quad; }
};

// A row's pages of one layer and KV head, by number from its first position on.
struct RowPages {
  const int* numbers;
  LayerPages layer;
  int num_kv_heads, kv_head, count;
  __device__ __forceinline__ i64 operator[](int number) const {
    return layer[numbers[number]] * num_kv_heads + kv_head;
  }
};

// The query heads of a task: of row r the head at flat index head(r) of q and out.
struct Queries {
  Task task;
  int num_heads, kv_head, group;
  __device__ __forceinline__ i64 head(int row) const {
    const int at = task.first_row + row;
    return i64(task.token + at / group) * num_heads + kv_head * group + at % group;
  }
  __device__ __forceinline__ int position(int row) const {  // the last that the row sees
    return task.position + (task.first_row + row) / group;
  }
  __device__ __forceinline__ int last() const { return position(task.num_rows - 1); }
};

// Each row on its own power of two, so that any magnitude fits halves; a warp per row.
template <typename T, int kKey, typename SomeQueries>
__device__ __forceinline__ void load_queries(const SomeQueries& queries, int key_length,
                                             const float* __restrict__ q,
                                             Matrix<T, kRows, kKey>& halves, float* scales) {
  constexpr int kOwnRows = kRows / kWarps, kEach = kKey / kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float values[kOwnRows][kEach];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = warp + i * kWarps;
    const int length = row < queries.task.num_rows ? key_length : 0;
    const float* from = q + queries.head(row) * key_length;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = lane + j * kWarp;
      values[i][j] = at < length ? from[at] : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) most = fmaxf(most, fabsf(values[i][j]));
    const int row = warp + i * kWarps, exponent = half_exponent(warp_max(most));
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      halves.store(row, lane + j * kWarp, values[i][j] * exponent_of_two(-exponent));
    }
    if (lane == 0) scales[row] = exponent_of_two(exponent);
  }
}

// scores (16, 64) of the warp's two pages of a block; pages past the last are left as they are
template <typename T, int kKey>
__device__ __forceinline__ void add_scores(const Place& place, const RowPages& pages, int block,
                                           const Matrix<T, kRows, kKey>& queries,
                                           const T* __restrict__ keys, float (&scores)[8][4]) {
  constexpr int kParts = Operand<T>::kParts;
#pragma unroll
  for (int own = 0; own < 2; ++own) {
    const int number = block * kBlockPages + place.warp * 2 + own;
    if (number >= pages.count) continue;
    const T* page = keys + pages[number] * kPage * kKey;
#pragma unroll
    for (int span = 0; span < kKey; span += 32) {
      const int column = span + place.t * 8;
      Operand<T> key[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) key[n].load(page + (n * 8 + place.quad) * kKey + column, 8);
      uint4 upper[kParts], lower[kParts];
      queries.load(place.row(0), column, upper);
      queries.load(place.row(1), column, lower);
#pragma unroll
      for (int n = 0; n < 4; ++n) multiply<T>(scores[own * 4 + n], upper, lower, key[n]);
    }
  }
}

// Scale a row's scores, -inf past what it sees; returns the most over the warp's positions.
__device__ __forceinline__ float mask_scores(float (&scores)[8][4], int half, int first, int limit,
                                             float scale) {
  float most = -kInfinity;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& score = scores[n][half * 2 + j];
      score = first + n * 8 + j <= limit ? __fmul_rn(score, scale) : -kInfinity;
      most = fmaxf(most, score);
    }
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
}

// weights = exp(scores - most) as halves; returns their sum over the warp's positions.
template <typename T>
__device__ __forceinline__ float store_weights(const Place& place, const float (&scores)[8][4],
                                               int half, int first, int limit, float most,
                                               float scale, Matrix<T, kRows, kBlock>& weights) {
  float total = 0.0f;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = place.row(half), column = place.warp * 64 + n * 8 + place.t * 2 + j;
      const bool seen = first + n * 8 + j <= limit;
      const float score = scores[n][half * 2 + j];
      weights.store(row, column, seen ? exp2f((score - most) * scale) : 0.0f);
      total += weights.at(row, column);
    }
  }
  total += __shfl_xor_sync(~0u, total, 1);
  return total + __shfl_xor_sync(~0u, total, 2);
}

// sums (16, own dimensions) += weights · values over a block; positions past `last` count as zero
template <typename T, int kValue, int kOwnTiles>
__device__ __forceinline__ void add_values(const Place& place, const RowPages& pages, int block,
                                           int last, const Matrix<T, kRows, kBlock>& weights,
                                           const T* __restrict__ values,
                                           float (&sums)[kOwnTiles][4]) {
  constexpr int kParts = Operand<T>::kParts;
  constexpr int kPagesAtOnce = kParts == 1 && kOwnTiles <= 4 ? 2 : 1;  // in flight, in registers
  for (int begin = 0; begin < kBlockPages; begin += kPagesAtOnce) {
    if (block * kBlockPages + begin >= pages.count) break;
    Operand<T> value[kPagesAtOnce][kOwnTiles] = {};
#pragma unroll
    for (int ahead = 0; ahead < kPagesAtOnce; ++ahead) {
      const int number = block * kBlockPages + begin + ahead;
      if (number >= pages.count) continue;
      const T* page = values + pages[number] * kValue * kPage;
      const int count = last + 1 - number * kPage - place.t * 8;
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        const int dimension = (place.warp + i * kWarps) * 8 + place.quad;
        if (dimension < kValue) value[ahead][i].load(page + dimension * kPage + place.t * 8, count);
      }
    }
#pragma unroll
    for (int ahead = 0; ahead < kPagesAtOnce; ++ahead) {
      const int column = (begin + ahead) * kPage + place.t * 8;
      uint4 upper[kParts], lower[kParts];
      weights.load(place.row(0), column, upper);
      weights.load(place.row(1), column, lower);
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        if (place.warp + i * kWarps >= kValue / 8) continue;
        multiply<T>(sums[i], upper, lower, value[ahead][i]);
      }
    }
  }
}

// (m, l, o) of the thread's two rows, and the dimensions of its tiles.
template <int kOwnTiles>
struct Result {
  float mosts[2] = {-kInfinity, -kInfinity}, totals[2] = {}, sums[kOwnTiles][4] = {};
  __device__ __forceinline__ void add(const Result& block, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Merge merge(mosts[half], block.mosts[half], scale);
      mosts[half] = merge.top;
      totals[half] = merge(totals[half], block.totals[half]);
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) {
          sums[i][j] = merge(sums[i][j], block.sums[i][j]);
        }
      }
    }
  }
  // The thread's dimensions of one row, divided by `total`.
  template <int kValue>
  __device__ __forceinline__ void store(const Place& place, int half, float total,
                                        float* target) const {
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
      const int dimension = (place.warp + i * kWarps) * 8 + place.t * 2;
      if (dimension >= kValue) continue;
#pragma unroll
      for (int j = 0; j < 2; ++j) target[dimension + j] = sums[i][half * 2 + j] / total;
    }
  }
};

// Where the results go: `out`, or partials that are left for merge_partials.
struct Results {
  float *out, *sums;
  float2* stats;
};

// pages: gives add_scores and add_values of a block; kKey: key length rounded up to 32
template <typename T, int kKey, int kValue, typename Pages>
__device__ __forceinline__ void attend(const Place& place, const Queries& queries,
                                       const Pages& pages, int num_kv_heads, int key_length,
                                       float scale, const float* __restrict__ q,
                                       const Results& results) {
  constexpr int kOwnTiles = (kValue / 8 + kWarps - 1) / kWarps;
  __shared__ __align__(16) Matrix<T, kRows, kKey> query_halves;
  __shared__ __align__(16) Matrix<T, kRows, kBlock> weights;
  __shared__ float warp_mosts[kWarps][kRows], warp_totals[kWarps][kRows], query_scales[kRows];

  const Task& task = queries.task;
  const int last = queries.last();
  const int limits[2] = {queries.position(place.row(0)), queries.position(place.row(1))};
  scale *= kLog2E;
  load_queries<T, kKey>(queries, key_length, q, query_halves, query_scales);
  __syncthreads();

  Result<kOwnTiles> result;
  for (int block = task.first_block; block < task.end_block; ++block) {
    const int first = block * kBlock + place.warp * 64 + place.t * 2;
    Result<kOwnTiles> partial;
    float scores[8][4] = {};
    pages.add_scores(place, block, query_halves, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(half);
      const float most = mask_scores(scores, half, first, limits[half], query_scales[row]);
      if (place.t == 0) warp_mosts[place.warp][row] = most;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(half);
      float most = warp_mosts[0][row];
      for (int warp = 1; warp < kWarps; ++warp) most = fmaxf(most, warp_mosts[warp][row]);
      partial.mosts[half] = most;
      const float total =
          store_weights<T>(place, scores, half, first, limits[half], most, scale, weights);
      if (place.t == 0) warp_totals[place.warp][row] = total;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int warp = 0; warp < kWarps; ++warp) {
        partial.totals[half] += warp_totals[warp][place.row(half)];
      }
    }
    pages.add_values(place, block, last, weights, partial.sums);
    if (task.partial < 0) result.add(partial, scale);
    else result = partial;  // one block alone: left for merge_partials
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row(half);
    if (row >= task.num_rows) continue;
    if (task.partial < 0) {
      result.template store<kValue>(place, half, result.totals[half],
                                    results.out + queries.head(row) * kValue);
      continue;
    }
    const i64 number = i64(task.first_row + row) * num_kv_heads + queries.kv_head;
    const i64 slot = task.partial + number * (last / kBlock + 1) + task.first_block;
    result.template store<kValue>(place, half, 1.0f, results.sums + slot * kValue);
    if (threadIdx.x / kWarp == 0 && place.t == 0) {
      results.stats[slot] = make_float2(result.mosts[half], result.totals[half]);
    }
  }
}
