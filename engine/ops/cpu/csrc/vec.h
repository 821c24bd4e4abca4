// One native float vector and what the kernels do with it: the only file that knows the instruction set.
//
// Vectors are GCC's vector extension at the target's own width (16 lanes with AVX-512, 8 with AVX2, 4 elsewhere), so
// the same source compiles anywhere. Lanes run over outputs, never over a sum, wherever a sum must have one order; the
// sums that do run over lanes use 16 logical lanes, LANES_16 vectors, and one fixed tree.
//
// The compiler may not fuse or reorder (-ffp-contract=off, no -ffast-math): fma() is the one place that fuses, where
// the target can, so a main loop and its tail give the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "kernels.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE inline INLINED
#define INLINED __attribute__((always_inline))  // of a lambda

namespace cpu_ops {
namespace {  // internal: each instruction set is its own library with its own copies

#if defined(__AVX512F__) || defined(EMULATE_AVX512)
constexpr int LANES = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4;
constexpr int REGISTERS = 32;
#else
constexpr int LANES = 4;
constexpr int REGISTERS = 16;
#endif
constexpr int LANES_16 = 16 / LANES;

using Vec = float __attribute__((vector_size(4 * LANES)));
using IVec = int32_t __attribute__((vector_size(4 * LANES)));
using UVec = uint32_t __attribute__((vector_size(4 * LANES)));
using HalfVec = uint16_t __attribute__((vector_size(2 * LANES)));

// Whether bfloat16 pairs are multiplied as they are: AVX-512's VDPBF16PS, at twice the rate of float32 FMAs.
#if defined(__AVX512BF16__) || defined(EMULATE_BF16_DOT)
constexpr bool BF16_DOT = true;
#else
constexpr bool BF16_DOT = false;
#endif

// In what the vector kernels hold the A operand of a product whose B is of T.
template <class T>
using Multiplier = std::conditional_t<BF16_DOT && std::is_same_v<T, bf16>, bf16, float>;

// Consecutive k side by side in a B operand: bfloat16 comes in pairs, one 32-bit lane each.
template <class T>
constexpr int K_STEP = std::is_same_v<T, bf16> ? 2 : 1;

template <class To, class From>
INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

INLINE Vec broadcast(float x) { return x - Vec{}; }  // x - 0 is x, signed zero too

#if defined(EMULATE_AVX512)
// f on the halves that an AVX2 CPU has: the same lanes, blocking and bits as on one with AVX-512.
template <class F>
INLINE Vec by_halves(F f, Vec a, Vec b, Vec c) {
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, sizeof a);
  memcpy(y, &b, sizeof b);
  memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; i++) x[i] = f(x[i], y[i], z[i]);
  memcpy(&a, x, sizeof a);
  return a;
}
#endif

INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(EMULATE_AVX512)
  return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
#elif defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// acc = fma(a, b, acc), in place. GCC would as well put the result in a's register and copy; where every register holds
// an accumulator, that spills.
INLINE void accumulate(Vec& acc, Vec a, Vec b) {
#if defined(__FMA__) && !defined(EMULATE_AVX512)
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  acc = fma(a, b, acc);
#endif
}

// The two bfloat16 of each 32-bit lane as float32: the first lies in the low half.
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

// acc += a's bfloat16 pair times b's in every lane; where the CPU has no such instruction, the two FMAs that stand for
// it in its description (Intel SDM volume 2, VDPBF16PS), but for denormals, which it takes as zero.
INLINE void accumulate_pairs(Vec& acc, UVec a, UVec b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  accumulate(acc, odd_half(a), odd_half(b));
  accumulate(acc, even_half(a), even_half(b));
#endif
}

