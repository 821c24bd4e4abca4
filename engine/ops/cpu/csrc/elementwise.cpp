// Embedding, RMSNorm, SiLU * up, and RoPE with the KV store. Rows are independent; a row's sum has one order.
#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vec.h"

namespace cpu_ops {
namespace {

// f(row) over rows of `row_size` elements: on one thread where waking others would cost more than it saves, and in
// tasks of some thousand elements where not.
template <class F>
void for_rows(int threads, int64_t rows, int64_t row_size, const F& f) {
  constexpr int64_t PARALLEL_FROM = 1 << 15, TASK = 1 << 13;
  parallel_for(rows * row_size < PARALLEL_FROM ? 1 : threads, rows, std::max<int64_t>(1, TASK / row_size), f);
}

// 1 / sqrt(mean of squares + eps): squares summed in 16 lanes, then in reduce_add's tree.
template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
  Vec sum[LANES_16] = {};
  for (int64_t i = 0; i < n; i += 16)
    for (int v = 0; v < LANES_16; v++) {
      const int64_t at = i + v * LANES, count = std::clamp<int64_t>(n - at, 0, LANES);
      const Vec value = load(x + at, static_cast<int>(count));
      sum[v] = fma(value, value, sum[v]);
    }
  return 1.0f / std::sqrt(reduce_add(sum) / static_cast<float>(n) + eps);
}

template <class T>
void norm_row(const T* x, int64_t n, const T* weight, float eps, T* out) {
  const float scale = inverse_rms(x, n, eps);
  for_lanes(n,
            [&](int64_t i, int count) { store(out + i, load(x + i, count) * scale * load(weight + i, count), count); });
}

}  // namespace

template <class T>
void rms_norm(const T* x, const Rows& rows, const T* weight, float eps, T* out, int threads) {
  for_rows(threads, rows.outer * rows.inner, rows.n, [&](int64_t row) {
    norm_row(x + row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride, rows.n, weight, eps,
             out + row * rows.n);
  });
}

template <class T>
void add_rms_norm(const T* x, const T* residual, int64_t m, int64_t n, const T* weight, float eps, T* out, T* sum,
                  int threads) {
  for_rows(threads, m, n, [&](int64_t row) {
    for_lanes(n, [&](int64_t i, int count) {
      const int64_t at = row * n + i;
      store(sum + at, load(residual + at, count) + load(x + at, count), count);
    });
    norm_row(sum + row * n, n, weight, eps, out + row * n);
  });
}

template <class T>
void silu_mul(const T* gate_up, int64_t m, int64_t n, T* out, int threads) {
  constexpr int64_t CHUNK = 4096;  // one row may be long enough for several threads
  const int64_t chunks = (n + CHUNK - 1) / CHUNK;
  for_rows(threads, m * chunks, 2 * std::min(n, CHUNK), [&](int64_t part) {
    const int64_t row = part / chunks, first = part % chunks * CHUNK;
    const T* const gate = gate_up + row * 2 * n + first;
    T* const to = out + row * n + first;
    for_lanes(std::min(CHUNK, n - first), [&](int64_t i, int count) {
      const Vec g = load(gate + i, count);
      store(to + i, g / (exp(-g) + 1.0f) * load(gate + n + i, count), count);
    });
  });
}

void gather_rows(const void* table, const int64_t* ids, int64_t m, int64_t row_bytes, void* out, int threads) {
  for_rows(threads, m, row_bytes / 2, [&](int64_t row) {
    memcpy(static_cast<char*>(out) + row * row_bytes, static_cast<const char*>(table) + ids[row] * row_bytes,
           row_bytes);
  });
}

namespace {

// Halves layout (a, b) to (a cos - b sin, b cos + a sin); cos then sin, head_dim / 2 each.
template <class T>
void rotate(const T* x, const float* rope, int64_t head_dim, T* out) {
  const int64_t half = head_dim / 2;
  for_lanes(half, [&](int64_t i, int count) {
    const Vec a = load(x + i, count), b = load(x + half + i, count);
    const Vec cosine = load(rope + i, count), sine = load(rope + half + i, count);
    store(out + i, a * cosine - b * sine, count);
    store(out + half + i, b * cosine + a * sine, count);
  });
}

}  // namespace

template <class T>
void rope_and_store(const T* q, const HeadRows& q_rows, const T* k, const HeadRows& k_rows, const T* v,
                    const HeadRows& v_rows, int64_t m, const float* rope, const int64_t* positions,
                    const int64_t* slots, T* kv, const KvLayout& layout, T* q_out, int threads) {
  constexpr int STEP = K_STEP<T>;
  const int64_t head_dim = layout.head_dim, block_keys = layout.tiles_per_block * PANEL;
  for_rows(threads, m, (q_rows.heads + 2 * k_rows.heads) * head_dim, [&](int64_t row) {
    const float* const angles = rope + positions[row] * head_dim;
    for (int64_t head = 0; head < q_rows.heads; head++)
      rotate(q + row * q_rows.row_stride + head * q_rows.head_stride, angles, head_dim,
             q_out + (row * q_rows.heads + head) * head_dim);
    if (slots[row] < 0) return;
    const int64_t in_block = slots[row] % block_keys, key = in_block % PANEL;
    for (int64_t head = 0; head < k_rows.heads; head++) {
      T* const k_tile = kv + slots[row] / block_keys * layout.block_size() + head * layout.head_size() +
                        in_block / PANEL * layout.tile_size();
      T* const v_tile = k_tile + layout.value_offset();
      T rotated[MAX_HEAD_DIM];
      rotate(k + row * k_rows.row_stride + head * k_rows.head_stride, angles, head_dim, rotated);
      std::fill(rotated + head_dim, rotated + layout.k_dim, T{});
      for (int64_t d = 0; d < layout.k_dim; d++) k_tile[(d / STEP * PANEL + key) * STEP + d % STEP] = rotated[d];
      const T* const values = v + row * v_rows.row_stride + head * v_rows.head_stride;
      for (int64_t d = 0; d < head_dim; d++)
        v_tile[d / PANEL * PANEL * PANEL + (key / STEP * PANEL + d % PANEL) * STEP + key % STEP] = values[d];
    }
  });
}

#define INSTANTIATE(T)                                                                                          \
  template void rms_norm(const T*, const Rows&, const T*, float, T*, int);                                      \
  template void add_rms_norm(const T*, const T*, int64_t, int64_t, const T*, float, T*, T*, int);               \
  template void silu_mul(const T*, int64_t, int64_t, T*, int);                                                  \
  template void rope_and_store(const T*, const HeadRows&, const T*, const HeadRows&, const T*, const HeadRows&, \
                               int64_t, const float*, const int64_t*, const int64_t*, T*, const KvLayout&, T*, int);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace cpu_ops
