// Where a layer's pages are: those of the pool's own memory, then those of host memory, staged.
struct LayerPages {
  int num_pages;
  i64 first, first_staged;
  __device__ __forceinline__ i64 operator[](int number) const {
    return number < num_pages ? first + number : first_staged + (number - num_pages);
  }
};

// Pages of KV of 8 bits (kernels/ops.py). The pool has integers, and for each page and KV head the
// scales of key_stride dimensions of keys, then of 32 positions of values, as halves.
//
// A page that a sweep stores into is kept in halves: the last one of a segment in its row's open
// page, those before it, which the sweep both opens and closes, among the new pages. Each has the
// keys of all KV heads, (kv_heads, 32, key_stride), then the values, (kv_heads, value_length, 32).

// Of a segment; its page `number` before the last is new page number + first_new.
struct Home {
  int row, last_page, first_new;
};

struct HalfPages {
  int num_kv_heads, key_stride, value_length;
  i64 first_row;  // of the layer, among the open pages
  __half *open, *fresh;
  __device__ __forceinline__ i64 keys_len() const { return i64(num_kv_heads) * kPage * key_stride; }
  __device__ __forceinline__ __half* keys(const Home& home, int number) const {
    const i64 length = keys_len() + i64(num_kv_heads) * kPage * value_length;
    return number == home.last_page ? open + (first_row + home.row) * length
                                    : fresh + (home.first_new + number) * length;
  }
};
