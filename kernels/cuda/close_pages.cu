// Pages that a sweep has filled, from halves to integers and scales: see kernels/ops.py.

constexpr int kWarps = 8;

// The values that share a scale. What is not finite makes it NaN, so that it shows wherever the
// page is read.
struct Line {
  float most = 0.0f, check = 0.0f;
  __device__ __forceinline__ void add(float value) {
    check += __fmul_rn(value, 0.0f);
    most = fmaxf(most, fabsf(value));
  }
  // The least half that takes the largest magnitude to 127 at most.
  __device__ __forceinline__ __half scale() const {
    const __half scale = __float2half_rn(__fdiv_rn(most, 127.0f) + check);
    const bool is_short = __fmul_rn(__half2float(scale), 127.0f) < most;
    return is_short ? __ushort_as_half(__half_as_ushort(scale) + 1) : scale;
  }
};

__device__ __forceinline__ signed char integer(float value, float scale) {
  return scale > 0.0f ? __float2int_rn(__fdiv_rn(value, scale)) : 0;
}

// A thread per dimension.
__device__ void close_keys(int key_stride, const __half* __restrict__ halves,
                           signed char* __restrict__ integers, __half* __restrict__ scales) {
  for (int i = threadIdx.x; i < key_stride; i += blockDim.x) {
    Line line;
#pragma unroll
    for (int t = 0; t < kPage; ++t) line.add(__half2float(halves[t * key_stride + i]));
    const __half scale = line.scale();
#pragma unroll
    for (int t = 0; t < kPage; ++t) {
      const int at = t * key_stride + i;
      integers[at] = integer(__half2float(halves[at]), __half2float(scale));
    }
    scales[i] = scale;
  }
}

// A lane per position, which the warps share.
__device__ void close_values(int value_length, const __half* __restrict__ halves,
                             signed char* __restrict__ integers, __half* __restrict__ scales) {
  __shared__ float mosts[kWarps][kPage], checks[kWarps][kPage];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Line line;
  for (int i = warp; i < value_length; i += kWarps) {
    line.add(__half2float(halves[i * kPage + lane]));
  }
  mosts[warp][lane] = line.most;
  checks[warp][lane] = line.check;
  __syncthreads();
  for (int other = 0; other < kWarps; ++other) {
    line.most = fmaxf(line.most, mosts[other][lane]);
    line.check += checks[other][lane];
  }
  const __half scale = line.scale();
  for (int i = warp; i < value_length; i += kWarps) {
    const int at = i * kPage + lane;
    integers[at] = integer(__half2float(halves[at]), __half2float(scale));
  }
  if (warp == 0) scales[lane] = scale;
}

// closing: (segment, pages of its row up to this one) per page; a block for each KV head of one
extern "C" __global__ void __launch_bounds__(kWarps* kWarp)
    close_pages(int num_kv_heads, int key_stride, int value_length,
                const int2* __restrict__ closing, const int* __restrict__ pages, int max_pages,
                int num_pages, i64 first_page, i64 first_staged, const Home* __restrict__ homes,
                i64 first_row, __half* open_pages,
                __half* new_pages, signed char* __restrict__ keys,
                signed char* __restrict__ values, __half* __restrict__ scales) {
  const int2 page = closing[blockIdx.x];
  const int segment = page.x, number = page.y - 1, kv_head = blockIdx.y;
  wait_for_others();
  if (page.y == 0) return;  // it only fills the table
  const HalfPages halves{num_kv_heads, key_stride, value_length, first_row, open_pages, new_pages};
  const __half* half_keys = halves.keys(homes[segment], number);
  const __half* half_values = half_keys + halves.keys_len();
  const LayerPages layer{num_pages, first_page, first_staged};
  const i64 head = layer[pages[segment * i64(max_pages) + number]] * num_kv_heads + kv_head;
  __half* head_scales = scales + head * (key_stride + kPage);
  close_keys(key_stride, half_keys + i64(kv_head) * kPage * key_stride,
             keys + head * kPage * key_stride, head_scales);
  close_values(value_length, half_values + i64(kv_head) * value_length * kPage,
               values + head * value_length * kPage, head_scales + key_stride);
}
