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
// a few integer operations per row of B and no shuffles.
#pragma once

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

// The two bfloat16 of each 32-bit lane as float32.
INLINE Vec even_half(UVec pair) { return bit_cast<Vec>(pair << 16); }

INLINE Vec odd_half(UVec pair) {
  if constexpr (REGISTERS == 32) {
    return bit_cast<Vec>(pair & 0xffff0000u);
  } else {
    UVec high = pair >> 16;  // two shifts: a mask would hold a register, and none is free
#if defined(__x86_64__)
    asm("" : "+x"(high));  // keep the compiler from turning them into a mask
#endif
    return bit_cast<Vec>(high << 16);
  }
}

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
    asm("" : "+r"(a));
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

template <int P, class T>
INLINE void prefetch_row(const T* const* ahead, int64_t at) {
  if (ahead == nullptr) return;
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) __builtin_prefetch(ahead[p] + at);
}

// acc += A (element (r, k) at a[r * a_row + k * a_k]) times B (panel p at b[p], its rows one after the other). Unless
// ahead is null, row j also prefetches ahead[p] + j * ahead_row: memory comes in at the pace of the arithmetic.
template <int R, int P>
INLINE void multiply(Accumulators<R, P>& acc, const float* a, int64_t a_row, int64_t a_k, const float* const (&b)[P],
                     const float* const* ahead, int64_t k, int64_t ahead_row = B_ROW<float>) {
  for (int64_t j = 0; j < k; j++) {
    prefetch_row<P>(ahead, j * ahead_row);
    multiply_row(acc, a + j * a_k, a_row, [&](int p, int v) { return load(b[p] + j * B_ROW<float> + v * LANES); });
  }
}

template <int R, int P>
INLINE void multiply(Accumulators<R, P>& acc, const float* a, int64_t a_row, int64_t a_k, const bf16* const (&b)[P],
                     const bf16* const* ahead, int64_t k, int64_t ahead_row = B_ROW<bf16>) {
  const auto pair = [&](int64_t j, int p, int v) {
    UVec bits;
    memcpy(&bits, b[p] + j * B_ROW<bf16> + v * 2 * LANES, sizeof bits);
    return bits;
  };
  for (int64_t j = 0; j < k / 2; j++) {
    prefetch_row<P>(ahead, j * ahead_row);
    multiply_row(acc, a + 2 * j * a_k, a_row, [&](int p, int v) { return even_half(pair(j, p, v)); });
    int64_t again = j;
    asm("" : "+r"(again));  // load the pairs again for the odd k: keeping them would spill accumulators
    multiply_row(acc, a + (2 * j + 1) * a_k, a_row, [&](int p, int v) { return odd_half(pair(again, p, v)); });
  }
}

}  // namespace
}  // namespace cpu_ops
