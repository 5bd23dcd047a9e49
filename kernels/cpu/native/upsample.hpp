// Arguments that graph_upsample_lanes.py passes to upsampling. Sizes are in elements.
#pragma once
#include <cstdint>

struct Along {  // an axis: output i is in[low[i]] * (1 - part[i]) + in[high[i]] * part[i]
  const int64_t *low, *high;
  const float *part;
};

struct Upsample {
  int64_t n[3], m[3];        // input, output: z, y, x
  int64_t factor[3], first[3];
  int64_t pitch[3];          // values of the input from plane to plane, line to line, voxel to voxel
  int64_t f;
  int64_t lines;             // of linear: lines of outputs computed together
  int64_t run;               // outputs along x computed together
  int64_t past;              // whether the output is written past the caches
  int64_t bf16;              // whether input and output are bfloat16, else float
  Along along[3];
  const void *x;
  void *out;
};
