// Direct convolution with stride, dilation and padding, with output channels in SIMD lanes; see graph_conv_strided.py.
#include "strided.hpp"

#include "taps.hpp"

using namespace znnpy;

namespace {

constexpr int MOST_RUNS = 2048;  // taps of a kernel over all inputs, as in graph_conv_strided.py

// Lists the inputs of the outputs of line (z, y) for taps [first, last) along x. Returns the number of runs.
template <class E>
ptrdiff_t list(const Strided &s, ptrdiff_t z, ptrdiff_t y, ptrdiff_t first, ptrdiff_t last, Run<E> *runs) {
  const Taps planes(s, 0, z), rows(s, 1, y);
  ptrdiff_t count = 0, map = 0;
  for (ptrdiff_t i = 0; i < s.parts; map += s.from[i++].f) {
    const Part &part = s.from[i];
    const ptrdiff_t step = s.dilation[2] * part.pitch[2], next = s.stride[2] * part.pitch[2];
    const bool neighbours = s.parts == 1 && step == s.fin;  // a line's taps are one run
    for (ptrdiff_t dz = planes.first; dz < planes.last; dz++) {
      for (ptrdiff_t dy = rows.first; dy < rows.last; dy++) {
        const ptrdiff_t plane = z * s.stride[0] - s.before[0] + dz * s.dilation[0];
        const ptrdiff_t row = y * s.stride[1] - s.before[1] + dy * s.dilation[1];
        const E *const x = static_cast<const E *>(part.x) + plane * part.pitch[0] + row * part.pitch[1] -
                           s.before[2] * part.pitch[2];
        const float *const kernel = s.kernels + ((dz * s.k[1] + dy) * s.k[2] * s.fin + map) * LANES;
        if (neighbours && first < last)
          runs[count++] = {x + first * step, kernel + first * s.fin * LANES, (last - first) * s.fin, next};
        for (ptrdiff_t dx = first; dx < last && !neighbours; dx++)
          runs[count++] = {x + dx * step, kernel + dx * s.fin * LANES, part.f, next};
      }
    }
  }
  return count;
}

template <class E>
int64_t lines(const Strided &s, float *scratch, int64_t lo, int64_t hi) {
  const Panels panels{(s.fout + LANES - 1) / LANES, s.k[0] * s.k[1] * s.k[2] * s.fin * LANES, s.bias};
  const ptrdiff_t mx = s.m[2], width = panels.voxel();
  ptrdiff_t begin = 0, end = mx;  // outputs that have all their taps
  while (begin < mx && !have_all_taps(s, begin, 1)) begin++;
  while (end > begin && !have_all_taps(s, end - 1, 1)) end--;
  Run<E> runs[MOST_RUNS];
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit / s.m[1], y = unit % s.m[1];
    for (ptrdiff_t i = 0; i < mx; i++) {
      if (i >= begin && i < end) continue;
      const Taps taps(s, 2, i);
      all_sums(panels, runs, list(s, z, y, taps.first, taps.last, runs), i, i + 1, scratch, width);
    }
    all_sums(panels, runs, list(s, z, y, 0, s.k[2], runs), begin, end, scratch, width);
    E *const out = static_cast<E *>(s.out) + unit * mx * s.fout;
    bad += end_line(s.ending, {scratch, mx, width, s.ending.addend.at<E>(z, y, 0), out}, s.fout);
  }
  if (s.ending.past) fence();
  return bad;
}

}  // namespace

// Computes lines [lo, hi) of the output, (z, y). `scratch` holds a line of whole panels. Returns how many values are
// infinite or not a number before the function.
EXPORT int64_t znnpy_strided(const Strided *strided, float *scratch, int64_t lo, int64_t hi) {
  return with_type(strided->ending.bf16, [&](auto type) { return lines<decltype(type)>(*strided, scratch, lo, hi); });
}
