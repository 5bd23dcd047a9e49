// Arguments that graph_pool_lanes.py passes to poolings with any window, stride and padding. Sizes are in elements.
#pragma once
#include <cstdint>

struct WindowPool {
  int64_t n[3], m[3];       // input, output: z, y, x
  int64_t window[3], stride[3];
  int64_t before[3];        // voxels of padding before the first
  int64_t pitch[3];         // values of the input from plane to plane, line to line, voxel to voxel
  int64_t f;
  int64_t lines;            // lines of outputs computed together
  int64_t run;              // outputs along x computed together
  int64_t average;          // else the maximum
  int64_t past;             // whether the output is written past the caches
  int64_t bf16;             // whether input and output are bfloat16, else float
  const float *counts[3];   // voxels that a mean divides by along each axis
  const void *x;
  void *out;
};
