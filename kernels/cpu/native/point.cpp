// Layers that take their inputs voxel by voxel; see graph_point_lanes.py.
//
// Some voxels of a line at a time are joined in a buffer in L1, where the function that follows is applied, and copied
// to the output.
#include "point.hpp"

#include "activations.hpp"
#include "rows.hpp"

using namespace znnpy;

namespace {

constexpr ptrdiff_t ROOM = 8192;      // floats of a buffer: the most maps, as in graph_point_lanes.py
constexpr ptrdiff_t AT_ONCE = 2048;  // floats processed at a time, if a voxel has no more

// Returns `count` voxels of an input as neighbours with f maps: in place, or copied to `buffer`; one map is repeated.
const float *voxels(const PointInput &in, const float *x, ptrdiff_t count, ptrdiff_t f, float *buffer) {
  if (in.f == f && in.voxel == f) return x;
  for (ptrdiff_t i = 0; i < count; i++) {
    if (in.f == f) {
      copy_maps(x + i * in.voxel, buffer + i * f, f);
    } else {
      const V value = broadcast(x[i * in.voxel]);
      ptrdiff_t map = 0;
      for (; map + W <= f; map += W) store(buffer + i * f + map, value);
      for (; map < f; map++) buffer[i * f + map] = value[0];
    }
  }
  return buffer;
}

template <class JOIN>
ALWAYS void join(const float *a, const float *b, float *to, ptrdiff_t floats, JOIN both) {
  ptrdiff_t i = 0;
  for (; i + W <= floats; i += W) store(to + i, both(load(a + i), load(b + i)));
  for (; i < floats; i++) to[i] = both(broadcast(a[i]), broadcast(b[i]))[0];
}

ALWAYS void repeat(const float *maps, ptrdiff_t f, float *row, ptrdiff_t count, ptrdiff_t step) {
  for (ptrdiff_t i = 0; i < count * f; i++) row[i] = maps[i % f * step];
}

}  // namespace

// Computes lines [lo, hi), (z, y). Returns how many values of arithmetic are infinite or not a number.
EXPORT int64_t znnpy_point(const Point *point, int64_t lo, int64_t hi) {
  const Point &p = *point;
  const ptrdiff_t f = p.f, step = most(1, AT_ONCE / f);
  alignas(64) float joined[ROOM], other[ROOM], factors[ROOM], offsets[ROOM];
  const bool slopes = p.function == PRELU, arithmetic = p.how != CONCAT && p.how != FUNCTION_ALONE;
  if (p.how == SCALE || slopes) repeat(p.weight, f, factors, step, !slopes || p.slopes > 1);
  if (p.how == SCALE) repeat(p.bias, f, offsets, step, 1);
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit / p.n[1], y = unit % p.n[1];
    float *out = p.out + unit * p.n[2] * f;
    for (ptrdiff_t first = 0; first < p.n[2]; first += step) {
      const ptrdiff_t count = least(step, p.n[2] - first), floats = count * f;
      const auto source = [&](ptrdiff_t i) { return p.from[i].x + z * p.from[i].z + y * p.from[i].y + first * p.from[i].voxel; };
      if (p.how == CONCAT) {
        float *to = joined;
        for (ptrdiff_t i = 0; i < p.inputs; to += p.from[i++].f) {
          const PointInput &in = p.from[i];
          const float *from = source(i);
          for (ptrdiff_t voxel = 0; voxel < count; voxel++)
            copy_maps(from + voxel * in.voxel, to + voxel * f, in.f);
        }
      } else {
        const float *one = voxels(p.from[0], source(0), count, f, joined);
        if (p.how == SCALE) {
          for (ptrdiff_t i = 0; i < floats; i += W) {  // the buffers have room for whole vectors
            const int left = (int)(floats - i);
            store(joined + i, load_part(one + i, left) * load(factors + i) + load(offsets + i));
          }
        } else if (p.inputs == 1 && one != joined) {
          std::memcpy(joined, one, floats * sizeof(float));
        }
        for (ptrdiff_t i = 1; i < p.inputs; i++) {
          const float *two = voxels(p.from[i], source(i), count, f, other);
          if (p.how == ADD) join(i == 1 ? one : joined, two, joined, floats, [](V a, V b) ALWAYS_LAMBDA { return a + b; });
          else join(i == 1 ? one : joined, two, joined, floats, [](V a, V b) ALWAYS_LAMBDA { return a * b; });
        }
      }
      if (arithmetic) bad += not_finite(joined, floats);
      if (slopes)
        join(joined, factors, joined, floats, [](V a, V b) ALWAYS_LAMBDA { return a < 0.0f ? a * b : a; });
      else if (p.function == SOFTMAX)
        softmax(joined, count, f);
      else if (p.function != NONE)
        activate(p.function, (float)p.a, (float)p.b, joined, floats);
      copy_out(joined, out + first * f, floats, p.past);
    }
  }
  if (p.past) fence();
  return bad;
}
