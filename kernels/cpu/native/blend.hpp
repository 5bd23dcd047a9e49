// The arguments of znnpy_blend.
#pragma once
#include "vector.hpp"

namespace znnpy {

// Adds values (y, x, maps) times weights (y, x) times a share to sums (y, x, maps). Strides are in elements, and the maps
// of a voxel are next to each other.
struct Blend {
  int64_t n[2], maps;
  int64_t sums_row, sums_voxel, values_row, values_voxel, weights_row, weights_voxel;
  int64_t bf16;  // whether values are bfloat16, else floats
  float share;
  float *sums;
  const void *values;
  const float *weights;
};

}  // namespace znnpy
