// Operations on one token at a time: norms, activations, rotary embedding, KV store, half operands.
// kCount floats travel together where the widths are multiples of it.

// out[i] = x[rows[i]] / sqrt(mean(x²) + eps) * weight, or x[i] where rows is null; a block per i
template <int kCount>
__global__ void rms_norm(int width, const float* __restrict__ x, const int* __restrict__ rows,
                         const float* __restrict__ weight, float eps, float* __restrict__ out) {
  __shared__ float shared[32];
  const i64 target = blockIdx.x, source = rows ? rows[target] : target;
  wait_for_others();
  const auto* from = floats<kCount>(x + source * width);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < width / kCount; i += blockDim.x) {
    const Floats<kCount> some = from[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += some[j] * some[j];
  }
  const float scale = 1.0f / sqrtf(block_sum(sum, shared) / width + eps);
  for (int i = threadIdx.x; i < width / kCount; i += blockDim.x) {
    Floats<kCount> some = from[i];
    const Floats<kCount> factors = floats<kCount>(weight)[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) some[j] = some[j] * scale * factors[j];
    floats<kCount>(out + target * width)[i] = some;
  }
}

extern "C" __global__ void copy_words(int count, const u32* __restrict__ from, u32* __restrict__ to) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}

// out = silu(gate) * up; gate_up: (num_tokens, 2 ffn)
template <int kCount>
__global__ void swiglu(int num_tokens, int ffn, const float* __restrict__ gate_up,
                       float* __restrict__ out) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kCount;
  wait_for_others();
  if (column >= ffn) return;
  for (i64 token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    Floats<kCount> gate = *floats<kCount>(gate_up + token * 2 * ffn + column);
    const Floats<kCount> up = *floats<kCount>(gate_up + token * 2 * ffn + ffn + column);
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    *floats<kCount>(out + token * ffn + column) = gate;
  }
}

// halves[t] = x[t] * 2**-exponents[t], rounded; a block per token, width a multiple of 8
extern "C" __global__ void to_halves(int width, const float* __restrict__ x,
                                     __half* __restrict__ halves, int* __restrict__ exponents) {
  __shared__ float shared[32];
  const i64 token = blockIdx.x;
  const auto* from = floats<4>(x + token * width);
  float most = 0.0f;
  for (int i = threadIdx.x; i < width / 4; i += blockDim.x) {
    const Floats<4> some = from[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) most = fmaxf(most, fabsf(some[j]));
  }
  most = block_max(most, shared);
  const int exponent = most >= 1.0f / 64 && most < 32768.0f ? 0 : half_exponent(most);
  const float scale = exponent_of_two(-exponent);
  for (int i = threadIdx.x; i < width / 8; i += blockDim.x) {
    const Floats<4> first = from[2 * i], second = from[2 * i + 1];
    __half2 packed[4] = {__floats2half2_rn(first[0] * scale, first[1] * scale),
                         __floats2half2_rn(first[2] * scale, first[3] * scale),
                         __floats2half2_rn(second[0] * scale, second[1] * scale),
                         __floats2half2_rn(second[2] * scale, second[3] * scale)};
    reinterpret_cast<uint4*>(halves + token * width)[i] = *reinterpret_cast<uint4*>(packed);
  }
  if (threadIdx.x == 0) exponents[token] = exponent;
}

// out[t] *= 2**exponents[t]; columns [0, width) of rows of `stride`
extern "C" __global__ void rescale(int num_tokens, int width, i64 stride,
                                   const int* __restrict__ exponents, float* __restrict__ out) {
  for (i64 token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    if (exponents[token] == 0) continue;
    const float scale = exponent_of_two(exponents[token]);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[token * stride + i] *= scale;
  }
}

// out = (accumulate ? out : 0) + bias + sums * 2**exponents; columns [0, width) of rows of `stride`
template <int kCount>
__global__ void finish_product(int num_tokens, int width, int stride,
                               const float* __restrict__ sums, const int* __restrict__ exponents,
                               const float* __restrict__ bias, int accumulate,
                               float* __restrict__ out) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kCount;
  if (column >= width) return;
  Floats<kCount> offset = {};
  if (bias) offset = *floats<kCount>(bias + column);
  for (i64 token = blockIdx.y; token < num_tokens; token += gridDim.y) {
    auto* target = floats<kCount>(out + token * stride + column);
    Floats<kCount> sum = *floats<kCount>(sums + token * width + column), start = {};
    if (accumulate) start = *target;
    const float scale = exponent_of_two(exponents[token]);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] = start[j] + offset[j] + sum[j] * scale;
    *target = sum;
  }
}

__device__ __forceinline__ void store(float* at, float value) { *at = value; }

__device__ __forceinline__ void store(__half* at, float value) { *at = nearest_half(value); }

