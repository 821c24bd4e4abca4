// AMX tiles: eight registers of 16 rows x 64 bytes, one instruction that multiplies bf16 tiles into float32, and the
// register-blocked product that the AMX linear and attention share.
//
//   C (16 x 16 float) += A (16 x 32 bf16) * B (16 pairs of k x 16 columns x 2)
//
// With EMULATE_AMX the instructions are plain C++ with TDPBF16PS' documented arithmetic (Intel SDM volume 2): even and
// odd k sum apart from zero, with FMAs; the two sums add; their total is added to C. Round to nearest even, denormals
// flushed on input and output, whatever MXCSR says. So layouts and masks can be tested on any machine.
//
// A tile product never mixes rows of A, and a row's arithmetic does not depend on its place: row purity.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "vec.h"

namespace cpu_ops {
namespace {

constexpr int TILE_ROWS = 16;
constexpr int TILE_K = 32;                    // k of one tile product
constexpr int64_t TILE = TILE_ROWS * TILE_K;  // bf16 elements of an A or B tile, 1 KiB

#ifdef EMULATE_AMX

struct EmulatedTile {
  alignas(64) unsigned char bytes[TILE_ROWS][64];
};
thread_local EmulatedTile emulated_tiles[8];
thread_local bool emulated_configured = false;

class TileSession {
 public:
  TileSession() { emulated_configured = true; }
  ~TileSession() { emulated_configured = false; }
  TileSession(const TileSession&) = delete;
};

inline EmulatedTile& emulated_tile(int index) {
  if (!emulated_configured) std::abort();  // the hardware would raise #UD
  return emulated_tiles[index];
}

template <int T>
void tile_zero() {
  emulated_tile(T) = {};
}

template <int T>
void tile_load(const void* from, int64_t stride_bytes) {
  for (int row = 0; row < TILE_ROWS; row++)
    memcpy(emulated_tile(T).bytes[row], static_cast<const char*>(from) + row * stride_bytes, 64);
}

template <int T>
void tile_store(void* to, int64_t stride_bytes) {
  for (int row = 0; row < TILE_ROWS; row++)
    memcpy(static_cast<char*>(to) + row * stride_bytes, emulated_tile(T).bytes[row], 64);
}

INLINE float flush_denormal(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

template <int C, int A, int B>
void tile_dot() {
  for (int m = 0; m < TILE_ROWS; m++) {
    bf16 a[TILE_K];
    float c[TILE_ROWS], sums[2][TILE_ROWS] = {};
    memcpy(a, emulated_tile(A).bytes[m], sizeof a);
    memcpy(c, emulated_tile(C).bytes[m], sizeof c);
    for (int k = 0; k < TILE_K / 2; k++) {
      bf16 b[TILE_K];
      memcpy(b, emulated_tile(B).bytes[k], sizeof b);
      for (int half = 0; half < 2; half++) {
        const float x = flush_denormal(to_float(a[2 * k + half]));
        for (int n = 0; n < TILE_ROWS; n++) {
          const float y = flush_denormal(to_float(b[2 * n + half]));
          sums[half][n] = flush_denormal(__builtin_fmaf(x, y, sums[half][n]));
        }
      }
    }
    for (int n = 0; n < TILE_ROWS; n++)
      c[n] = flush_denormal(flush_denormal(c[n]) + flush_denormal(sums[0][n] + sums[1][n]));
    memcpy(emulated_tile(C).bytes[m], c, sizeof c);
  }
}

#else

// Configures this thread's tiles, all eight full size, and releases them at the end of the scope.
class TileSession {
 public:
  TileSession() {
    struct __attribute__((packed)) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileSession() { asm volatile("tilerelease"); }
  TileSession(const TileSession&) = delete;
};

// The compiler's intrinsics take literal tile numbers only; these take template arguments.
template <int T>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
INLINE void tile_load(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
}

template <int T>
INLINE void tile_store(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(T) : "memory");
}

template <int C, int A, int B>
INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// f with 0 .. N - 1 as compile-time constants: tile numbers are part of the instruction.
template <int N, class F>
INLINE void for_tiles(F f) {
  if constexpr (N > 1) for_tiles<N - 1>(f);
  f(std::integral_constant<int, N - 1>{});
}

// C = (or +=, unless `fresh`) A B over `steps` tiles of k, for R x P tiles of C, R * P <= 4:
//
//              b[0]  b[1]          A: tile (step, r) at a + (step * R + r) * TILE
//       a 0 |  C 0 | C 1 |         B: tile (step, p) at b[p] + step * TILE
//       a 1 |  C 2 | C 3 |         C: tile (r, p) at c + r * 16 * c_row + p * c_panel, rows c_row apart
//
// Tiles 0 .. 3 hold C, 4 and 5 A, 6 and 7 B in turn, so that a load need not wait for the product before it.
template <int R, int P>
void tile_product(const bf16* a, const bf16* const (&b)[P], int64_t steps, float* c, int64_t c_row, int64_t c_panel,
                  bool fresh) {
  static_assert(R <= 2 && R * P <= 4);
  const int64_t c_stride = c_row * sizeof(float);
  for_tiles<R * P>([&](auto i) {
    if (fresh)
      tile_zero<i>();
    else
      tile_load<i>(c + i / P * TILE_ROWS * c_row + i % P * c_panel, c_stride);
  });
  for (int64_t step = 0; step < steps; step++) {
    for_tiles<R>([&](auto r) { tile_load<4 + r>(a + (step * R + r) * TILE, 64); });
    for_tiles<P>([&](auto p) {
      tile_load<6 + p % 2>(b[p] + step * TILE, 64);
      for_tiles<R>([&](auto r) { tile_dot<r * P + p, 4 + r, 6 + p % 2>(); });
    });
  }
  for_tiles<R * P>([&](auto i) { tile_store<i>(c + i / P * TILE_ROWS * c_row + i % P * c_panel, c_stride); });
}

}  // namespace
}  // namespace cpu_ops
