// AMX attention in bf16: attention.h's loops around amx.h's tile product.
//
// Scores: a K tile is B tiles as it lies. Values: two V tiles of 16 keys are copied into B tiles of 32, so that a
// product has its full depth, and probabilities are rounded to bf16 (their sum is not).
#include "amx.h"
#include "attention.h"

namespace cpu_ops {
namespace {

class AmxProducts {
 public:
  using T = bf16;
  static constexpr int ITEM_ROWS = 2 * TILE_ROWS, ITEM_HEADS = 1;

  explicit AmxProducts(const KvLayout& layout) : head_dim_(layout.head_dim), k_dim_(layout.k_dim) {
    static thread_local Scratch memory;
    queries_ = memory.get<bf16>(ITEM_ROWS * k_dim_ + ITEM_ROWS * STEP_KEYS + STEP_KEYS * head_dim_);
    probabilities_ = queries_ + ITEM_ROWS * k_dim_;
    values_ = probabilities_ + ITEM_ROWS * STEP_KEYS;
  }

  // A tiles [k_dim / 32][1 or 2][16][32]; rows that are missing are zero.
  template <class F>
  void load_queries(int64_t /*head*/, int64_t rows, F query) {
    row_tiles_ = (rows + TILE_ROWS - 1) / TILE_ROWS;
    std::fill(queries_, queries_ + ITEM_ROWS * k_dim_, bf16{});
    for (int64_t row = 0; row < rows; row++)
      for (int64_t d = 0; d < head_dim_; d += PANEL)
        memcpy(queries_ + (d / TILE_K * row_tiles_ * TILE_ROWS + row) * TILE_K + d % TILE_K, query(row) + d,
               PANEL * sizeof(bf16));
  }

  void scores(int64_t /*head*/, const bf16* const* k_tiles, const bf16* const* v_tiles, int tiles, float* out) const {
    const int64_t steps = k_dim_ / TILE_K;
    const auto columns = [&](auto r, auto p, int tile) {
      constexpr int P = p;
      const bf16* b[P];
      for (int i = 0; i < P; i++) {
        b[i] = k_tiles[tile + i];
        prefetch(v_tiles[tile + i], head_dim_);
      }
      tile_product<r, P>(queries_, b, steps, out + tile * PANEL, STEP_KEYS, PANEL, true);
    };
    for_each_group(tiles, columns);
  }

  void values(const bf16* const* v_tiles, const bf16* const* next_tiles, int tiles, const float* p, float* out) {
    const int steps = (tiles + 1) / 2;
    for (int i = 0; i < tiles; i++) prefetch(next_tiles[i], k_dim_);
    for (int i = 0; i < 2 * steps; i++)  // values_: [head_dim / 16][STEP_KEYS / 32] B tiles
      for (int64_t panel = 0; panel < head_dim_ / PANEL; panel++) {
        bf16* const to = values_ + (panel * (STEP_TILES / 2) + i / 2) * TILE + i % 2 * (TILE / 2);
        if (i < tiles)
          memcpy(to, v_tiles[i] + panel * (TILE / 2), TILE / 2 * sizeof(bf16));
        else
          std::fill(to, to + TILE / 2, bf16{});
      }
    for (int step = 0; step < steps; step++)
      for (int64_t row = 0; row < row_tiles_ * TILE_ROWS; row++)
        for (int i = 0; i < TILE_K; i += LANES) {
          const int key = step * TILE_K + i;
          store(probabilities_ + (step * row_tiles_ * TILE_ROWS + row) * TILE_K + i,
                key < tiles * PANEL ? load(p + row * STEP_KEYS + key) : Vec{});
        }
    for_each_group(static_cast<int>(head_dim_ / PANEL), [&](auto r, auto p, int panel) {
      constexpr int P = p;
      const bf16* b[P];
      for (int i = 0; i < P; i++) b[i] = values_ + (panel + i) * (STEP_TILES / 2) * TILE;
      tile_product<r, P>(probabilities_, b, steps, out + panel * PANEL, head_dim_, PANEL, true);
    });
  }

 private:
  // f(row tiles, columns, first column) over `count` columns of tiles, as many at once as the registers hold.
  template <class F>
  void for_each_group(int count, F f) const {
    with_constant<2>(static_cast<int>(row_tiles_), [&](auto r) {
      constexpr int MOST = 4 / r;
      for (int first = 0; first < count; first += MOST)
        with_constant<MOST>(std::min(MOST, count - first), [&](auto p) { f(r, p, first); });
    });
  }

  static void prefetch(const bf16* tile, int64_t depth) {
    for (int64_t i = 0; i < depth * PANEL; i += TILE_K) __builtin_prefetch(tile + i);
  }

  TileSession session_;
  int64_t head_dim_, k_dim_, row_tiles_ = 0;
  bf16 *queries_, *probabilities_, *values_;
};

}  // namespace

void attention_amx(const bf16* q, const bf16* kv, const KvLayout& layout, const AttentionBatch& batch, bf16* out,
                   int threads) {
  Attention<AmxProducts>(q, kv, layout, batch, out, threads).run();
}

}  // namespace cpu_ops
