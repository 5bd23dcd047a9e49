// Arguments that conv_direct_lanes.py and graph_conv_direct.py pass to the direct convolution. Sizes are in elements;
// the last axis of an image is its channels.
#pragma once
#include "ending.hpp"

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
  double slope;            // not 0: negative results are multiplied by it
};

struct Input {  // one of the arrays whose channels, one after the other, are the input
  const float *x;             // the first voxel that is in memory
  int64_t plane, row, voxel;  // floats from plane to plane, row to row, voxel to voxel
  int64_t maps, first;        // its channels, and those of the arrays before it
  const int64_t *offsets;     // (z, y, x, maps): floats from an output's first input to that of each tap
};

// Some of the taps of an output: of one input, and neighbours in the kernels.
struct Taps {
  const float *x;    // an output's first input, which may not be in memory
  int64_t voxel;     // floats from voxel to voxel
  const int64_t *offsets;
  int64_t first, count;  // position in the kernels
};

// A convolution whose input has `n` voxels, of which `held` are in memory, from voxel `lead` on; the others are zero.
struct Padded {
  Direct direct;
  int64_t lead[3], held[3];
  int64_t count;  // of inputs
  const Input *inputs;
  int64_t at_once;        // voxels whose sums are ended together
  znnpy::Ending ending;  // what follows besides relu and slope
};
