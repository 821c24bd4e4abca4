// The AMX linear: gemm.h's loops around amx.h's tile product. A packed panel is B tiles as they lie.
#include "amx.h"
#include "gemm.h"

namespace cpu_ops {
namespace {

// A strip of up to 32 rows is [k / 32][1 or 2 tiles][16][32] bf16: every tile one contiguous KiB, missing rows zero.
struct AmxKernel {
  using T = bf16;
  using A = bf16;
  using Session = TileSession;
  static constexpr int STRIP_ROWS = 2 * TILE_ROWS;
  static constexpr bool EVEN_STRIPS = false;  // full tiles first: a tile costs the same with fewer rows
  static constexpr int64_t BLOCK_ROWS = 8 * STRIP_ROWS;
  static constexpr int64_t K_CHAIN = 512;  // C is stored and loaded between chains, exactly: not part of the order
  static constexpr int64_t A_BYTES = 1 << 20;

  static bool better_halved(int64_t) { return false; }
  static int64_t a_size(int64_t rows, int64_t k) { return rows * k; }
  static int64_t panels_together(int strip_rows) { return strip_rows > TILE_ROWS ? 2 : 4; }

  static void pack(const T* x, int64_t x_stride, int rows, const LinearShape& shape, A* a) {
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t leaf_steps = shape.leaf_k_padded / TILE_K;
    for (int64_t step = 0; step < shape.leaves * leaf_steps; step++) {
      const int64_t leaf = step / leaf_steps, in_leaf = step % leaf_steps * TILE_K;
      const int64_t width = std::min<int64_t>(TILE_K, shape.leaf_k - in_leaf);
      for (int row = 0; row < tiles * TILE_ROWS; row++) {
        A* const to = a + (step * tiles * TILE_ROWS + row) * TILE_K;
        const int64_t filled = row < rows ? width : 0;
        if (filled > 0) memcpy(to, x + row * x_stride + leaf * shape.leaf_k + in_leaf, filled * sizeof(A));
        std::fill(to + filled, to + TILE_K, A{});
      }
    }
  }

  static void multiply(const A* a, int rows, int64_t a_k, const T* b, int64_t b_panel, int panels, int64_t k,
                       const Sums& sums, int64_t, int64_t) {
    if (rows > TILE_ROWS)
      multiply_tiles<2>(a + a_k * 2 * TILE_ROWS, b, b_panel, panels, k / TILE_K, sums);
    else
      multiply_tiles<1>(a + a_k * TILE_ROWS, b, b_panel, panels, k / TILE_K, sums);
    if (sums.merges > 0) add_subtrees(sums, rows, panels);
  }

  template <int R>
  static void multiply_tiles(const A* a, const T* b, int64_t b_panel, int panels, int64_t steps, const Sums& sums) {
    with_constant<4 / R>(panels, [&](auto p) {
      constexpr int P = p;
      const T* tiles[P];
      for (int i = 0; i < P; i++) tiles[i] = b + i * b_panel;
      tile_product<R, P>(a, tiles, steps, sums.at, PANEL, sums.panel, !sums.more);
    });
  }

  static void add_subtrees(const Sums& sums, int rows, int panels) {
    for (int p = 0; p < panels; p++)
      for (int64_t i = 0; i < rows * PANEL; i += LANES) {
        float* at = sums.at + p * sums.panel + i;
        Vec sum = load(at);
        for (int merge = 0; merge < sums.merges; merge++) sum = load(at -= sums.slot) + sum;
        store(at, sum);
      }
  }
};

}  // namespace

template <class Y>
void linear_amx(const bf16* x, const bf16* packed, const float* bias, const LinearShape& shape, Y* y, int threads) {
  Linear<AmxKernel, Y>(x, packed, bias, shape, y, threads).run();
}

template void linear_amx(const bf16*, const bf16*, const float*, const LinearShape&, bf16*, int);
template void linear_amx(const bf16*, const bf16*, const float*, const LinearShape&, float*, int);

}  // namespace cpu_ops
