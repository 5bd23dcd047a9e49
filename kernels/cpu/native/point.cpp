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

// Copies `count` voxels of an input as neighbours with f maps; one map is repeated.
template <class E>
void gather(const PointInput &in, const E *x, ptrdiff_t count, ptrdiff_t f, float *buffer) {
  for (ptrdiff_t i = 0; i < count; i++) {
    if (in.f == f) {
      copy_maps(x + i * in.voxel, buffer + i * f, f);
    } else {
      const V value = broadcast_at(x + i * in.voxel);
      ptrdiff_t map = 0;
      for (; map + W <= f; map += W) store(buffer + i * f + map, value);
      for (; map < f; map++) buffer[i * f + map] = value[0];
    }
  }
}

// Sets to[i] to both(a[i], b[i]).
template <class A, class B, class JOIN>
ALWAYS void join(const A *a, const B *b, float *to, ptrdiff_t floats, JOIN both) {
  ptrdiff_t i = 0;
  for (; i + W <= floats; i += W) store(to + i, both(load(a + i), load(b + i)));
  for (; i < floats; i++) to[i] = both(broadcast_at(a + i), broadcast_at(b + i))[0];
}

ALWAYS void repeat(const float *maps, ptrdiff_t f, float *row, ptrdiff_t count, ptrdiff_t step) {
  for (ptrdiff_t i = 0; i < count * f; i++) row[i] = maps[i % f * step];
}

template <class E>
const E *source(const PointInput &in, ptrdiff_t z, ptrdiff_t y, ptrdiff_t voxel) {
  return static_cast<const E *>(in.x) + z * in.z + y * in.y + voxel * in.voxel;
}

// Writes the maps of `count` voxels of all inputs side by side.
template <class E, class T>
ALWAYS void concatenate(const Point &p, ptrdiff_t z, ptrdiff_t y, ptrdiff_t first, ptrdiff_t count, T *to) {
  for (ptrdiff_t i = 0; i < p.inputs; to += p.from[i++].f) {
    const PointInput &in = p.from[i];
    const E *const from = source<E>(in, z, y, first);
    for (ptrdiff_t voxel = 0; voxel < count; voxel++) copy_maps(from + voxel * in.voxel, to + voxel * p.f, in.f);
  }
}

// Computes lines of a concatenation that no function follows.
template <class E>
int64_t copied_lines(const Point &p, int64_t lo, int64_t hi) {
  const ptrdiff_t step = most(1, AT_ONCE / p.f);
  alignas(64) E joined[ROOM];
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    for (ptrdiff_t first = 0; first < p.n[2]; first += step) {
      const ptrdiff_t count = least(step, p.n[2] - first);
      concatenate<E>(p, unit / p.n[1], unit % p.n[1], first, count, joined);
      copy_out(joined, static_cast<E *>(p.out) + (unit * p.n[2] + first) * p.f, count * p.f, p.past);
    }
  }
  if (p.past) fence();
  return 0;
}

template <class E>
int64_t lines(const Point &p, int64_t lo, int64_t hi) {
  const ptrdiff_t f = p.f, step = most(1, AT_ONCE / f);
  alignas(64) float joined[ROOM], other[ROOM], factors[ROOM], offsets[ROOM];
  const bool slopes = p.function == PRELU, arithmetic = p.how != CONCAT && p.how != FUNCTION_ALONE;
  if (p.how == SCALE || slopes) repeat(p.weight, f, factors, step, !slopes || p.slopes > 1);
  if (p.how == SCALE) repeat(p.bias, f, offsets, step, 1);
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit / p.n[1], y = unit % p.n[1];
    for (ptrdiff_t first = 0; first < p.n[2]; first += step) {
      const ptrdiff_t count = least(step, p.n[2] - first), floats = count * f;
      // Calls use(values) for an input whose voxels are neighbours with f maps: in place, or copied to `buffer`.
      const auto with_input = [&](ptrdiff_t i, float *buffer, auto use) ALWAYS_LAMBDA {
        const PointInput &in = p.from[i];
        const E *const x = source<E>(in, z, y, first);
        if (in.f == f && in.voxel == f) return use(x);
        gather(in, x, count, f, buffer);
        use(buffer);
      };
      const auto joined_with = [&](const auto *one, ptrdiff_t i) ALWAYS_LAMBDA {
        with_input(i, other, [&](const auto *two) ALWAYS_LAMBDA {
          if (p.how == ADD) join(one, two, joined, floats, [](V a, V b) ALWAYS_LAMBDA { return a + b; });
          else join(one, two, joined, floats, [](V a, V b) ALWAYS_LAMBDA { return a * b; });
        });
      };
      if (p.how == CONCAT) {
        concatenate<E>(p, z, y, first, count, joined);
      } else {
        with_input(0, joined, [&](const auto *one) ALWAYS_LAMBDA {
          if (p.how == SCALE) {
            for (ptrdiff_t i = 0; i < floats; i += W) {  // the buffers have room for whole vectors
              const int left = (int)(floats - i);
              store(joined + i, load_part(one + i, left) * load(factors + i) + load(offsets + i));
            }
          } else if (p.inputs > 1) {
            joined_with(one, 1);
          } else if ((const void *)one != joined) {
            copy_out(one, joined, floats, false);
          }
        });
        for (ptrdiff_t i = 2; i < p.inputs; i++) joined_with(static_cast<const float *>(joined), i);
      }
      if (arithmetic) bad += not_finite(joined, floats);
      E *const out = static_cast<E *>(p.out) + (unit * p.n[2] + first) * f;
      if (slopes)
        join(joined, factors, joined, floats, [](V a, V b) ALWAYS_LAMBDA { return a < 0.0f ? a * b : a; });
      else if (p.function == SOFTMAX)
        softmax(joined, count, f);
      if (slopes || p.function == SOFTMAX || p.function == NONE) copy_out(joined, out, floats, p.past);
      else activate<float, E>(p.function, (float)p.a, (float)p.b, joined, out, floats, p.past);
    }
  }
  if (p.past) fence();
  return bad;
}

}  // namespace

// Computes lines [lo, hi), (z, y). Returns how many values of arithmetic are infinite or not a number.
EXPORT int64_t znnpy_point(const Point *point, int64_t lo, int64_t hi) {
  return with_type(point->bf16, [&](auto type) {
    using E = decltype(type);
    const bool copies = point->how == CONCAT && point->function == NONE;
    return copies ? copied_lines<E>(*point, lo, hi) : lines<E>(*point, lo, hi);
  });
}
