// The end of a transposed convolution: bias, a function, and the way of each phase to its outputs; see
// graph_transpose.py.
#include "phases.hpp"

#include "activations.hpp"
#include "rows.hpp"

using namespace znnpy;

namespace {

// Counts what is not finite and applies the function to voxels.
ALWAYS int64_t finish(const Phases &p, float *line, ptrdiff_t voxels) {
  const ptrdiff_t floats = voxels * p.fout;
  const int64_t bad = not_finite(line, floats);
  if (p.function == SOFTMAX) softmax(line, voxels, p.fout);
  else if (p.function != NONE) activate<float, float>(p.function, (float)p.a, (float)p.b, line, line, floats);
  return bad;
}

ALWAYS void add_bias(const Phases &p, const float *source, float *to) {
  const ptrdiff_t f = p.fout;
  ptrdiff_t map = 0;
  for (; map + W <= f; map += W) store(to + map, load(source + map) + load(p.bias + map));
  for (; map < f; map++) to[map] = source[map] + p.bias[map];
}

// Handles one line of places and one phase along z and y; `source` is its first place, and `out` the line of outputs.
template <class E>
int64_t line(const Phases &p, const float *source, ptrdiff_t pitch, float *scratch, E *out) {
  const ptrdiff_t f = p.fout, step = p.stride[2], mx = p.m[2];
  if (p.side_by_side) {
    const ptrdiff_t at = p.first[2][0], begin = most(0, at), end = least(mx, at + p.size[2] * step);
    for (ptrdiff_t j = begin; j < end;) {
      const ptrdiff_t place = (j - at) / step, phase = (j - at) % step, count = least(step - phase, end - j);
      const float *from = source + place * pitch + phase * f;
      for (ptrdiff_t i = 0; i < count; i++) add_bias(p, from + i * f, scratch + (j - begin + i) * f);
      j += count;
    }
    if (end <= begin) return 0;
    const int64_t bad = finish(p, scratch, end - begin);
    copy_out(scratch, out + begin * f, (end - begin) * f, p.past);
    return bad;
  }
  int64_t bad = 0;
  for (ptrdiff_t phase = 0; phase < p.count[2]; phase++) {
    const ptrdiff_t at = p.first[2][phase];
    ptrdiff_t voxels = 0, begin = -1;
    for (ptrdiff_t place = 0; place < p.size[2]; place++) {
      const ptrdiff_t j = at + place * step;
      if (j < 0 || j >= mx) continue;
      if (begin < 0) begin = j;
      add_bias(p, source + place * pitch + phase * f, scratch + voxels++ * f);
    }
    bad += finish(p, scratch, voxels);
    for (ptrdiff_t i = 0; i < voxels; i++) copy_maps(scratch + i * f, out + (begin + i * step) * f, f);
  }
  return bad;
}

template <class E>
int64_t lines(const Phases &p, float *scratch) {
  const ptrdiff_t pitch = p.count[0] * p.count[1] * p.count[2] * p.fout;
  int64_t bad = 0;
  for (ptrdiff_t z = 0; z < p.size[0]; z++) {
    for (ptrdiff_t a = 0; a < p.count[0]; a++) {
      const ptrdiff_t jz = p.first[0][a] + z * p.stride[0];
      if (jz < 0 || jz >= p.m[0]) continue;
      for (ptrdiff_t y = 0; y < p.size[1]; y++) {
        for (ptrdiff_t b = 0; b < p.count[1]; b++) {
          const ptrdiff_t jy = p.first[1][b] + y * p.stride[1];
          if (jy < 0 || jy >= p.m[1]) continue;
          const float *source = p.product + (z * p.size[1] + y) * p.size[2] * pitch + (a * p.count[1] + b) * p.count[2] * p.fout;
          bad += line(p, source, pitch, scratch, static_cast<E *>(p.out) + (jz * p.m[1] + jy) * p.m[2] * p.fout);
        }
      }
    }
  }
  if (p.past) fence();
  return bad;
}

}  // namespace

// Writes a product to its outputs, if there are such; `scratch` holds a line of outputs. Returns how many values are
// infinite or not a number before the function.
EXPORT int64_t znnpy_phases(const Phases *phases, float *scratch) {
  return with_type(phases->bf16, [&](auto type) { return lines<decltype(type)>(*phases, scratch); });
}