// max and min give b when either is NaN.
INLINE Vec max(Vec a, Vec b) {
#if defined(EMULATE_AVX512)
  return by_halves([](__m256 x, __m256 y, __m256) { return _mm256_max_ps(x, y); }, a, b, b);
#elif defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

INLINE Vec min(Vec a, Vec b) {
#if defined(EMULATE_AVX512)
  return by_halves([](__m256 x, __m256 y, __m256) { return _mm256_min_ps(x, y); }, a, b, b);
#elif defined(__AVX512F__)
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

INLINE Vec iota() {
  Vec v;
  for (int i = 0; i < LANES; i++) v[i] = static_cast<float>(i);
  return v;
}

INLINE Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE Vec load(const bf16* p) {
  HalfVec h;
  memcpy(&h, p, sizeof h);
  return bit_cast<Vec>(__builtin_convertvector(h, UVec) << 16);
}

INLINE void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// To bfloat16: nearest, ties to even; NaN stays NaN.
INLINE void store(bf16* p, Vec v) {
  const UVec bits = bit_cast<UVec>(v);
  const UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const UVec quiet = (bits >> 16) | 0x40;
  const HalfVec h = __builtin_convertvector(v == v ? rounded : quiet, HalfVec);
  memcpy(p, &h, sizeof h);
}

// The first n lanes; the others are zero when loaded, and not touched when stored.
template <class T>
INLINE Vec load(const T* p, int n) {
  if (n == LANES) return load(p);
  T lanes[LANES] = {};
  memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}

template <class T>
INLINE void store(T* p, Vec v, int n) {
  if (n == LANES) return store(p, v);
  T lanes[LANES];
  store(lanes, v);
  memcpy(p, lanes, n * sizeof(T));
}

// f(first, count) for runs of LANES elements, then once for what is left.
template <class F>
INLINE void for_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, static_cast<int>(n - i));
}

// f with n as a compile-time constant in 1 .. N.
template <int N, class F>
INLINE void with_constant(int n, F f) {
  if (n == N) {
    f(std::integral_constant<int, N>{});
  } else if constexpr (N > 1) {
    with_constant<N - 1>(n, f);
  }
}

// Reductions over 16 logical lanes in one tree, whatever LANES is: lane i takes lane i + 8, then i + 4, i + 2, i + 1.
// In registers: through memory, each level would wait for the stores of the one before.
template <int HALF, class F>
INLINE Vec reduce_lanes(Vec v, F op) {
  if constexpr (HALF == 0) {
    return v;
  } else {
    IVec upper;
    for (int i = 0; i < LANES; i++) upper[i] = (i + HALF) % LANES;
    return reduce_lanes<HALF / 2>(op(v, __builtin_shuffle(v, upper)), op);
  }
}

template <class F>
INLINE float reduce_16(const Vec (&v)[LANES_16], F op) {
  Vec lanes[LANES_16];
  for (int i = 0; i < LANES_16; i++) lanes[i] = v[i];
  for (int half = LANES_16 / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = op(lanes[i], lanes[i + half]);
  return reduce_lanes<LANES / 2>(lanes[0], op)[0];
}

INLINE float reduce_add(const Vec (&v)[LANES_16]) {
  return reduce_16(v, [](Vec a, Vec b) INLINED { return a + b; });
}

INLINE float reduce_max(const Vec (&v)[LANES_16]) {
  return reduce_16(v, [](Vec a, Vec b) INLINED { return max(a, b); });
}

// e**x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial in r (Cephes' coefficients), times 2**n made from
// bits. Exactly 1 at 0 and exactly 0 below -87; e**88 above 88; NaN stays NaN.
INLINE Vec exp(Vec x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer, kept in the low bits
  const Vec clamped = min(broadcast(88.0f), max(broadcast(-87.0f), x));
  const Vec shifted = fma(clamped, broadcast(1.44269504f), broadcast(ROUND));
  const Vec n = shifted - ROUND;
  Vec r = fma(n, broadcast(-0.693359375f), clamped);  // ln 2 in two parts; the first has 9 bits: n times it is exact
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, broadcast(coefficient));
  p = fma(p, r * r, r) + 1.0f;
  const IVec exponent = bit_cast<IVec>(shifted) + (127 - 0x4b400000);
  const Vec result = p * bit_cast<Vec>(exponent << 23);
  return bit_cast<Vec>(bit_cast<IVec>(result) & ~(x < -87.0f));
}

}  // namespace
}  // namespace cpu_ops
