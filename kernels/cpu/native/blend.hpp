// The arguments of znnpy_blend and znnpy_blended_mean.
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

// Divides sums (y, x, maps) by totals (y, x), and writes the means as maps (maps, y, x). Strides are in elements, and the
// maps of a voxel of the sums are next to each other.
struct BlendedMean {
  int64_t n[2], maps;
  int64_t sums_row, sums_voxel, totals_row, totals_voxel, out_map, out_row, out_voxel;
  const float *sums, *totals;
  float *out;
};

}  // namespace znnpy
