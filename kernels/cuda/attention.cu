// Attention over pages of floats or halves, and the merge of partials; see attention.cuh.

template <typename T, int kKey, int kValue>
struct PoolPages {
  RowPages pages;
  const T *keys, *values;
  __device__ __forceinline__ void add_scores(const Place& place, int block,
                                             const Matrix<T, kRows, kKey>& queries,
                                             float (&scores)[8][4]) const {
    ::add_scores<T, kKey>(place, pages, block, queries, keys, scores);
  }
  template <int kOwnTiles>
  __device__ __forceinline__ void add_values(const Place& place, int block, int last,
                                             const Matrix<T, kRows, kBlock>& weights,
                                             float (&sums)[kOwnTiles][4]) const {
    ::add_values<T, kValue>(place, pages, block, last, weights, values, sums);
  }
};

// kKey: key length rounded up to 32; kValue: value length
template <typename T, int kKey, int kValue>
__global__ void __launch_bounds__(kWarps* kWarp)
    attention(int num_heads, int num_kv_heads, int key_length, float scale,
              const Task* __restrict__ tasks, const int* __restrict__ pages, int max_pages,
              int num_pages, i64 first_page, i64 first_staged, const float* __restrict__ q,
              const T* __restrict__ keys, const T* __restrict__ values, float* __restrict__ out,
              float* __restrict__ partial_sums, float2* __restrict__ partial_stats) {
  const Place place;
  const Queries queries{tasks[blockIdx.x], num_heads, int(blockIdx.y), num_heads / num_kv_heads};
  const LayerPages layer{num_pages, first_page, first_staged};
  const RowPages row_pages{pages + queries.task.segment * i64(max_pages), layer, num_kv_heads,
                           queries.kv_head, queries.last() / kPage + 1};
  wait_for_others();
  if (queries.task.num_rows == 0) return;  // it only fills the table
  const PoolPages<T, kKey, kValue> pool{row_pages, keys, values};
  attend<T, kKey, kValue>(place, queries, pool, num_kv_heads, key_length, scale, q,
                          {out, partial_sums, partial_stats});
}

// out of a query row from the partials of its blocks, in order; a block per row and KV head.
// merges: (token, head of the group, first slot, blocks) per row
extern "C" __global__ void merge_partials(int num_heads, int num_kv_heads, int value_length,
                                          float scale, const int4* __restrict__ merges,
                                          const float* __restrict__ partial_sums,
                                          const float2* __restrict__ partial_stats,
                                          float* __restrict__ out) {
  const int4 row = merges[blockIdx.x];
  wait_for_others();
  if (row.w == 0) return;  // a row that only fills the table
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
