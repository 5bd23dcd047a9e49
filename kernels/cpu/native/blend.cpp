// Adds the results of windows, times their weights, to sums, and divides these by the sums of the weights.
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

EXPORT void znnpy_blended_mean(const BlendedMean *b) {
  for (int64_t y = 0; y < b->n[0]; y++) {
    const float *const sums = b->sums + y * b->sums_row, *const totals = b->totals + y * b->totals_row;
    float *const out = b->out + y * b->out_row;
    for (int64_t x = 0; x < b->n[1]; x++) {
      const float *const voxel = sums + x * b->sums_voxel;
      const float total = totals[x * b->totals_voxel];
      float *const to = out + x * b->out_voxel;
      for (int64_t map = 0; map < b->maps; map++) to[map * b->out_map] = voxel[map] / total;
    }
  }
}
