// Transposed convolution with output channels in SIMD lanes; see graph_transpose_lanes.py.
//
// Along x, outputs whose (j + first) mod stride is equal read neighbouring inputs: a block of them is summed at once.
#include "transpose.hpp"

using namespace znnpy;

namespace {

constexpr int MOST_RUNS = 2048;  // taps of a kernel, as in graph_transpose_lanes.py

ptrdiff_t floor_divide(ptrdiff_t a, ptrdiff_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Returns the input that tap d of output j reads along an axis, or -1.
ptrdiff_t input_of(const Transpose &t, int axis, ptrdiff_t j, ptrdiff_t d) {
  const ptrdiff_t at = j + t.first[axis] - d * t.dilation[axis];
  return at >= 0 && at % t.stride[axis] == 0 && at / t.stride[axis] < t.n[axis] ? at / t.stride[axis] : -1;
}

// Lists the inputs of outputs j, j + stride, .. of line (z, y): number q reads inputs that begin q voxels behind those
// of number 0, and 0 <= first <= q < last. Taps that are not in the image for one of them are left out.
template <class E>
ptrdiff_t list(const Transpose &t, ptrdiff_t z, ptrdiff_t y, ptrdiff_t j, ptrdiff_t first, ptrdiff_t last,
               Run<E> *runs) {
  const E *const x = static_cast<const E *>(t.x);
  ptrdiff_t count = 0;
  for (ptrdiff_t dz = 0; dz < t.k[0]; dz++) {
    const ptrdiff_t plane = input_of(t, 0, z, dz);
    for (ptrdiff_t dy = 0; dy < t.k[1] && plane >= 0; dy++) {
      const ptrdiff_t row = input_of(t, 1, y, dy);
      for (ptrdiff_t dx = 0; dx < t.k[2] && row >= 0; dx++) {
        const ptrdiff_t at = j + t.first[2] - dx * t.dilation[2], voxel = floor_divide(at, t.stride[2]);
        if (voxel * t.stride[2] != at || voxel + first < 0 || voxel + last > t.n[2]) continue;
        runs[count++] = {x + plane * t.pitch[0] + row * t.pitch[1] + voxel * t.pitch[2],
                         t.kernels + ((dz * t.k[1] + dy) * t.k[2] + dx) * t.fin * LANES, t.fin, t.pitch[2]};
      }
    }
  }
  return count;
}

template <class E>
int64_t lines(const Transpose &t, float *scratch, int64_t lo, int64_t hi) {
  const Panels panels{(t.fout + LANES - 1) / LANES, t.k[0] * t.k[1] * t.k[2] * t.fin * LANES, t.bias};
  const ptrdiff_t mx = t.m[2], step = t.stride[2], width = panels.voxel();
  Run<E> runs[MOST_RUNS];
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit / t.m[1], y = unit % t.m[1];
    for (ptrdiff_t j = 0; j < least(step, mx); j++) {
      const ptrdiff_t number = (mx - j + step - 1) / step;
      ptrdiff_t begin = 0, end = number;  // those for which all taps are in the image
      for (ptrdiff_t dx = 0; dx < t.k[2]; dx++) {
        const ptrdiff_t at = j + t.first[2] - dx * t.dilation[2], voxel = floor_divide(at, step);
        if (voxel * step != at) continue;
        begin = most(begin, -voxel);
        end = least(end, t.n[2] - voxel);
      }
      begin = least(begin, number);
      end = most(begin, end);
      float *const out = scratch + j * width;
      for (ptrdiff_t q = 0; q < number; q++)
        if (q < begin || q >= end)
          all_sums(panels, runs, list(t, z, y, j, q, q + 1, runs), q, q + 1, out, step * width);
      if (begin < end) all_sums(panels, runs, list(t, z, y, j, begin, end, runs), begin, end, out, step * width);
    }
    bad += end_line(t.ending, {scratch, mx, width, nullptr, static_cast<E *>(t.out) + unit * mx * t.fout}, t.fout);
  }
  if (t.ending.past) fence();
  return bad;
}

}  // namespace

// Computes lines [lo, hi) of the output, (z, y). `scratch` holds a line of whole panels. Returns how many values are
// infinite or not a number before the function.
EXPORT int64_t znnpy_transpose(const Transpose *transpose, float *scratch, int64_t lo, int64_t hi) {
  return with_type(transpose->ending.bf16,
                   [&](auto type) { return lines<decltype(type)>(*transpose, scratch, lo, hi); });
}
