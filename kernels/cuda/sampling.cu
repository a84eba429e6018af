// Next tokens: one block of 1,024 threads per row of logits. The rules and every rounding are those of
// kernels/cpu/sampling.py and selection.py. Probabilities are integers there, whose sums are the same
// in any order, and cuts are numbers that one value alone fulfils: so the choices are the same too.

struct Spec {  // kernels/choices.py, ROW
  double temperature, top_p, min_p, repetition, presence, frequency;
  u64 seed;
  i64 row_index, sample_index, position, purpose, top_k, num_logprobs;
  i64 seen_begin, seen_end, edit_begin, edit_end;
};

struct Edits {
  const int *seen_ids, *seen_counts, *ids;
  const double* values;
  const int* waves;  // times that a row's list had the id before
  int num_waves;
  float* originals;  // of the seen tokens, then of the others
  int num_seen;
};

// What of a row goes back to the host, which turns it into log-probabilities.
struct Outcome {
  i64 total;  // of the weights of all logits, in units of 2**-42
  float high, logit;
  int token, status;
};

// ---- a row ---------------------------------------------------------------------------------

// The largest of a row.
struct Most {
  float value;
  int first;  // that has it
  bool finite;  // all of the row
};

__device__ Most most_of(const float* row, int count) {
  int key = int(0x80000000), first = 0x7fffffff, magnitude = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float value = row[i];
    const int own = key_of(value);
    if (own > key) first = i;
    key = max(key, own);
    magnitude = max(magnitude, __float_as_int(value) & 0x7fffffff);
  }
  const int most = block_most(key);
  first = -block_most(key == most ? -first : -0x7fffffff);
  return {value_of(most), first, block_most(magnitude) < 0x7f800000};
}

__device__ __forceinline__ float clamped(double value) {
  const double low = -double(kHighest), high = double(kHighest);
  return __double2float_rn(value < low ? low : value > high ? high : value);
}

// Penalties, then biases and masks: float64, rounded to float32 after each.
__device__ void edit(float* row, const Spec& spec, const Edits& edits) {
  for (i64 i = spec.seen_begin + threadIdx.x; i < spec.seen_end; i += kThreads) {
    const int token = edits.seen_ids[i], times = edits.seen_counts[i];
    edits.originals[i] = row[token];
    double value = double(row[token]);
    value = value > 0.0 ? __ddiv_rn(value, spec.repetition) : __dmul_rn(value, spec.repetition);
    const double counted = __dmul_rn(spec.frequency, double(times));
    value = __dsub_rn(value, __dadd_rn(counted, times > 0 ? spec.presence : 0.0));
    row[token] = clamped(value);
  }
  for (int wave = 0; wave < edits.num_waves; ++wave) {
    __syncthreads();
    for (i64 i = spec.edit_begin + threadIdx.x; i < spec.edit_end; i += kThreads) {
      if (edits.waves[i] != wave) continue;
      const int token = edits.ids[i];
      edits.originals[edits.num_seen + i] = row[token];
      row[token] = clamped(__dadd_rn(double(row[token]), edits.values[i]));
    }
  }
  __syncthreads();
}

__device__ void undo(float* row, const Spec& spec, const Edits& edits) {
  for (int wave = edits.num_waves - 1; wave >= 0; --wave) {
    __syncthreads();
    for (i64 i = spec.edit_begin + threadIdx.x; i < spec.edit_end; i += kThreads) {
      if (edits.waves[i] == wave) row[edits.ids[i]] = edits.originals[edits.num_seen + i];
    }
  }
  __syncthreads();
  for (i64 i = spec.seen_begin + threadIdx.x; i < spec.seen_end; i += kThreads) {
    row[edits.seen_ids[i]] = edits.originals[i];
  }
  __syncthreads();
}

