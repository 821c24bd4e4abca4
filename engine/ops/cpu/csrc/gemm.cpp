// The vector linear: weights packed in panels, activations in strips, micro.h in between.
#include "gemm.h"

#include "micro.h"

namespace cpu_ops {
namespace {

// A strip of R rows is [k][R] float32, so that a step of k reads its R multipliers from one place; where bfloat16 pairs
// are multiplied as they are, [k / 2][R][2] bf16.
template <class Element>
struct VectorKernel {
  using T = Element;
  using A = Multiplier<T>;
  static constexpr bool PAIRS = std::is_same_v<A, bf16>;
  struct Session {};
  static constexpr int STRIP_ROWS = MAX_ROWS;
  static constexpr bool EVEN_STRIPS = true;  // 7 rows as 4 + 3: no strip with too few chains
  static constexpr int64_t BLOCK_ROWS = 240;
  static constexpr int64_t K_CHAIN = 128;
  static constexpr int64_t A_BYTES = 1 << 18;

  // Rows that leave registers for one panel alone read it slower than memory gives it; half of them take several panels
  // at once, and the other half finds those in L1. Not bfloat16: its conversions would be made twice.
  static bool better_halved(int64_t rows) {
    return std::is_same_v<T, float> && rows > 1 && rows <= MAX_ROWS && panels_for(static_cast<int>(rows)) == 1;
  }

  static int64_t a_size(int64_t rows, int64_t k) { return rows * k; }
  static int64_t panels_together(int strip_rows) { return panels_for(strip_rows); }

  static void pack(const T* x, int64_t x_stride, int rows, const LinearShape& shape, A* a) {
    with_constant<MAX_ROWS>(rows, [&](auto r) {
      constexpr int R = r;
      for (int64_t leaf = 0; leaf < shape.leaves; leaf++) {
        const T* const from = x + leaf * shape.leaf_k;
        A* const to = a + leaf * shape.leaf_k_padded * R;
        if constexpr (PAIRS) {
          for (int64_t i = 0; i + 1 < shape.leaf_k; i += 2)
#pragma GCC unroll 16
            for (int row = 0; row < R; row++) memcpy(to + i * R + row * 2, from + row * x_stride + i, 2 * sizeof(A));
          if (const int64_t last = shape.leaf_k - 1; last % 2 == 0)
            for (int row = 0; row < R; row++) {
              to[last * R + row * 2] = from[row * x_stride + last];
              to[last * R + row * 2 + 1] = A{};
            }
        } else {
          for (int64_t i = 0; i < shape.leaf_k; i++)
#pragma GCC unroll 16
            for (int row = 0; row < R; row++) to[i * R + row] = to_float(from[row * x_stride + i]);
          std::fill(to + shape.leaf_k * R, to + shape.leaf_k_padded * R, 0.0f);
        }
      }
    });
  }

  static void multiply(const A* a, int rows, int64_t a_k, const T* b, int64_t b_panel, int panels, int64_t k,
                       const Sums& sums, int64_t strip, int64_t strips) {
    with_constant<MAX_ROWS>(rows, [&](auto r) {
      constexpr int R = r, P = panels_for(R);
      int p = 0;
      for (; p + P <= panels; p += P)
        chain<R, P>(a + a_k * R, b + p * b_panel, b_panel, k, sums, sums.at + p * sums.panel, strip, strips);
      for (; p < panels; p++)
        chain<R, 1>(a + a_k * R, b + p * b_panel, b_panel, k, sums, sums.at + p * sums.panel, strip, strips);
    });
  }

  // The weight's next chunk is prefetched meanwhile, a share of it by each strip: were it the first strip's alone,
  // memory would idle while the others compute. One strip that takes several panels at once does without: they are as
  // many streams, which the hardware follows fast enough.
  template <int R, int P>
  static __attribute__((noinline)) void chain(const A* a, const T* b, int64_t b_panel, int64_t k, const Sums& sums,
                                              float* at, int64_t strip, int64_t strips) {
    const int64_t share = k / K_STEP<T> * strip / strips;
    const T *panels[P], *ahead[P];
    for (int p = 0; p < P; p++) {
      panels[p] = b + p * b_panel;
      ahead[p] = panels[p] + K_CHAIN * PANEL + share * B_ROW<T>;
    }
    Accumulators<R, P> acc;
    const bool foreseen = P > 1 && strips == 1;
    const Ahead<T> next{foreseen ? nullptr : ahead, (B_ROW<T> + strips - 1) / strips};
    if constexpr (PAIRS)
      multiply_pairs<R, P>(acc, a, 2, R, panels, k, next);
    else
      cpu_ops::multiply<R, P>(acc, a, 1, R, panels, k, next);
    const auto each = [&](auto f) INLINED {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++)
#pragma GCC unroll 8
          for (int v = 0; v < LANES_16; v++) f(at + p * sums.panel + r * PANEL + v * LANES, acc.v[r][p][v]);
    };
    const auto add = [](const float* from, Vec& sum) INLINED { sum = load(from) + sum; };
    if (sums.more) each(add);
    for (int merge = 0; merge < sums.merges; merge++) {
      at -= sums.slot;
      each(add);
    }
    each([](float* to, Vec& sum) INLINED { store(to, sum); });
  }
};

}  // namespace

template <class T>
void pack_linear(const T* weight, const LinearShape& shape, T* packed, int threads) {
  constexpr int STEP = K_STEP<T>;
  const int64_t panels = (shape.n + PANEL - 1) / PANEL, k = shape.leaves * shape.leaf_k;
  parallel_for(threads, panels, 1, [&](int64_t panel) {
    for (int64_t leaf = 0; leaf < shape.leaves; leaf++) {
      T* const to = packed + (panel * shape.leaves + leaf) * shape.leaf_k_padded * PANEL;
      std::fill(to, to + shape.leaf_k_padded * PANEL, T{});
      for (int64_t j = 0; j < std::min<int64_t>(PANEL, shape.n - panel * PANEL); j++) {
        const T* const from = weight + (panel * PANEL + j) * k + leaf * shape.leaf_k;
        for (int64_t i = 0; i < shape.leaf_k; i++) to[(i / STEP * PANEL + j) * STEP + i % STEP] = from[i];
      }
    }
  });
}

template <class T, class Y>
void linear_vector(const T* x, const T* packed, const float* bias, const LinearShape& shape, Y* y, int threads) {
  Linear<VectorKernel<T>, Y>(x, packed, bias, shape, y, threads).run();
}

template void pack_linear(const float*, const LinearShape&, float*, int);
template void pack_linear(const bf16*, const LinearShape&, bf16*, int);
template void linear_vector(const float*, const float*, const float*, const LinearShape&, float*, int);
template void linear_vector(const bf16*, const bf16*, const float*, const LinearShape&, bf16*, int);
template void linear_vector(const bf16*, const bf16*, const float*, const LinearShape&, float*, int);

}  // namespace cpu_ops
