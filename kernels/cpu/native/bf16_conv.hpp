// Arguments that bf16_conv.py passes to the direct convolution on the unit for bfloat16. Sizes are in voxels unless they
// say otherwise; the last axis of an image is its maps.
//
// Outputs lie on a grid of places q. A tap reads the input at q * stride + its position - lead, and what is outside the
// arrays is zero. A phase is a convolution of its own, whose result at q is output q * step + its `at`: a transposed
// convolution has several, and one of an upsampled input; others have one. Inputs with their own stride and lead are
// groups: those that are upsampled, which are read at their own resolution, and the others.
#pragma once
#include <cstdint>

constexpr int MOST_GROUPS = 2;

struct Bf16Input {  // one of the arrays whose maps, one after the other, are the input of a group
  const void *x;                     // its first voxel in memory
  int64_t image, plane, row, voxel;  // values from image to image, plane to plane, row to row, voxel to voxel
  int64_t maps;
  int64_t factor[3], first[3];       // voxel i of the input is voxel (i + first) / factor of the array
};

struct Bf16Group {
  int64_t stride[3], lead[3], held[3];  // held: voxels of the input in memory
  int64_t depth;      // planes that a place reads: they are packed one after the other, in a ring of so many
  int64_t steps;      // of a tap
  int64_t fin, inputs;
  int64_t sides[2];   // lattices of packed voxels along y and x: with strides taps read only some of them
  int64_t side[2][16];  // where each begins
  int64_t height;     // rows of a packed lattice
  int64_t slot;       // bytes of a packed plane
  int64_t ring;       // bytes of scratch before the ring
  const Bf16Input *from;
};

struct Bf16Phase {
  const int64_t *taps[MOST_GROUPS];  // (count, 2): planes, and bytes in a plane, from a place's first input to the tap's
  int64_t count[MOST_GROUPS];
  const void *kernels;    // two panels after two panels (group, step, tap, word, panel, pair, lane, 2)
  int64_t at[3];          // where its outputs begin
  int64_t lo[3], hi[3];   // the places whose outputs are wanted
};

struct Bf16Conv {
  int64_t step[3];           // outputs from place to place
  int64_t words, fout;       // words: of a value
  int64_t shifts;            // taps along x that are maps of a panel, one after the other; 1: none are
  int64_t windows[3];        // positions of the window of a pooling into fragments; without one, the places
  int64_t pool[3];           // that window
  int64_t unit[3];           // windows of a unit of work: it computes pool - 1 places more
  int64_t before[3];         // windows that the first unit along each axis has fewer
  int64_t pitch;             // voxels of a packed row
  int64_t flat;              // whether blocks of places go on from row to row
  int64_t fold;              // whether all taps are one: their inputs are gathered place by place
  int64_t window[3], dilation_y;  // of such a convolution: kernel, and distance of its rows
  int64_t floats;            // whether values in memory are float32, else bfloat16
  int64_t gathered;          // bytes of scratch before the gathered places
  int64_t lists;             // bytes of scratch before two lists of pointers
  int64_t factors;           // length of such a list: words of all taps and steps
  int64_t before_pool;       // bytes of scratch before what a pooling needs
  int64_t past;              // whether outputs are written past the caches
  int64_t out_image, out_plane, out_row;  // values
  int64_t groups, phases;
  Bf16Group group[MOST_GROUPS];
  const Bf16Phase *phase;
  const float *bias;         // padded to whole panels
  void *out;
  int64_t function;          // as in activations.hpp
  double a, b;               // its parameters
  const void *addend;        // an array that is added to the results, or null
  int64_t add_plane, add_row, add_voxel;  // values
  void *maxima;              // of windows of the outputs side by side, which units hold whole; or null
  int64_t max_window[3];     // such a window
  int64_t max_first[3], max_count[3];  // outputs before the first window, and windows
  int64_t max_plane, max_row;  // values
};
