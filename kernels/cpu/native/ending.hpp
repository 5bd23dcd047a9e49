// Declares what follows the sums of a layer: an addend, a function, and the way to the output; see ending.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace znnpy {

struct Addend {  // an array that is added to the results
  const void *x;              // null: none
  int64_t plane, row, voxel;  // values from plane to plane, row to row, voxel to voxel

  template <class E = float>
  const E *at(ptrdiff_t z, ptrdiff_t y, ptrdiff_t voxels, ptrdiff_t map = 0) const {
    return x == nullptr ? nullptr : static_cast<const E *>(x) + z * plane + y * row + voxels * voxel + map;
  }
};

struct Ending {
  int64_t function;  // as in activations.hpp
  double a, b;       // its parameters
  int64_t past;      // whether the output is written past the caches
  int64_t bf16;      // whether the output and the addend are bfloat16, else float
  Addend addend;

  bool any() const { return function != 0 || addend.x != nullptr; }
};

// Neighbouring voxels of the results, whose sums are in the cache.
struct Results {
  float *sums;  // overwritten
  ptrdiff_t voxels, width;  // width: floats from voxel to voxel, at least whole vectors of maps
  const void *addend;       // what is added to the first, or null; of the type of the output
  void *out;
};

// Ends voxels of `f` maps, which lie one after the other in the output. Returns how many values are infinite or not a
// number before the function.
int64_t end_line(const Ending &ending, const Results &r, ptrdiff_t f);

// Does the same for `lanes` of f maps. These are whole vectors of the output if they are written past the caches. A
// softmax needs all maps.
int64_t end_lanes(const Ending &ending, const Results &r, ptrdiff_t f, ptrdiff_t lanes);

}  // namespace znnpy
