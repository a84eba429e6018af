// Attention of tokens that share pages of 8 bits, all of them closed; see shared.cuh and pages.cuh.

template <int kKey, int kValue>
struct SharedInt8Pool {
  RowPages pages;
  const signed char *keys, *values;
  const __half* scales;

  struct Keys {
    const signed char* page;
    const __half* scales;
    __device__ __forceinline__ void load(int column, Operand<__half> (&out)[4]) const {
      Integers integers[4];
      Scales of_column;
      of_column.load(scales + column);
#pragma unroll
      for (int n = 0; n < 4; ++n) integers[n].load(page + n * 8 * kKey + column);
#pragma unroll
      for (int n = 0; n < 4; ++n) out[n] = scaled_halves(integers[n], of_column);
    }
  };
  __device__ __forceinline__ Keys keys_of(const Place& place, int number) const {
    const i64 head = pages[number];
    return {keys + (head * kPage + place.quad) * kKey, scales + head * (kKey + kPage)};
  }

  template <int kOwnTiles>
  struct Values {
    Integers integers[kOwnTiles];
    Scales of_page;
    __device__ __forceinline__ Operand<__half> operand(int i) const {
      return scaled_halves(integers[i], of_page);
    }
  };
  template <int kOwnTiles>
  __device__ __forceinline__ void load_values(const Place& place, int number,
                                              Values<kOwnTiles>& out) const {
    const i64 head = pages[number];
    const signed char* page = values + head * kValue * kPage + place.t * 8;
    out.of_page.load(scales + head * (kKey + kPage) + kKey + place.t * 8);
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
      const int dimension = (place.warp + i * kWarps) * 8 + place.quad;
      if (dimension < kValue) out.integers[i].load(page + dimension * kPage);
    }
  }
};

// kKey: key length rounded up to 32; kValue: value length
template <int kKey, int kValue>
__global__ void __launch_bounds__(kWarps* kWarp)
    attention_shared_int8(int num_heads, int num_kv_heads, int key_length, float scale,
                          const SharedTask* __restrict__ tasks, const Member* __restrict__ members,
                          const int* __restrict__ pages, int max_pages, int num_pages,
                          i64 first_page, i64 first_staged, const float* __restrict__ q,
                          const signed char* __restrict__ keys,
                          const signed char* __restrict__ values,
                          const __half* __restrict__ scales, float* __restrict__ partial_sums,
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
  const SharedInt8Pool<kKey, kValue> pool{row_pages, keys, values, scales};
  attend_together<__half, kKey, kValue>(place, queries, pool, task.block, key_length, scale, q,
                                        partial_sums, partial_stats);
}
