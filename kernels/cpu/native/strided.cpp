// Direct convolution with stride, dilation and padding, with output channels in SIMD lanes; see graph_conv_strided.py.
//
// A block of neighbouring outputs of a line, times a panel of LANES channels, is summed in registers over all taps that
// lie in the image: per tap the kernels of the panel are loaded, and the input of each output is broadcast to a vector.
#include "strided.hpp"

#include "activations.hpp"
#include "taps.hpp"

using namespace znnpy;

namespace {

constexpr int VECTORS = LANES / W;
constexpr int OUTPUTS = W == LANES ? 14 : 6;  // outputs that are summed at once, limited by the number of registers
constexpr int MOST_LINES = 512;               // lines of a kernel over all inputs, as in graph_conv_strided.py
constexpr ptrdiff_t CHUNK = 256;              // taps: longer sums would round more than those of other methods

struct Line {  // a line of one input, and the line of the kernel that it is multiplied by
  const float *x, *kernel;
  ptrdiff_t f, voxel;
};

// Sums NUMBER neighbours over taps [first, last) of all lines; `at` is the input of the first output's first tap.
template <int NUMBER>
ALWAYS void sum(const Strided &s, const Line *lines, ptrdiff_t count, ptrdiff_t at, ptrdiff_t first, ptrdiff_t last,
                const float *bias, float *out, ptrdiff_t width) {
  V sums[NUMBER][VECTORS];
  V totals[NUMBER][VECTORS] = {};  // sums of whole chunks; not in registers
  for (int v = 0; v < VECTORS; v++)
    for (int i = 0; i < NUMBER; i++) sums[i][v] = load(bias + v * W);
  ptrdiff_t taps = 0;
  bool chunks = false;
  for (ptrdiff_t j = 0; j < count; j++) {
    const Line &line = lines[j];
    const ptrdiff_t next = s.stride[2] * line.voxel, step = s.dilation[2] * line.voxel;
    const bool neighbours = step == s.fin;  // the taps of a line are one run, of the input and of the kernel
    const ptrdiff_t runs = neighbours ? 1 : last - first, run = neighbours ? (last - first) * line.f : line.f;
    const float *x = line.x + at * line.voxel + first * step, *w = line.kernel + first * s.fin * LANES;
    for (ptrdiff_t r = 0; r < runs; r++, x += step, w += (s.fin - line.f) * LANES) {
      for (ptrdiff_t tap = 0; tap < run; tap++, w += LANES) {
        V kernel[VECTORS];
        for (int v = 0; v < VECTORS; v++) kernel[v] = load(w + v * W);
        for (int i = 0; i < NUMBER; i++) {
          const V value = broadcast(x[i * next + tap]);
          for (int v = 0; v < VECTORS; v++) sums[i][v] += value * kernel[v];
        }
      }
    }
    taps += runs * run;
    if (taps < CHUNK || j + 1 == count) continue;
    taps = 0;
    chunks = true;
    for (int i = 0; i < NUMBER; i++)
      for (int v = 0; v < VECTORS; v++) {
        totals[i][v] += sums[i][v];
        sums[i][v] = V{};
      }
  }
  for (int i = 0; i < NUMBER; i++)
    for (int v = 0; v < VECTORS; v++) store(out + i * width + v * W, chunks ? sums[i][v] + totals[i][v] : sums[i][v]);
}

template <int NUMBER>
void some(const Strided &s, const Line *lines, ptrdiff_t count, ptrdiff_t at, const float *bias, float *out,
          ptrdiff_t width, ptrdiff_t number) {
  if constexpr (NUMBER > 1) {
    if (number < NUMBER) return some<NUMBER - 1>(s, lines, count, at, bias, out, width, number);
  }
  sum<NUMBER>(s, lines, count, at, 0, s.k[2], bias, out, width);
}

// Computes a panel of a line of outputs, `width` floats from one to the next.
void panel(const Strided &s, const Line *lines, ptrdiff_t count, const float *bias, float *out, ptrdiff_t width) {
  const ptrdiff_t mx = s.m[2];
  ptrdiff_t begin = 0, end = mx;  // outputs that have all their taps
  while (begin < mx && !have_all_taps(s, begin, 1)) begin++;
  while (end > begin && !have_all_taps(s, end - 1, 1)) end--;
  for (ptrdiff_t i = 0; i < mx; i += i == begin && begin < end ? end - begin : 1) {
    if (i == begin && begin < end) continue;
    const Taps taps(s, 2, i);
    sum<1>(s, lines, count, i * s.stride[2] - s.before[2], taps.first, taps.last, bias, out + i * width, width);
  }
  const ptrdiff_t parts = (end - begin + OUTPUTS - 1) / OUTPUTS;
  for (ptrdiff_t part = 0; part < parts; part++) {  // near-equal, because few sums would wait for each other
    const ptrdiff_t lo = begin + (end - begin) * part / parts, hi = begin + (end - begin) * (part + 1) / parts;
    some<OUTPUTS>(s, lines, count, lo * s.stride[2] - s.before[2], bias, out + lo * width, width, hi - lo);
  }
}

}  // namespace

// Computes lines [lo, hi) of the output, (z, y). `scratch` holds a line of whole panels. Returns how many values are
// infinite or not a number before the function.
EXPORT int64_t znnpy_strided(const Strided *strided, float *scratch, int64_t lo, int64_t hi) {
  const Strided &s = *strided;
  const ptrdiff_t blocks = (s.fout + LANES - 1) / LANES, width = blocks * LANES, floats = s.m[2] * s.fout;
  Line lines[MOST_LINES];
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit / s.m[1], y = unit % s.m[1];
    const Taps planes(s, 0, z), rows(s, 1, y);
    for (ptrdiff_t block = 0; block < blocks; block++) {
      const ptrdiff_t line_floats = s.k[2] * s.fin * LANES;
      const float *kernels = s.kernels + block * s.k[0] * s.k[1] * line_floats;
      ptrdiff_t count = 0;
      for (ptrdiff_t i = 0; i < s.parts; kernels += s.from[i++].f * LANES) {
        const Part &part = s.from[i];
        for (ptrdiff_t dz = planes.first; dz < planes.last; dz++) {
          for (ptrdiff_t dy = rows.first; dy < rows.last; dy++) {
            const ptrdiff_t plane = z * s.stride[0] - s.before[0] + dz * s.dilation[0];
            const ptrdiff_t row = y * s.stride[1] - s.before[1] + dy * s.dilation[1];
            lines[count++] = {part.x + plane * part.pitch[0] + row * part.pitch[1],
                              kernels + (dz * s.k[1] + dy) * line_floats, part.f, part.pitch[2]};
          }
        }
      }
      panel(s, lines, count, s.bias + block * LANES, scratch + block * LANES, width);
    }
    if (width > s.fout)
      for (ptrdiff_t i = 1; i < s.m[2]; i++) std::memmove(scratch + i * s.fout, scratch + i * width, s.fout * sizeof(float));
    bad += not_finite(scratch, floats);
    if (s.function == SOFTMAX) softmax(scratch, s.m[2], s.fout);
    else if (s.function != NONE) activate(s.function, (float)s.a, (float)s.b, scratch, floats);
    copy_out(scratch, s.out + unit * floats, floats, s.past);
  }
  if (s.past) fence();
  return bad;
}
