// Arguments that graph_transpose_lanes.py passes to transposed convolutions. Sizes are in elements.
#pragma once
#include "sums.hpp"

struct Transpose {
  int64_t n[3], m[3];  // input, output: z, y, x
  int64_t k[3], stride[3], dilation[3];
  int64_t first[3];    // where the output begins; may be negative
  int64_t pitch[3];    // values of the input from plane to plane, line to line, voxel to voxel
  int64_t fin, fout;
  znnpy::Ending ending;
  const void *x;         // of the type of the output
  const float *kernels;  // panel by panel: (z, y, x, fin, lane)
  const float *bias;     // padded to whole panels
  void *out;
};
