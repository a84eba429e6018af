// Attention of tokens whose rows begin with the same pages, as partials of one block of positions, all
// of which every token sees. Query rows of several tokens go through each page together.
//
// A query row's numbers are those of attention.cuh to the last bit, whoever goes with it: the same
// operations in the same order, in a row of its own of every product. Keep both alike.

constexpr int kTiles = 2;  // of query rows in a task; kernels/cuda/tasks.py fills as many

// Rows of the tables that kernels/cuda/tasks.py makes.
struct SharedTask {
  int segment, first_row, num_rows, block;
};
struct Member {
  int token, partial, blocks;
};

// Some query rows of a task, named like those of Queries. Of row r the head is at flat index head(r)
// of q, its partial at slot(r, block).
struct SharedQueries {
  struct {
    int first_row, num_rows;
  } task;
  const Member* members;
  int num_heads, num_kv_heads, kv_head, group;
  __device__ __forceinline__ int at(int row) const {
    return task.first_row + min(row, task.num_rows - 1);
  }
  __device__ __forceinline__ i64 head(int row) const {
    return i64(members[at(row) / group].token) * num_heads + kv_head * group + at(row) % group;
  }
  __device__ __forceinline__ i64 slot(int row, int block) const {
    const Member member = members[at(row) / group];
    const i64 number = at(row) % group * num_kv_heads + kv_head;
    return member.partial + number * member.blocks + block;
  }
  __device__ __forceinline__ SharedQueries tile(int number) const {
    SharedQueries some = *this;
    some.task.first_row += number * kRows;
    some.task.num_rows = min(kRows, task.num_rows - number * kRows);
    return some;
  }
};

// scores (16, 64) of each tile += queries · keys of the warp's two pages of a block
template <typename T, int kKey, typename Pages>
__device__ __forceinline__ void add_scores_together(const Place& place, const Pages& pages,
                                                    int block, int num_tiles,
                                                    const Matrix<T, kRows, kKey>* queries,
                                                    float (&scores)[kTiles][8][4]) {
  constexpr int kParts = Operand<T>::kParts;
#pragma unroll
  for (int own = 0; own < 2; ++own) {
    const auto page = pages.keys_of(place, block * kBlockPages + place.warp * 2 + own);
#pragma unroll
    for (int span = 0; span < kKey; span += 32) {
      const int column = span + place.t * 8;
      Operand<T> keys[4];
      page.load(column, keys);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile >= num_tiles) continue;
        uint4 upper[kParts], lower[kParts];
        queries[tile].load(place.row(0), column, upper);
        queries[tile].load(place.row(1), column, lower);
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply<T>(scores[tile][own * 4 + n], upper, lower, keys[n]);
      }
    }
  }
}

// sums (16, own dimensions) of each tile += weights · values of a block
template <typename T, int kValue, int kOwnTiles, typename Pages>
__device__ __forceinline__ void add_values_together(const Place& place, const Pages& pages,
                                                    int block, int num_tiles,
                                                    const Matrix<T, kRows, kBlock>* weights,
                                                    Result<kOwnTiles> (&results)[kTiles]) {
  constexpr int kParts = Operand<T>::kParts;
  constexpr int kPagesAtOnce = kParts == 1 && kOwnTiles <= 4 ? 2 : 1;  // in flight, in registers
  for (int begin = 0; begin < kBlockPages; begin += kPagesAtOnce) {
    typename Pages::template Values<kOwnTiles> values[kPagesAtOnce];
#pragma unroll
    for (int ahead = 0; ahead < kPagesAtOnce; ++ahead) {
      pages.load_values(place, block * kBlockPages + begin + ahead, values[ahead]);
    }
#pragma unroll
    for (int ahead = 0; ahead < kPagesAtOnce; ++ahead) {
      const int column = (begin + ahead) * kPage + place.t * 8;
      uint4 upper[kTiles][kParts], lower[kTiles][kParts];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile >= num_tiles) continue;
        weights[tile].load(place.row(0), column, upper[tile]);
        weights[tile].load(place.row(1), column, lower[tile]);
      }
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        if (place.warp + i * kWarps >= kValue / 8) continue;
        const Operand<T> value = values[ahead].operand(i);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (tile < num_tiles) multiply<T>(results[tile].sums[i], upper[tile], lower[tile], value);
        }
      }
    }
  }
}

// pages: gives keys_of a page and loads its values; kKey: key length rounded up to 32
template <typename T, int kKey, int kValue, typename Pages>
__device__ __forceinline__ void attend_together(const Place& place, const SharedQueries& queries,
                                                const Pages& pages, int block, int key_length,
                                                float scale, const float* __restrict__ q,
                                                float* __restrict__ partial_sums,
                                                float2* __restrict__ partial_stats) {
  constexpr int kOwnTiles = (kValue / 8 + kWarps - 1) / kWarps;
  constexpr int kFirst = 0, kLimit = kBlock;  // each row sees all of the block
  union Halves {  // the queries are no longer needed when the weights are there
    Matrix<T, kRows, kKey> queries[kTiles];
    Matrix<T, kRows, kBlock> weights[kTiles];
  };
  __shared__ __align__(16) Halves halves;
  __shared__ float warp_mosts[kTiles][kWarps][kRows], warp_totals[kTiles][kWarps][kRows];
  __shared__ float query_scales[kTiles][kRows];

  scale *= kLog2E;
  const int num_tiles = (queries.task.num_rows + kRows - 1) / kRows;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile >= num_tiles) continue;
    load_queries<T, kKey>(queries.tile(tile), key_length, q, halves.queries[tile],
                          query_scales[tile]);
  }
  __syncthreads();

  float scores[kTiles][8][4] = {};
  add_scores_together<T, kKey>(place, pages, block, num_tiles, halves.queries, scores);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(half);
      const float most = mask_scores(scores[tile], half, kFirst, kLimit, query_scales[tile][row]);
      if (place.t == 0) warp_mosts[tile][place.warp][row] = most;
    }
  }
  __syncthreads();

  Result<kOwnTiles> results[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile >= num_tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(half);
      float most = warp_mosts[tile][0][row];
      for (int warp = 1; warp < kWarps; ++warp) most = fmaxf(most, warp_mosts[tile][warp][row]);
      results[tile].mosts[half] = most;
      const float total = store_weights<T>(place, scores[tile], half, kFirst, kLimit, most, scale,
                                           halves.weights[tile]);
      if (place.t == 0) warp_totals[tile][place.warp][row] = total;
    }
  }
  __syncthreads();

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      for (int warp = 0; warp < kWarps; ++warp) {
        results[tile].totals[half] += warp_totals[tile][warp][place.row(half)];
      }
    }
  }
  add_values_together<T, kValue>(place, pages, block, num_tiles, halves.weights, results);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const SharedQueries some = queries.tile(tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row(half);
      if (row >= some.task.num_rows) continue;
      const i64 slot = some.slot(row, block);
      results[tile].template store<kValue>(place, half, 1.0f, partial_sums + slot * kValue);
      if (place.warp == 0 && place.t == 0) {
        partial_stats[slot] = make_float2(results[tile].mosts[half], results[tile].totals[half]);
      }
    }
  }
}
