// Arguments that graph_conv_depthwise.py passes to convolutions of each map by itself. Sizes are in elements.
#pragma once
#include "ending.hpp"

struct Depthwise {
  int64_t n[3], m[3];  // input, output: z, y, x
  int64_t k[3], stride[3], dilation[3];
  int64_t before[3];   // voxels of padding before the first
  int64_t pitch[3];    // values of the input from plane to plane, line to line, voxel to voxel
  int64_t f;
  int64_t lines;       // lines of outputs computed together
  znnpy::Ending ending;
  const void *x;         // of the type of the output
  const float *kernels;  // (z, y, x, f)
  const float *bias;
  void *out;
};
