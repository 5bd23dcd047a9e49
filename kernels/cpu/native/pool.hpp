// What pool_lanes.py tells the maxima over windows. Sizes are in elements; the last axis of an image is its channels.
#pragma once
#include <cstdint>

enum { WHOLE_LINES = 1, ANY_LINES = 2 };  // Pooling.past: every voxel fills cache lines, or does not

struct Pooling {
  int64_t n[3], p[3];  // input, window: z, y, x
  int64_t step[3];     // from one window to the next that is wanted
  int64_t into[3];     // fragments along each axis: neighbouring windows go to different ones
  int64_t m[3];        // windows of an image, those of all fragments: z, y, x
  int64_t f;
  int64_t x_image, out_image;  // floats from image to image
  int64_t lines;     // of windows, along y, that are computed together
  int64_t run;       // windows along x that are computed together; a multiple of into[2]
  int64_t ready;     // floats before the place where lines are made ready
  int64_t past;      // the caches: how the output is written
  const float *x;
  float *out;
};
