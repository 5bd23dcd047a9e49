// Vectors of W floats, complex numbers of them, and the panels of channels that are computed at once. W is 16 with AVX-512 and 8 with AVX2. Arrays are laid out in blocks
// of LANES channels, whatever W is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace znnpy {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int VERSION = 9;     // as in library.py: raised when a function or a structure changes
constexpr int LANES = 16;      // channels of a block
constexpr int BLOCK = 2 * LANES;  // floats of a block of complex numbers: LANES real parts, LANES imaginary parts

#define ALWAYS inline __attribute__((always_inline))
#define ALWAYS_LAMBDA __attribute__((always_inline))

#define EXPORT extern "C" __attribute__((visibility("default"), noinline))

typedef int32_t Mask __attribute__((vector_size(4 * W)));
typedef float V __attribute__((vector_size(4 * W)));
typedef float Unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

ALWAYS V load(const float *p) { return *reinterpret_cast<const Unaligned *>(p); }
ALWAYS void store(float *p, V v) { *reinterpret_cast<Unaligned *>(p) = v; }

// Loads the first `count` lanes (all of them if more), zero in the others; touches no other memory.
ALWAYS V load_part(const float *p, int count) {
  if (count >= W) return load(p);
  V v{};
#if defined(__AVX512F__)
  v = (V)_mm512_maskz_loadu_ps((__mmask16)((1u << (count < 0 ? 0 : count)) - 1), p);
#else
  for (int i = 0; i < count; i++) v[i] = p[i];
#endif
  return v;
}

ALWAYS void store_part(float *p, V v, int count) {
  if (count >= W) return store(p, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << (count < 0 ? 0 : count)) - 1), (__m512)v);
#else
  for (int i = 0; i < count; i++) p[i] = v[i];
#endif
}

// A full, aligned store that neither reads the line first nor keeps it in the cache.
ALWAYS void stream(float *p, V v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#else
  store(p, v);
#endif
}

// Call after the last `stream`, before other threads read the data.
ALWAYS void fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Call in a loop that waits for another thread.
ALWAYS void pause() {
#if defined(__AVX2__)
  _mm_pause();
#endif
}

ALWAYS V larger(V a, V b) { return a > b ? a : b; }

ALWAYS V broadcast(float f) { return f - V{}; }  // one instruction; V{} + f would be two, because it must turn -0 into 0

struct C {
  V re, im;
};

ALWAYS C operator+(C a, C b) { return {a.re + b.re, a.im + b.im}; }
ALWAYS C operator-(C a, C b) { return {a.re - b.re, a.im - b.im}; }
ALWAYS C conj(C a) { return {a.re, -a.im}; }
ALWAYS C load_complex(const float *p) { return {load(p), load(p + LANES)}; }
ALWAYS void store_complex(float *p, C c) {
  store(p, c.re);
  store(p + LANES, c.im);
}

// Returns how many of the `left` blocks of output channels are computed at once: 3, unless that leaves a single one.
ALWAYS int panel(ptrdiff_t left) { return left == 4 ? 2 : left >= 3 ? 3 : (int)left; }

// Calls f(integral_constant<int, 0>), .., f(integral_constant<int, N - 1>): a loop whose index is a constant.
template <class F, int... I>
ALWAYS void unroll(F f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
ALWAYS void unroll(F f) {
  unroll(f, std::make_integer_sequence<int, N>{});
}

}  // namespace znnpy
