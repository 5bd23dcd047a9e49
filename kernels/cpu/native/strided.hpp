// Arguments that graph_conv_strided.py passes to convolutions with stride, dilation and padding. Sizes are in elements.
#pragma once
#include "sums.hpp"

enum { MOST_PARTS = 8 };

struct Part {  // one input
  const void *x;         // of the type of the output
  int64_t f;
  int64_t pitch[3];      // values from plane to plane, line to line, voxel to voxel
};

struct Strided {
  int64_t n[3], m[3];  // input, output: z, y, x
  int64_t k[3], stride[3], dilation[3];
  int64_t before[3];   // voxels of padding before the first
  int64_t fin, fout;   // maps of all inputs, and of the output
  int64_t parts;
  znnpy::Ending ending;
  const float *kernels;  // panel by panel: (z, y, x, fin, lane)
  const float *bias;     // padded to whole panels
  void *out;
  Part from[MOST_PARTS];
};
