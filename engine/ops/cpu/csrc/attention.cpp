// Vector attention: both products are micro.h's, K and V tiles are its B operand as they lie. Where bfloat16 pairs are
// multiplied as they are, probabilities are rounded to bfloat16 (their sum is not).
#include "attention.h"

#include "micro.h"

namespace cpu_ops {
namespace {

template <class Element>
class VectorProducts {
 public:
  using T = Element;
  using A = Multiplier<T>;
  static constexpr bool PAIRS = std::is_same_v<A, bf16>;
  static constexpr int ITEM_ROWS = 4 * MAX_ROWS, ITEM_HEADS = ITEM_ROWS;

  explicit VectorProducts(const KvLayout& layout) : head_dim_(layout.head_dim) {
    static thread_local Scratch memory;
    queries_ = memory.get<A>(ITEM_ROWS * (head_dim_ + STEP_KEYS));
    probabilities_ = queries_ + ITEM_ROWS * head_dim_;
  }

  // Strips of R rows as [d][R] float32, or [d / 2][R][2] bf16; the rows split evenly over the strips. Heads one after
  // the other.
  template <class F>
  void load_queries(int64_t head, int64_t rows, F query) {
    rows_ = rows;
    strips_ = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t strip = 0; strip < strips_; strip++) {
      const int64_t first = first_row(strip), count = first_row(strip + 1) - first;
      A* const to = queries_ + (head * rows + first) * head_dim_;
      for (int64_t row = 0; row < count; row++) {
        const T* const from = query(first + row);
        if constexpr (PAIRS) {
          for (int64_t d = 0; d < head_dim_; d += 2) memcpy(to + d * count + 2 * row, from + d, 2 * sizeof(A));
        } else {
          for (int64_t d = 0; d < head_dim_; d += LANES) {
            float lanes[LANES];
            store(lanes, load(from + d));
            for (int lane = 0; lane < LANES; lane++) to[(d + lane) * count + row] = lanes[lane];
          }
        }
      }
    }
  }

  void scores(int64_t head, const T* const* k_tiles, const T* const* v_tiles, int tiles, float* out) const {
    const A* const queries = queries_ + head * rows_ * head_dim_;
    for (int tile = 0; tile < tiles; tile += MAX_PANELS) {  // a few tiles stay in L1 while the strips pass
      for_each_strip([&](auto r, int64_t first) {
        constexpr int R = r, P = panels_for(R);
        int t = tile;
        const int end = std::min(tile + MAX_PANELS, tiles);
        for (; t + P <= end; t += P) score_tiles<R, P>(queries, first, k_tiles + t, v_tiles + t, out + t * PANEL);
        for (; t < end; t++) score_tiles<R, 1>(queries, first, k_tiles + t, v_tiles + t, out + t * PANEL);
      });
    }
  }

  void values(const T* const* v_tiles, const T* const* next_tiles, int tiles, const float* p, float* out) const {
    if constexpr (PAIRS)
      for (int64_t row = 0; row < rows_; row++)
        for (int64_t key = 0; key < tiles * PANEL; key += LANES)
          store(probabilities_ + row * STEP_KEYS + key, load(p + row * STEP_KEYS + key));
    for (int64_t column = 0; column < head_dim_; column += MAX_PANELS * PANEL) {
      for_each_strip([&](auto r, int64_t first) {
        constexpr int R = r, P = panels_for(R);
        int64_t d = column;
        const int64_t end = std::min(column + MAX_PANELS * PANEL, head_dim_);
        for (; d + P * PANEL <= end; d += P * PANEL) value_columns<R, P>(first, v_tiles, next_tiles, tiles, p, d, out);
        for (; d < end; d += PANEL) value_columns<R, 1>(first, v_tiles, next_tiles, tiles, p, d, out);
      });
    }
  }

 private:
  int64_t first_row(int64_t strip) const { return strip * rows_ / strips_; }

  template <class F>
  void for_each_strip(F f) const {
    for (int64_t strip = 0; strip < strips_; strip++) {
      const int64_t first = first_row(strip);
      with_constant<MAX_ROWS>(static_cast<int>(first_row(strip + 1) - first), [&](auto r) { f(r, first); });
    }
  }

  // R rows times P tiles of 16 keys: the sum runs over d.
  template <int R, int P>
  __attribute__((noinline)) void score_tiles(const A* queries, int64_t first, const T* const* k_tiles,
                                             const T* const* v_tiles, float* out) const {
    const T *b[P], *ahead[P];
    std::copy(k_tiles, k_tiles + P, b);
    std::copy(v_tiles, v_tiles + P, ahead);
    Accumulators<R, P> acc;
    if constexpr (PAIRS)
      multiply_pairs<R, P>(acc, queries + first * head_dim_, 2, R, b, head_dim_, {ahead});
    else
      multiply<R, P>(acc, queries + first * head_dim_, 1, R, b, head_dim_, {ahead});
    write<R, P>(acc, out + first * STEP_KEYS, STEP_KEYS);
  }

  // R rows times P * 16 columns of V: the sum runs over the step's keys, tile after tile.
  template <int R, int P>
  __attribute__((noinline)) void value_columns(int64_t first, const T* const* v_tiles, const T* const* next_tiles,
                                               int tiles, const float* p, int64_t d, float* out) const {
    Accumulators<R, P> acc;
    for (int tile = 0; tile < tiles; tile++) {
      const T *b[P], *ahead[P];
      for (int i = 0; i < P; i++) {
        b[i] = v_tiles[tile] + (d + i * PANEL) * PANEL;
        ahead[i] = next_tiles[tile] + (d + i * PANEL) * PANEL;
      }
      const int64_t at = first * STEP_KEYS + tile * PANEL;
      if constexpr (PAIRS)
        multiply_pairs<R, P>(acc, probabilities_ + at, STEP_KEYS, 1, b, PANEL, {ahead});
      else
        multiply<R, P>(acc, p + at, STEP_KEYS, 1, b, PANEL, {ahead});
    }
    write<R, P>(acc, out + first * head_dim_ + d, head_dim_);
  }

  template <int R, int P>
  static INLINE void write(const Accumulators<R, P>& acc, float* out, int64_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
#pragma GCC unroll 8
        for (int v = 0; v < LANES_16; v++) store(out + r * stride + p * PANEL + v * LANES, acc.v[r][p][v]);
  }

  int64_t head_dim_, rows_ = 0, strips_ = 0;
  A *queries_, *probabilities_;
};

}  // namespace

template <class T>
void attention_vector(const T* q, const T* kv, const KvLayout& layout, const AttentionBatch& batch, T* out,
                      int threads) {
  Attention<VectorProducts<T>>(q, kv, layout, batch, out, threads).run();
}

template void attention_vector(const float*, const float*, const KvLayout&, const AttentionBatch&, float*, int);
template void attention_vector(const bf16*, const bf16*, const KvLayout&, const AttentionBatch&, bf16*, int);

}  // namespace cpu_ops
