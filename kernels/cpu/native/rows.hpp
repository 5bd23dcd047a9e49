// Copies of runs of floats, for layers that are limited by memory.
#pragma once
#include <cstring>

#include "vector.hpp"

namespace znnpy {

ALWAYS ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
ALWAYS ptrdiff_t most(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

// Copies past the caches, by whole lines of the target as far as possible.
ALWAYS void copy_past(const float *source, float *target, ptrdiff_t floats) {
  ptrdiff_t i = 0;
  for (; i < floats && (uintptr_t)(target + i) % 64; i++) target[i] = source[i];
  for (; i + LANES <= floats; i += LANES)
    for (int v = 0; v < LANES; v += W) stream(target + i + v, load(source + i + v));
  for (; i < floats; i++) target[i] = source[i];
}

// Copies a few floats without a call.
ALWAYS void copy_maps(const float *source, float *target, ptrdiff_t floats) {
  ptrdiff_t i = 0;
  for (; i + W <= floats; i += W) store(target + i, load(source + i));
  for (; i < floats; i++) target[i] = source[i];
}

}  // namespace znnpy