// One head of q or k by one warp: normalised where `norm` is given, then rotated, in `head`.
__device__ void load_head(const float* __restrict__ from, int length,
                          const float* __restrict__ norm, float eps,
                          const float* __restrict__ cos, const float* __restrict__ sin, int pairs,
                          bool halves, float* head) {
  const int lane = threadIdx.x % kWarp;
  float sum = 0.0f;
  for (int i = lane; i < length; i += kWarp) sum += from[i] * from[i];
  const float scale = norm ? 1.0f / sqrtf(warp_sum(sum) / length + eps) : 1.0f;
  for (int i = lane; i < length; i += kWarp) head[i] = norm ? from[i] * scale * norm[i] : from[i];
  __syncwarp();
  for (int i = lane; i < pairs; i += kWarp) {
    const int first = halves ? i : 2 * i, second = halves ? i + pairs : 2 * i + 1;
    const float a = head[first], b = head[second];
    head[first] = a * cos[i] - b * sin[i];
    head[second] = a * sin[i] + b * cos[i];
  }
  __syncwarp();
}

// q into `q`, k and v into their page: keys (kv_heads, 32, key_stride), values (kv_heads,
// value_length, 32). `stored` dimensions of a key: those past its length as zeros.
template <typename T>
__device__ __forceinline__ void rope_and_store(
    int num_heads, int num_kv_heads, int key_length, int value_length, int key_stride, int stored,
    const float* __restrict__ qkv, const float* __restrict__ q_norm,
    const float* __restrict__ k_norm, float eps, const float* __restrict__ cos,
    const float* __restrict__ sin, int pairs, int halves, int position, T* __restrict__ page_keys,
    T* __restrict__ page_values, float* __restrict__ q) {
  extern __shared__ float heads[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int num_warps = gridDim.y * (blockDim.x / kWarp), num_rotated = num_heads + num_kv_heads;
  const int first_head = blockIdx.y * (blockDim.x / kWarp) + warp, slot = position % kPage;
  const i64 token = blockIdx.x;
  const float* from = qkv + token * (num_rotated * key_length + num_kv_heads * value_length);
  float* head = heads + warp * key_length;
  for (int h = first_head; h < num_rotated; h += num_warps) {
    const bool is_key = h >= num_heads;
    load_head(from + h * key_length, key_length, is_key ? k_norm : q_norm, eps,
              cos + i64(position) * pairs, sin + i64(position) * pairs, pairs, halves, head);
    T* key = page_keys + i64((h - num_heads) * kPage + slot) * key_stride;
    float* query = q + token * num_heads * key_length + h * key_length;
    for (int i = lane; i < key_length; i += kWarp) {
      if (is_key) store(key + i, head[i]);
      else query[i] = head[i];
    }
    for (int i = key_length + lane; is_key && i < stored; i += kWarp) store(key + i, 0.0f);
    __syncwarp();
  }
  const float* value = from + num_rotated * key_length;
  T* target = page_values + slot;
  const int first = blockIdx.y * blockDim.x + threadIdx.x;
  for (int i = first; i < num_kv_heads * value_length; i += gridDim.y * blockDim.x) {
    store(target + i64(i) * kPage, value[i]);
  }
}

// gridDim.y blocks per token, a warp per head
// keys: (layers, pages, kv_heads, 32, key_stride)
// values: (layers, pages, kv_heads, value_length, 32)
template <typename T>
__global__ void rope_store(int num_heads, int num_kv_heads, int key_length, int value_length,
                           int key_stride, const float* __restrict__ qkv,
                           const float* __restrict__ q_norm, const float* __restrict__ k_norm,
                           float eps, const float* __restrict__ cos,
                           const float* __restrict__ sin, int pairs, int halves,
                           const int* __restrict__ positions, const int* __restrict__ segments,
                           const int* __restrict__ pages, int max_pages, int num_pages,
                           i64 first_page, i64 first_staged,
                           T* __restrict__ keys, T* __restrict__ values, float* __restrict__ q) {
  const int position = positions[blockIdx.x];
  const LayerPages layer{num_pages, first_page, first_staged};
  const i64 page = layer[pages[segments[blockIdx.x] * i64(max_pages) + position / kPage]];
  wait_for_others();
  rope_and_store(num_heads, num_kv_heads, key_length, value_length, key_stride, key_length, qkv,
                 q_norm, k_norm, eps, cos, sin, pairs, halves, position,
                 keys + page * num_kv_heads * kPage * key_stride,
                 values + page * num_kv_heads * value_length * kPage, q);
}

// The same for KV of 8 bits: into the page in halves, see pages.cuh.
extern "C" __global__ void rope_store_int8(
    int num_heads, int num_kv_heads, int key_length, int value_length, int key_stride,
    const float* __restrict__ qkv, const float* __restrict__ q_norm,
    const float* __restrict__ k_norm, float eps, const float* __restrict__ cos,
    const float* __restrict__ sin, int pairs, int halves, const int* __restrict__ positions,
    const int* __restrict__ segments, const Home* __restrict__ homes, i64 first_row,
    __half* open_pages, __half* new_pages, float* __restrict__ q) {
  const int position = positions[blockIdx.x];
  const Home home = homes[segments[blockIdx.x]];
  const HalfPages pages{num_kv_heads, key_stride, value_length, first_row, open_pages, new_pages};
  __half* keys = pages.keys(home, position / kPage);
  wait_for_others();
  rope_and_store(num_heads, num_kv_heads, key_length, value_length, key_stride, key_stride, qkv,
                 q_norm, k_norm, eps, cos, sin, pairs, halves, position, keys,
                 keys + pages.keys_len(), q);
}
