// Attention of tokens that share pages of floats or halves; see shared.cuh.

template <typename T, int kKey, int kValue>
struct SharedPool {
  RowPages pages;
  const T *keys, *values;

  struct Keys {
    const T* page;
    __device__ __forceinline__ void load(int column, Operand<T> (&out)[4]) const {
#pragma unroll
      for (int n = 0; n < 4; ++n) out[n].load(page + n * 8 * kKey + column, 8);
    }
  };
  __device__ __forceinline__ Keys keys_of(const Place& place, int number) const {
    return {keys + (pages[number] * kPage + place.quad) * kKey};
  }

  template <int kOwnTiles>
  struct Values {
    Operand<T> loaded[kOwnTiles] = {};
    __device__ __forceinline__ const Operand<T>& operand(int i) const { return loaded[i]; }
  };
  template <int kOwnTiles>
  __device__ __forceinline__ void load_values(const Place& place, int number,
                                              Values<kOwnTiles>& out) const {
    const T* page = values + pages[number] * kValue * kPage;
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
      const int dimension = (place.warp + i * kWarps) * 8 + place.quad;
      if (dimension < kValue) out.loaded[i].load(page + dimension * kPage + place.t * 8, 8);
    }
  }
};

// kKey: key length rounded up to 32; kValue: value length
template <typename T, int kKey, int kValue>
__global__ void __launch_bounds__(kWarps* kWarp)
    attention_shared(int num_heads, int num_kv_heads, int key_length, float scale,
                     const SharedTask* __restrict__ tasks, const Member* __restrict__ members,
                     const int* __restrict__ pages, int max_pages, int num_pages, i64 first_page,
                     i64 first_staged, const float* __restrict__ q, const T* __restrict__ keys,
                     const T* __restrict__ values, float* __restrict__ partial_sums,
                     float2* __restrict__ partial_stats) {
  const Place place;
  const SharedTask task = tasks[blockIdx.x];
  const int kv_head = blockIdx.y;
  const LayerPages layer{num_pages, first_page, first_staged};
  const RowPages row_pages{pages + task.segment * i64(max_pages), layer, num_kv_heads, kv_head,
                           (task.block + 1) * kBlockPages};
  const SharedQueries queries{{task.first_row, task.num_rows}, members, num_heads, num_kv_heads,
                              kv_head, num_heads / num_kv_heads};
  wait_for_others();
  if (task.num_rows == 0) return;  // it only fills the table
  const SharedPool<T, kKey, kValue> pool{row_pages, keys, values};
  attend_together<T, kKey, kValue>(place, queries, pool, task.block, key_length, scale, q,
                                   partial_sums, partial_stats);
}