// The row's own random integer in [0, total): Philox4x32-10, scaled by a wide product.
__device__ i64 uniform_below(i64 total, const Spec& spec) {
  const u64 index = u64(spec.row_index);
  u32 c0 = u32(index), c1 = u32(spec.sample_index), c2 = u32(spec.position);
  u32 c3 = u32(index >> 32 << 8) | u32(spec.purpose);
  u32 k0 = u32(spec.seed), k1 = u32(spec.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 a = u64(0xD2511F53u) * c0, b = u64(0xCD9E8D57u) * c2;
    c0 = u32(b >> 32) ^ c1 ^ k0;
    c1 = u32(b);
    c2 = u32(a >> 32) ^ c3 ^ k1;
    c3 = u32(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return i64(__umul64hi(u64(c1) << 32 | c0, u64(total)));
}

// What top_p and min_p keep: weights above `floor`, and the first `num_equal` equal ones.
struct Cut {
  i64 floor, num_equal;
};

__device__ Cut cut_of(const Weights& weights, i64 total, const Spec& spec) {
  Cut cut = {0, weights.count};
  if (spec.top_p < 1.0) {
    const i64 wanted = i64(ceil(__dmul_rn(spec.top_p, double(total))));
    const i64 target = min(max(wanted, i64(1)), total);
    i64 above;
    const ByWeight items{weights.stored};
    cut.floor = search(items, weights.count, i64(1), kOneWeight + 1, target, above);
    cut.num_equal = (target - above + cut.floor - 1) / cut.floor;
  }
  const i64 least = i64(ceil(__dmul_rn(spec.min_p, double(kOneWeight))));
  if (least > cut.floor) cut = {least, weights.count};
  return cut;
}

// The position whose weight covers the row's random number, of those that are kept in order.
__device__ int draw_position(const Weights& weights, const Cut& cut, const Spec& spec) {
  __shared__ int found;
  const Range range(weights.count);
  const int lane = threadIdx.x % kWarp;
  i64 greater = 0, equal = 0, num_equal, total;
  for (int i = range.begin + lane; i < range.end; i += kWarp) {
    const i64 weight = weights[i];
    greater += weight > cut.floor ? weight : 0;
    equal += weight == cut.floor;
  }
  equal = warp_total(equal);
  i64 equal_before = before_warp(equal, num_equal);
  const i64 num_kept = min(max(cut.num_equal - equal_before, i64(0)), equal);
  const i64 own = warp_total(greater) + num_kept * cut.floor;
  const i64 before = before_warp(own, total);
  i64 rest = uniform_below(total, spec) - before;
  const bool is_here = rest >= 0 && rest < own;
  for (int base = range.begin; base < range.end && is_here; base += kWarp) {
    const int i = base + lane;
    const i64 weight = i < range.end ? weights[i] : -1;
    const u32 equals = __ballot_sync(~0u, weight == cut.floor);
    const bool keeps = weight > cut.floor ||
                       (weight == cut.floor &&
                        equal_before + __popc(equals & ((1u << lane) - 1)) < cut.num_equal);
    i64 sum = keeps ? weight : 0;
    for (int step = 1; step < kWarp; step *= 2) {
      const i64 other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    const u32 covers = __ballot_sync(~0u, sum > rest);
    if (covers) {
      if (lane == 0) found = base + __ffs(covers) - 1;
      break;
    }
    rest -= __shfl_sync(~0u, sum, kWarp - 1);
    equal_before += __popc(equals);
  }
  __syncthreads();
  return found;
}

// Room of a row: for what top_k keeps, and for weights that are searched; null where not needed.
struct Room {
  float* values;
  int* ids;
  i64* weights;
};

__device__ int draw(const float* row, int count, float high, const Spec& spec, const Room& room) {
  const bool gathered = 0 < spec.top_k && spec.top_k < count;
  const double inverse = __ddiv_rn(1.0, spec.temperature);
  Weights weights{row, count, double(high), inverse < 1e300 ? inverse : 1e300, room.weights};
  if (gathered) {
    weights.count = int(spec.top_k);
    weights.values = room.values;
    keep_top(row, count, weights.count, high, room.values, room.ids);
  }
  Cut cut = {0, count};
  if (room.weights) cut = cut_of(weights, weigh(weights), spec);
  const int position = draw_position(weights, cut, spec);
  return gathered ? room.ids[position] : position;
}

// outcomes[i], and of rows with log-probabilities the 20 most likely at most, in order of id. Rows
// are edited in place, and put back. rooms: (num_rows, 2), where the row's values and ids, and its
// weights, begin in `values` and `ids`, and in `weights`; -1 where it needs none.
extern "C" __global__ void __launch_bounds__(kThreads)
    choose_rows(int num_tokens, i64 stride, float* logits, const Spec* __restrict__ specs,
                const int* seen_ids, const int* seen_counts,
                const int* edit_ids, const double* edit_values, const int* waves, int num_waves,
                float* originals, int num_seen, const i64* __restrict__ rooms, float* values,
                int* ids, i64* weights, Outcome* __restrict__ outcomes, int* top_ids,
                float* top_values) {
  const Edits edits{seen_ids, seen_counts, edit_ids, edit_values, waves,
                    num_waves, originals,  num_seen};
  const Spec spec = specs[blockIdx.x];
  float* row = logits + blockIdx.x * stride;
  const i64 gathered_at = rooms[2 * blockIdx.x], weights_at = rooms[2 * blockIdx.x + 1];
  const Room room{values + gathered_at, ids + gathered_at,
                  weights_at < 0 ? nullptr : weights + weights_at};
  Outcome outcome = {};
  Most most = most_of(row, num_tokens);
  outcome.high = most.value;
  outcome.status = most.finite ? kOk : kNotFinite;
  if (most.finite && spec.num_logprobs >= 0) {
    outcome.total = weigh(Weights{row, num_tokens, double(outcome.high), 1.0, nullptr});
  }
  if (most.finite && spec.num_logprobs > 0) {
    const int at = blockIdx.x * kMostLogprobs;
    keep_top(row, num_tokens, min(int(spec.num_logprobs), num_tokens), outcome.high,
             top_values + at, top_ids + at);
  }
  if (most.finite) {
    const bool edited = spec.seen_begin < spec.seen_end || spec.edit_begin < spec.edit_end;
    if (edited) {
      edit(row, spec, edits);
      most = most_of(row, num_tokens);
    }
    if (most.value == -kHighest) outcome.status = kAllMasked;
    else if (spec.temperature == 0.0) outcome.token = most.first;
    else outcome.token = draw(row, num_tokens, most.value, spec, room);
    if (edited) undo(row, spec, edits);
    outcome.logit = row[outcome.token];
  }
  if (threadIdx.x == 0) outcomes[blockIdx.x] = outcome;
}
