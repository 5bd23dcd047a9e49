// Copies and maxima of runs of values, for layers that are limited by memory. Arrays are of floats or of bfloat16.
#pragma once
#include <cstring>
#include <type_traits>

#include "bf16.hpp"

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

template <class S, class T>
ALWAYS void copy_values(const S *source, T *target, ptrdiff_t count) {
  ptrdiff_t i = 0;
  for (; i + W <= count; i += W) copy_vector(source + i, target + i);
  for (; i < count; i++) copy_value(source + i, target + i);
}

// Returns how many of `count` values precede the first whole cache line.
template <class E>
ALWAYS ptrdiff_t before_line(const E *x, ptrdiff_t count) {
  return least(count, (ptrdiff_t)(-(uintptr_t)x % 64 / sizeof(E)));
}

// Copies past the caches, by whole lines of the target as far as possible.
template <class S, class T>
ALWAYS void copy_past(const S *source, T *target, ptrdiff_t count) {
  constexpr ptrdiff_t line = 64 / sizeof(T);
  ptrdiff_t i = before_line(target, count);
  copy_values(source, target, i);
  for (; i + line <= count; i += line)
    for (ptrdiff_t v = 0; v < line; v += W) stream_vector(source + i + v, target + i + v);
  copy_values(source + i, target + i, count - i);
}

ALWAYS float sum_of(V v) {
  float sum = 0;
  for (int lane = 0; lane < W; lane++) sum += v[lane];
  return sum;
}

// Returns how many values are infinite or not a number.
ALWAYS int64_t not_finite(const float *x, ptrdiff_t floats) {
  V sums[4] = {};  // one sum would wait for the one before
  ptrdiff_t i = 0;
  float rest = 0;
  for (; i + 4 * W <= floats; i += 4 * W)
    for (int v = 0; v < 4; v++) sums[v] += load(x + i + v * W) * 0.0f;
  for (; i + W <= floats; i += W) sums[0] += load(x + i) * 0.0f;
  for (; i < floats; i++) rest += x[i] * 0.0f;
  rest += sum_of(sums[0] + sums[1] + (sums[2] + sums[3]));
  int64_t bad = 0;
  for (i = 0; rest != 0.0f && i < floats; i++) bad += x[i] * 0.0f != 0.0f;
  return bad;
}

// Copies a few values without a call.
template <class S, class T>
ALWAYS void copy_maps(const S *source, T *target, ptrdiff_t count) {
  if (count < W) {
    for (ptrdiff_t i = 0; i < count; i++) copy_value(source + i, target + i);
    return;
  }
  for (ptrdiff_t i = 0; i + W < count; i += W) copy_vector(source + i, target + i);
  copy_vector(source + count - W, target + count - W);  // some values are copied twice
}

template <class S, class T>
ALWAYS void copy_out(const S *source, T *target, ptrdiff_t count, bool past) {
  if (past) copy_past(source, target, count);
  else if (std::is_same<S, T>::value) std::memcpy(target, source, count * sizeof(T));
  else copy_values(source, target, count);
}

}  // namespace znnpy
