// Arguments that conv_direct_lanes.py passes to the direct convolution. Sizes are in elements; the last axis of an
// image is its channels.
#pragma once
#include <cstdint>

struct Direct {
  int64_t n[3], k[3];  // input, kernel: z, y, x
  int64_t p[3];        // window of the fused pooling, for znnpy_direct_pool
  int64_t rows, run;   // windows along y and x computed together
  int64_t fin, fout;
  int64_t x_image, out_image;  // floats from image to image
  int64_t relu, stream;
  const float *x;
  float *out;
  const float *kernels;  // panel by panel: (z, y, x, fin, block, lane)
  const float *bias;     // padded to whole blocks
  const int64_t *offsets;  // (z, y, x, fin): floats from an output's first input to that of each tap
};
