// Arguments that graph_transpose.py passes to the end of a transposed convolution. Sizes are in elements.
#pragma once
#include <cstdint>

struct Phases {  // some phases of a block of places, as a product gives them
  int64_t size[3];    // places: z, y, x
  int64_t count[3];   // phases along each axis
  int64_t m[3];       // output
  int64_t stride[3];  // outputs from one place to the next
  int64_t fout;
  int64_t side_by_side;  // whether the phases along x are all that there are, in their order
  int64_t function;      // as in activations.hpp
  double a, b;           // its parameters
  int64_t past;          // whether the output is written past the caches
  int64_t bf16;          // whether the output is bfloat16, else float
  const int64_t *first[3];  // output of the first place, of each phase along each axis; may be negative
  const float *product;     // (z, y, x, phases, fout)
  const float *bias;
  void *out;
};
