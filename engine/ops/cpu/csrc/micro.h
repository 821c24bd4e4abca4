// The register-blocked product under the vector linear and attention: R rows of A times P panels of 16 columns of B.
//
//              panel 0          panel 1   ...         acc[r][p][v] lives in registers; lanes run over columns.
//         +----------------+----------------+
//   k  |  | b(k, 0 .. 15)  |                |         acc = fma(broadcast a(r, k), b(k, columns), acc), k ascending
//      v  +----------------+----------------+
//   a(r,k)   R rows of accumulators, one chain of FMAs over k for each output element
//
// An element's chain is the same whatever R, P and the panel's place are: that is the row purity of everything above.
//
// B rows are float [16], or bf16 pairs [16][2] of two consecutive k. A pair is one 32-bit load: the low half, shifted
// up, is the even k as float32; the high half alone is the odd one. A bf16 weight is thus read at half the bytes, with
// a few integer operations per row of B and no shuffles. Where the CPU multiplies such pairs itself (BF16_DOT) and A is
// in bf16 pairs too, nothing is converted: one instruction a pair, two k to a link of the chain.
#pragma once

#include <utility>

#include "vec.h"

namespace cpu_ops {
namespace {

// Accumulators that fit the registers beside the operands.
constexpr int ACCUMULATORS = REGISTERS == 32 ? 24 : 12;
constexpr int MIN_PANELS = LANES == 16 ? 2 : 1;
constexpr int MAX_ROWS = ACCUMULATORS / LANES_16 / MIN_PANELS;
constexpr int MAX_PANELS = 4;

// Panels that R rows take at once, so that enough chains hide the FMA's latency.
constexpr int panels_for(int rows) {
  const int panels = ACCUMULATORS / LANES_16 / rows;
  return panels > MAX_PANELS ? MAX_PANELS : panels < 1 ? 1 : panels;
}

// Elements of a row of B.
template <class T>
constexpr int64_t B_ROW = PANEL * K_STEP<T>;

template <int R, int P>
struct Accumulators {
  Vec v[R][P][LANES_16] = {};
};

// acc += a(., k) times one row of B, `column(p, v)` being the row's vectors as float32.
template <int R, int P, class Column>
INLINE void multiply_row(Accumulators<R, P>& acc, const float* a, int64_t a_row, Column column) {
  constexpr bool ALL_PANELS_FIT = R * P * LANES_16 + P * LANES_16 + 2 <= REGISTERS;
  constexpr int AT_ONCE = ALL_PANELS_FIT ? P : 1;
#pragma GCC unroll 8
  for (int p0 = 0; p0 < P; p0 += AT_ONCE) {
    Vec columns[AT_ONCE][LANES_16];
#pragma GCC unroll 8
    for (int p = 0; p < AT_ONCE; p++)
#pragma GCC unroll 8
      for (int v = 0; v < LANES_16; v++) columns[p][v] = column(p0 + p, v);
    // Read a again for the next panels: the compiler would keep all R multipliers and spill accumulators.
    if constexpr (!ALL_PANELS_FIT) asm("" : "+r"(a));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Vec x = broadcast(a[r * a_row]);
#pragma GCC unroll 8
      for (int p = 0; p < AT_ONCE; p++)
#pragma GCC unroll 8
        for (int v = 0; v < LANES_16; v++) accumulate(acc.v[r][p0 + p][v], x, columns[p][v]);
    }
  }
}

// Rows of B in one turn of the loop. A core that two threads share decodes half as many instructions for each, too few
// for the FMA units unless nearly all of them are FMAs and their operands.
template <class T>
constexpr int TURN = REGISTERS == 32 ? 1 : 4 / K_STEP<T>;

// What is prefetched meanwhile, so that memory comes in at the pace of the arithmetic: row j of B goes with
// `panels[p] + j * row`.
template <class T>
struct Ahead {
  const T* const* panels = nullptr;  // null: nothing
  int64_t row = B_ROW<T>;
};

// f(j) for every j below n.
template <int P, class T, class F>
INLINE void in_turns(int64_t n, const Ahead<T>& ahead, F f) {
  const int64_t whole = n / TURN<T> * TURN<T>;
  for (int64_t j = 0; j < whole; j += TURN<T>) {
    if (ahead.panels != nullptr)
#pragma GCC unroll 8
      for (int i = 0; i < TURN<T> * P; i++) __builtin_prefetch(ahead.panels[i % P] + (j + i / P) * ahead.row);
    [&]<int... I>(std::integer_sequence<int, I...>) INLINED { (f(j + I), ...); }(
        std::make_integer_sequence<int, TURN<T>>{});
  }
  for (int64_t j = whole; j < n; j++) f(j);
}

// acc += A (element (r, k) at a[r * a_row + k * a_k]) times B (panel p at b[p], its rows one after the other).
template <int R, int P>
INLINE void multiply(Accumulators<R, P>& acc, const float* a, int64_t a_row, int64_t a_k, const float* const (&b)[P],
                     int64_t k, const Ahead<float>& ahead) {
  in_turns<P>(k, ahead, [&](int64_t j) INLINED {
    const auto column = [&](int p, int v) INLINED { return load(b[p] + j * B_ROW<float> + v * LANES); };
    multiply_row(acc, a + j * a_k, a_row, column);
  });
}

template <int R, int P>
INLINE void multiply(Accumulators<R, P>& acc, const float* a, int64_t a_row, int64_t a_k, const bf16* const (&b)[P],
                     int64_t k, const Ahead<bf16>& ahead) {
  const auto pair = [&](int64_t j, int p, int v) INLINED {
    UVec bits;
    memcpy(&bits, b[p] + j * B_ROW<bf16> + v * 2 * LANES, sizeof bits);
    return bits;
  };
  in_turns<P>(k / 2, ahead, [&](int64_t j) INLINED {
    multiply_row(acc, a + 2 * j * a_k, a_row, [&](int p, int v) INLINED { return even_half(pair(j, p, v)); });
    asm("" : "+r"(j));  // load the pairs again for the odd k: keeping them would spill accumulators
    multiply_row(acc, a + (2 * j + 1) * a_k, a_row, [&](int p, int v) INLINED { return odd_half(pair(j, p, v)); });
  });
}

// The same for A in bfloat16 pairs: those of (r, k) and (r, k + 1) are at a + r * a_row + k * a_k, strides in bfloat16.
template <int R, int P>
INLINE void multiply_pairs(Accumulators<R, P>& acc, const bf16* a, int64_t a_row, int64_t a_k,
                           const bf16* const (&b)[P], int64_t k, const Ahead<bf16>& ahead) {
  in_turns<P>(k / 2, ahead, [&](int64_t j) INLINED {
    UVec columns[P][LANES_16];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) memcpy(columns[p], b[p] + j * B_ROW<bf16>, sizeof columns[p]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      uint32_t pair;
      memcpy(&pair, a + r * a_row + 2 * j * a_k, sizeof pair);
      const UVec x = UVec{} + pair;
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
#pragma GCC unroll 8
        for (int v = 0; v < LANES_16; v++) accumulate_pairs(acc.v[r][p][v], x, columns[p][v]);
    }
  });
}

}  // namespace
}  // namespace cpu_ops
