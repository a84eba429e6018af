// Attention over KV of 8 bits; see attention.cuh and pages.cuh.
//
// A row reads the page of its own position in halves, those before it as integers times their
// scales, rounded to halves. All rows of a task are of one page: its segment begins with a page or
// ends in the one it begins in (kernels/ops.py), and a page's rows are a multiple of a task's.

// A row's pages, of one layer and KV head; the last is the one that the task's rows are of.
template <int kKey, int kValue>
struct Int8Pages {
  RowPages pages;
  const __half *own_keys, *own_values;
  const signed char *keys, *values;
  const __half* scales;
  __device__ __forceinline__ int own() const { return pages.count - 1; }

  // scores (16, 32) of a page; load(column, out) gives 8 dimensions of positions n * 8 + quad
  template <typename Load>
  __device__ __forceinline__ void score_page(const Place& place,
                                             const Matrix<__half, kRows, kKey>& queries,
                                             const Load& load, float (*scores)[4]) const {
#pragma unroll
    for (int span = 0; span < kKey; span += 32) {
      const int column = span + place.t * 8;
      Operand<__half> page[4];
      load(column, page);
      uint4 upper[1], lower[1];
      queries.load(place.row(0), column, upper);
      queries.load(place.row(1), column, lower);
#pragma unroll
      for (int n = 0; n < 4; ++n) multiply<__half>(scores[n], upper, lower, page[n]);
    }
  }

  __device__ __forceinline__ void add_scores(const Place& place, int block,
                                             const Matrix<__half, kRows, kKey>& queries,
                                             float (&scores)[8][4]) const {
#pragma unroll
    for (int each = 0; each < 2; ++each) {
      const int number = block * kBlockPages + place.warp * 2 + each;
      if (number < own()) {
        const i64 head = pages[number];
        const signed char* page = keys + (head * kPage + place.quad) * kKey;
        const __half* page_scales = scales + head * (kKey + kPage);
        const auto load = [&](int column, Operand<__half>(&out)[4]) {
          Integers integers[4];
          Scales of_column;
          of_column.load(page_scales + column);
#pragma unroll
          for (int n = 0; n < 4; ++n) integers[n].load(page + n * 8 * kKey + column);
#pragma unroll
          for (int n = 0; n < 4; ++n) out[n] = scaled_halves(integers[n], of_column);
        };
        score_page(place, queries, load, scores + 4 * each);
      } else if (number == own()) {
        const __half* page = own_keys + place.quad * kKey;
        const auto load = [&](int column, Operand<__half>(&out)[4]) {
#pragma unroll
          for (int n = 0; n < 4; ++n) out[n].load(page + n * 8 * kKey + column, 8);
        };
        score_page(place, queries, load, scores + 4 * each);
      }
    }
  }

  // sums += weights · integers of pages [begin, end), some of them in flight at once
  template <int kOwnTiles>
  __device__ __forceinline__ void weigh_integers(const Place& place, int begin, int end,
                                                 const Matrix<__half, kRows, kBlock>& weights,
                                                 float (&sums)[kOwnTiles][4]) const {
    constexpr int kAtOnce = kOwnTiles <= 4 ? 2 : 1;
    for (int first = begin; first < end; first += kAtOnce) {
      Integers integers[kAtOnce][kOwnTiles];
      Scales of_page[kAtOnce];
#pragma unroll
      for (int ahead = 0; ahead < kAtOnce; ++ahead) {
        if (first + ahead >= end) continue;
        const i64 head = pages[first + ahead];
        const signed char* page = values + head * kValue * kPage + place.t * 8;
        of_page[ahead].load(scales + head * (kKey + kPage) + kKey + place.t * 8);
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
          const int dimension = (place.warp + i * kWarps) * 8 + place.quad;
          if (dimension < kValue) integers[ahead][i].load(page + dimension * kPage);
        }
      }
#pragma unroll
      for (int ahead = 0; ahead < kAtOnce; ++ahead) {
        if (first + ahead >= end) continue;
        const int column = (first + ahead) % kBlockPages * kPage + place.t * 8;
        uint4 upper[1], lower[1];
        weights.load(place.row(0), column, upper);
        weights.load(place.row(1), column, lower);
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
          if (place.warp + i * kWarps >= kValue / 8) continue;
          const Operand<__half> value = scaled_halves(integers[ahead][i], of_page[ahead]);
          multiply<__half>(sums[i], upper, lower, value);
        }
      }
    }
  }

  // sums += weights · values of the own page; positions past `last` count as zero
  template <int kOwnTiles>
  __device__ __forceinline__ void weigh_own(const Place& place, int last,
                                            const Matrix<__half, kRows, kBlock>& weights,
                                            float (&sums)[kOwnTiles][4]) const {
    const int column = own() % kBlockPages * kPage + place.t * 8;
    const int count = last % kPage + 1 - place.t * 8;
    uint4 upper[1], lower[1];
    weights.load(place.row(0), column, upper);
    weights.load(place.row(1), column, lower);
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
      const int dimension = (place.warp + i * kWarps) * 8 + place.quad;
      if (place.warp + i * kWarps >= kValue / 8) continue;
      Operand<__half> value;
      value.load(own_values + dimension * kPage + place.t * 8, count);
      multiply<__half>(sums[i], upper, lower, value);
    }
  }

  template <int kOwnTiles>
  __device__ __forceinline__ void add_values(const Place& place, int block, int last,
                                             const Matrix<__half, kRows, kBlock>& weights,
                                             float (&sums)[kOwnTiles][4]) const {
    const int begin = block * kBlockPages, end = begin + kBlockPages;
    weigh_integers(place, begin, min(end, own()), weights, sums);
    if (own() < end) weigh_own(place, last, weights, sums);
  }
};

// kKey: key length rounded up to 32; kValue: value length
template <int kKey, int kValue>
__global__ void __launch_bounds__(kWarps* kWarp, kKey <= 128 ? 4 : 3)
    attention_int8(int num_heads, int num_kv_heads, int key_length, float scale,
                   const Task* __restrict__ tasks, const int* __restrict__ pages, int max_pages,
                   int num_pages, i64 first_page, i64 first_staged,
                   const Home* __restrict__ homes, i64 first_row, __half* open_pages, __half* new_pages, const float* __restrict__ q,
                   const signed char* __restrict__ keys, const signed char* __restrict__ values,
                   const __half* __restrict__ scales, float* __restrict__ out,
                   float* __restrict__ partial_sums, float2* __restrict__ partial_stats) {
  const Place place;
  const Queries queries{tasks[blockIdx.x], num_heads, int(blockIdx.y), num_heads / num_kv_heads};
  const Task& task = queries.task;
  const i64 kv_head = queries.kv_head;
  const int own = queries.last() / kPage;
  const HalfPages halves{num_kv_heads, kKey, kValue, first_row, open_pages, new_pages};
  const __half* own_page = halves.keys(homes[task.segment], own);
  const LayerPages layer{num_pages, first_page, first_staged};
  const Int8Pages<kKey, kValue> row_pages{
      {pages + task.segment * i64(max_pages), layer, num_kv_heads, queries.kv_head, own + 1},
      own_page + kv_head * kPage * kKey,
      own_page + halves.keys_len() + kv_head * kValue * kPage,
      keys, values, scales};
  wait_for_others();
  if (task.num_rows == 0) return;  // it only fills the table
  attend<__half, kKey, kValue>(place, queries, row_pages, num_kv_heads, key_length, scale, q,
                               {out, partial_sums, partial_stats});
}
