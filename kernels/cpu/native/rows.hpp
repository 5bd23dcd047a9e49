// Copies and maxima of runs of floats, for layers that are limited by memory.
#pragma once
#include <cstring>

#include "vector.hpp"

namespace znnpy {

ALWAYS ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
ALWAYS ptrdiff_t most(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

// Returns the larger value, or NaN if any is NaN: a vector instruction then returns its second operand, so one of the
// two orders gives the NaN, which stays NaN when bits of the other are or-ed in.
ALWAYS V larger_or_nan(V a, V b) {
#if defined(__AVX512F__)
  const __mmask16 all = (__mmask16)-1;
  const V one = (V)_mm512_maskz_max_ps(all, (__m512)a, (__m512)b);
  const V other = (V)_mm512_maskz_max_ps(all, (__m512)b, (__m512)a);
#else
  const V one = (V)_mm256_max_ps((__m256)a, (__m256)b), other = (V)_mm256_max_ps((__m256)b, (__m256)a);
#endif
  return (V)((Mask)one | (Mask)other);
}

// Copies past the caches, by whole lines of the target as far as possible.
ALWAYS void copy_past(const float *source, float *target, ptrdiff_t floats) {
  ptrdiff_t i = 0;
  for (; i < floats && (uintptr_t)(target + i) % 64; i++) target[i] = source[i];
  for (; i + LANES <= floats; i += LANES)
    for (int v = 0; v < LANES; v += W) stream(target + i + v, load(source + i + v));
  for (; i < floats; i++) target[i] = source[i];
}

// Returns how many values are infinite or not a number.
ALWAYS int64_t not_finite(const float *x, ptrdiff_t floats) {
  V sums{};
  ptrdiff_t i = 0;
  float rest = 0;
  for (; i + W <= floats; i += W) sums += load(x + i) * 0.0f;
  for (; i < floats; i++) rest += x[i] * 0.0f;
  for (int lane = 0; lane < W; lane++) rest += sums[lane];
  int64_t bad = 0;
  for (i = 0; rest != 0.0f && i < floats; i++) bad += x[i] * 0.0f != 0.0f;
  return bad;
}

// Copies a few floats without a call.
ALWAYS void copy_maps(const float *source, float *target, ptrdiff_t floats) {
  if (floats < W) {
    for (ptrdiff_t i = 0; i < floats; i++) target[i] = source[i];
    return;
  }
  for (ptrdiff_t i = 0; i + W < floats; i += W) store(target + i, load(source + i));
  store(target + floats - W, load(source + floats - W));  // some floats are copied twice
}

ALWAYS void copy_out(const float *source, float *target, ptrdiff_t floats, bool past) {
  if (past) copy_past(source, target, floats);
  else std::memcpy(target, source, floats * sizeof(float));
}

}  // namespace znnpy
