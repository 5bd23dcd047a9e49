// Convolution of each map by itself, with maps in SIMD lanes; see graph_conv_depthwise.py.
#include "depthwise.hpp"

#include "taps.hpp"

using namespace znnpy;

namespace {

constexpr int BLOCK_OUTPUTS = 4;  // outputs along x that are summed at once
constexpr int MOST_LINES = 512;   // lines of a kernel, as in graph_conv_depthwise.py

template <class E>
struct Line {
  const E *x;           // the line of the input
  const float *kernel;  // and of the kernel
};

// Sums OUTPUTS neighbours over taps [first, last) of all lines, for VECTORS vectors of maps; `at` is the input of the
// first output's first tap.
template <int OUTPUTS, int VECTORS, class E, class LOAD, class STORE>
ALWAYS void sum(const Depthwise &d, const Line<E> *lines, ptrdiff_t count, ptrdiff_t at, ptrdiff_t first,
                ptrdiff_t last, ptrdiff_t map, float *out, LOAD get, STORE put) {
  V sums[OUTPUTS][VECTORS];
  for (int v = 0; v < VECTORS; v++)
    for (int i = 0; i < OUTPUTS; i++) sums[i][v] = get(d.bias + map + v * W);
  const ptrdiff_t next = d.stride[2] * d.pitch[2], tap = d.dilation[2] * d.pitch[2];
  for (ptrdiff_t j = 0; j < count; j++) {
    const E *x = lines[j].x + at * d.pitch[2] + first * tap + map;
    const float *w = lines[j].kernel + first * d.f + map;
    for (ptrdiff_t dx = first; dx < last; dx++, x += tap, w += d.f) {
      V kernel[VECTORS];
      for (int v = 0; v < VECTORS; v++) kernel[v] = get(w + v * W);
      for (int i = 0; i < OUTPUTS; i++)
        for (int v = 0; v < VECTORS; v++) sums[i][v] += get(x + i * next + v * W) * kernel[v];
    }
  }
  for (int i = 0; i < OUTPUTS; i++)
    for (int v = 0; v < VECTORS; v++) put(out + i * d.f + map + v * W, sums[i][v]);
}

// Computes some maps of a line of outputs.
template <int VECTORS, class E, class LOAD, class STORE>
ALWAYS void some_maps(const Depthwise &d, const Line<E> *lines, ptrdiff_t count, ptrdiff_t map, float *out, LOAD get,
                      STORE put) {
  const ptrdiff_t mx = d.m[2];
  for (ptrdiff_t i = 0; i < mx;) {
    const ptrdiff_t at = i * d.stride[2] - d.before[2];
    if (i + BLOCK_OUTPUTS <= mx && have_all_taps(d, i, BLOCK_OUTPUTS)) {
      sum<BLOCK_OUTPUTS, VECTORS>(d, lines, count, at, 0, d.k[2], map, out + i * d.f, get, put);
      i += BLOCK_OUTPUTS;
    } else {
      const Taps taps(d, 2, i);
      sum<1, VECTORS>(d, lines, count, at, taps.first, taps.last, map, out + i * d.f, get, put);
      i++;
    }
  }
}

template <class E>
void line(const Depthwise &d, const Line<E> *lines, ptrdiff_t count, float *out) {
  const auto get = [](const auto *p) ALWAYS_LAMBDA { return load(p); };
  const auto put = [](float *p, V v) ALWAYS_LAMBDA { store(p, v); };
  ptrdiff_t map = 0;
  for (; map + 2 * W <= d.f; map += 2 * W) some_maps<2>(d, lines, count, map, out, get, put);
  for (; map + W <= d.f; map += W) some_maps<1>(d, lines, count, map, out, get, put);
  if (map == d.f) return;
  if (d.f >= W) return some_maps<1>(d, lines, count, d.f - W, out, get, put);  // some maps are computed twice
  const int few = (int)d.f;
  some_maps<1>(d, lines, count, 0, out, [few](const auto *p) ALWAYS_LAMBDA { return load_part(p, few); },
               [few](float *p, V v) ALWAYS_LAMBDA { store_part(p, v, few); });
}

template <class E>
int64_t units(const Depthwise &d, float *scratch, int64_t lo, int64_t hi) {
  const E *const x = static_cast<const E *>(d.x);
  Line<E> lines[MOST_LINES];
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit % d.m[0], block = unit / d.m[0] * d.lines;
    const Taps planes(d, 0, z);
    for (ptrdiff_t y = block; y < least(block + d.lines, d.m[1]); y++) {
      const Taps rows(d, 1, y);
      ptrdiff_t count = 0;
      for (ptrdiff_t dz = planes.first; dz < planes.last; dz++) {
        for (ptrdiff_t dy = rows.first; dy < rows.last; dy++) {
          const ptrdiff_t plane = z * d.stride[0] - d.before[0] + dz * d.dilation[0];
          const ptrdiff_t row = y * d.stride[1] - d.before[1] + dy * d.dilation[1];
          lines[count++] = {x + plane * d.pitch[0] + row * d.pitch[1], d.kernels + (dz * d.k[1] + dy) * d.k[2] * d.f};
        }
      }
      line(d, lines, count, scratch);
      E *const out = static_cast<E *>(d.out) + (z * d.m[1] + y) * d.m[2] * d.f;
      bad += end_line(d.ending, {scratch, d.m[2], d.f, d.ending.addend.at<E>(z, y, 0), out}, d.f);
    }
  }
  if (d.ending.past) fence();
  return bad;
}

}  // namespace

// Computes units [lo, hi): (block of lines, plane) of outputs. `scratch` holds a line of outputs. Returns how many
// values are infinite or not a number before the function.
EXPORT int64_t znnpy_depthwise(const Depthwise *depthwise, float *scratch, int64_t lo, int64_t hi) {
  return with_type(depthwise->ending.bf16,
                   [&](auto type) { return units<decltype(type)>(*depthwise, scratch, lo, hi); });
}
