// Adds the results of windows, times their weights, to sums.
#include "blend.hpp"

#include "bf16.hpp"

namespace znnpy {
namespace {

template <class E>
void add(float *sums, const E *values, float weight, ptrdiff_t maps) {
  const V factor = broadcast(weight);
  ptrdiff_t i = 0;
  for (; i + W <= maps; i += W) store(sums + i, load(sums + i) + load(values + i) * factor);
  for (; i < maps; i++) sums[i] += widen(values[i]) * weight;
}

template <class E>
void blend(const Blend &b) {
  for (ptrdiff_t y = 0; y < b.n[0]; y++) {
    float *const sums = b.sums + y * b.sums_row;
    const E *const values = static_cast<const E *>(b.values) + y * b.values_row;
    const float *const weights = b.weights + y * b.weights_row;
    for (ptrdiff_t x = 0; x < b.n[1]; x++)
      add(sums + x * b.sums_voxel, values + x * b.values_voxel, weights[x * b.weights_voxel] * b.share, b.maps);
  }
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

EXPORT void znnpy_blend(const Blend *b) {
  with_type(b->bf16, [&](auto type) { blend<decltype(type)>(*b); });
}
