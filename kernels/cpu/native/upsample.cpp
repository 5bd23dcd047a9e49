// Upsampling by whole factors in one pass; see graph_upsample_lanes.py.
#include "upsample.hpp"

#include "rows.hpp"

using namespace znnpy;

namespace {

struct Repeats {  // the outputs that a voxel is nearest to
  ptrdiff_t first, last;

  Repeats(const Upsample &t, int axis, ptrdiff_t in)
      : first(most(0, in * t.factor[axis] - t.first[axis])),
        last(least(t.m[axis], (in + 1) * t.factor[axis] - t.first[axis])) {}
};

// Sets to[i] to a[i] * (1 - part) + b[i] * part; reads and writes whole vectors.
ALWAYS void between(const float *a, const float *b, float part, float *to, ptrdiff_t floats) {
  const float rest = 1.0f - part;
  ptrdiff_t i = 0;
  for (; i + W < floats; i += W) store(to + i, load(a + i) * rest + load(b + i) * part);
  const ptrdiff_t last = most(0, floats - W);
  store(to + last, load(a + last) * rest + load(b + last) * part);
}

// Sets `to` to outputs [first, first + count) of a line; `voxels` are those that they lie between. It is a function of
// its own, so that all that its loop needs is in registers.
__attribute__((noinline)) void between_voxels(const Along &along, ptrdiff_t first, ptrdiff_t count, ptrdiff_t f,
                                              const float *voxels, float *to) {
  const ptrdiff_t begin = along.low[first];
  for (ptrdiff_t i = first; i < first + count; i++, to += f)
    between(voxels + (along.low[i] - begin) * f, voxels + (along.high[i] - begin) * f, along.part[i], to, f);
}

// Sets to[i] to the values between four lines; `z` and `y` are the parts. Writes whole vectors.
template <class E>
ALWAYS void between_lines(const E *const lines[4], float z, float y, float *to, ptrdiff_t floats) {
  const float factors[4] = {(1.0f - z) * (1.0f - y), (1.0f - z) * y, z * (1.0f - y), z * y};
  ptrdiff_t i = 0;
  const auto sum = [&](auto get) ALWAYS_LAMBDA {
    const V before = get(lines[0]) * factors[0] + get(lines[1]) * factors[1];
    return before + (get(lines[2]) * factors[2] + get(lines[3]) * factors[3]);
  };
  for (; i + W <= floats; i += W) store(to + i, sum([&](const E *line) ALWAYS_LAMBDA { return load(line + i); }));
  const int left = (int)(floats - i);
  if (left > 0) store(to + i, sum([&](const E *line) ALWAYS_LAMBDA { return load_part(line + i, left); }));
}

template <class E>
void nearest(const Upsample &t, E *scratch, int64_t lo, int64_t hi) {
  const ptrdiff_t f = t.f, top = t.along[0].low[0], left = t.along[1].low[0];
  const ptrdiff_t rows = t.along[1].low[t.m[1] - 1] - left + 1;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t plane = top + unit / rows, row = left + unit % rows;
    const E *const line = static_cast<const E *>(t.x) + plane * t.pitch[0] + row * t.pitch[1];
    const E *const whole = line + (t.n[2] - 1) * t.pitch[2] + f - W;  // a vector there ends with the line
    const Repeats planes(t, 0, plane), lines(t, 1, row);
    for (ptrdiff_t first = 0; first < t.m[2]; first += t.run) {
      const ptrdiff_t count = least(t.run, t.m[2] - first);
      for (ptrdiff_t i = 0; i < count; i++) {
        const E *const voxel = line + t.along[2].low[first + i] * t.pitch[2];
        if (f < W && voxel <= whole) copy_vector(voxel, scratch + i * f);  // what is too much is overwritten
        else copy_maps(voxel, scratch + i * f, f);
      }
      for (ptrdiff_t z = planes.first; z < planes.last; z++)
        for (ptrdiff_t y = lines.first; y < lines.last; y++)
          copy_out(scratch, static_cast<E *>(t.out) + ((z * t.m[1] + y) * t.m[2] + first) * f, count * f, t.past);
    }
  }
  if (t.past) fence();
}

template <class E>
void linear(const Upsample &t, float *scratch, int64_t lo, int64_t hi) {
  const ptrdiff_t f = t.f;
  const E *const x = static_cast<const E *>(t.x);
  const Along &along = t.along[2];
  float *const voxels = scratch + t.run * f + LANES;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit % t.m[0], block = unit / t.m[0] * t.lines;
    const E *const planes[2] = {x + t.along[0].low[z] * t.pitch[0], x + t.along[0].high[z] * t.pitch[0]};
    for (ptrdiff_t y = block; y < least(block + t.lines, t.m[1]); y++) {
      const ptrdiff_t low = t.along[1].low[y] * t.pitch[1], high = t.along[1].high[y] * t.pitch[1];
      for (ptrdiff_t first = 0; first < t.m[2]; first += t.run) {
        const ptrdiff_t count = least(t.run, t.m[2] - first), begin = along.low[first];
        const ptrdiff_t read = along.high[first + count - 1] - begin + 1;
        const ptrdiff_t runs = t.pitch[2] == f ? 1 : read, floats = t.pitch[2] == f ? read * f : f;
        for (ptrdiff_t i = 0; i < runs; i++) {
          const ptrdiff_t at = (begin + i) * t.pitch[2];
          const E *const lines[4] = {planes[0] + low + at, planes[0] + high + at, planes[1] + low + at,
                                     planes[1] + high + at};
          between_lines(lines, t.along[0].part[z], t.along[1].part[y], voxels + i * f, floats);
        }
        between_voxels(along, first, count, f, voxels, scratch);
        copy_out(scratch, static_cast<E *>(t.out) + ((z * t.m[1] + y) * t.m[2] + first) * f, count * f, t.past);
      }
    }
  }
  if (t.past) fence();
}

}  // namespace

// Repeats voxels. Units [lo, hi) are lines of the input, (z, y), from those that the first output is nearest to on.
// `scratch` holds a run of outputs and a vector, of the type of the input.
EXPORT void znnpy_upsample_nearest(const Upsample *upsample, void *scratch, int64_t lo, int64_t hi) {
  with_type(upsample->bf16, [&](auto type) { nearest(*upsample, static_cast<decltype(type) *>(scratch), lo, hi); });
}

// Interpolates between voxels. Units [lo, hi) are (block of lines, plane) of outputs. `scratch` holds a run of outputs
// and the voxels that they lie between, each followed by room for a vector.
EXPORT void znnpy_upsample_linear(const Upsample *upsample, float *scratch, int64_t lo, int64_t hi) {
  with_type(upsample->bf16, [&](auto type) { linear<decltype(type)>(*upsample, scratch, lo, hi); });
}
