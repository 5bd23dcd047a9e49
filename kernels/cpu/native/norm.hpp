// Arguments that graph_norm_lanes.py passes to what depends on a whole image. Sizes are in elements.
#pragma once
#include <cstdint>

enum { MOMENTS, MAXIMA };

struct Norm {
  int64_t n[3];      // z, y, x
  int64_t pitch[3];  // values from plane to plane, line to line, voxel to voxel of the input
  int64_t f;         // maps
  int64_t repeat;    // voxels whose values are summed up apart: the maps of so many fill some vectors
  int64_t block;     // voxels that are in the cache at once
  int64_t unit;      // voxels of a unit: several blocks
  int64_t how;
  int64_t function;  // as in activations.hpp
  double a, b;       // parameters of the function
  int64_t past;      // whether the output is written past the caches
  int64_t bf16;      // whether input and output are bfloat16, else float
  const float *shift, *factor, *offset;  // of each map: the output is (x - shift) * factor + offset
  double *found;  // of each unit: the means of its maps and their sums of squared deviations, or their maxima
  const void *x;
  void *out;
};
