// Arguments that pool_lanes.py passes to the maxima over windows. Sizes are in elements; the last axis of an image is
// its channels.
#pragma once
#include <cstdint>

enum { WHOLE_LINES = 1, ANY_LINES = 2 };  // Pooling.past: every voxel fills whole cache lines, or not

struct Pooling {
  int64_t n[3], p[3];  // input, window: z, y, x
  int64_t step[3];     // distance from one window to the next that is computed
  int64_t into[3];     // fragments along each axis: neighbouring windows go to different ones
  int64_t m[3];        // windows of an image, over all fragments: z, y, x
  int64_t f;
  int64_t x_image, out_image;  // values from image to image
  int64_t lines;     // windows along y computed together
  int64_t run;       // windows along x computed together; a multiple of into[2]
  int64_t ready;     // values before the place where a line of output is assembled
  int64_t past;      // whether and how the output is written past the caches
  int64_t bf16;      // whether input, output and scratch are bfloat16, else float
  const void *x;
  void *out;
};
