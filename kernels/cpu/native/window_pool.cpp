// Max- and average pooling with any window, stride and padding in one pass; see graph_pool_lanes.py.
//
// The lines of a window are joined into one line in L1, and its voxels into the outputs. Padding is left out.
#include "window_pool.hpp"

#include <type_traits>

#include "rows.hpp"

using namespace znnpy;

namespace {

constexpr int MOST_LINES = 512;  // lines of a window, as in graph_pool_lanes.py

struct Maximum {
  static ALWAYS V join(V a, V b) { return larger_or_nan(a, b); }
  static ALWAYS float join(float a, float b) { return a > b || a != a ? a : b; }
  static float start() { return -__builtin_inff(); }
};

struct Sum {
  static ALWAYS V join(V a, V b) { return a + b; }
  static ALWAYS float join(float a, float b) { return a + b; }
  static float start() { return 0.0f; }
};

// Sets to[i] to the result over from[0][i], from[1][i], ..; the values times `factor`. ROOM: whole vectors may be read
// and written. What lies `ahead` values further is used soon, unless that is 0.
template <class HOW, bool SCALE, bool ROOM, class FROM>
ALWAYS void over(FROM from, ptrdiff_t count, float *to, ptrdiff_t floats, float factor, ptrdiff_t ahead = 0) {
  const auto vectors = [&](auto number, ptrdiff_t at) ALWAYS_LAMBDA {
    V sums[number];
    for (int v = 0; v < number; v++) sums[v] = load(from(0) + at + v * W);
    for (ptrdiff_t j = 1; j < count; j++)
      for (int v = 0; v < number; v++) sums[v] = HOW::join(sums[v], load(from(j) + at + v * W));
    for (ptrdiff_t j = 0; ahead && j < count; j++)
      for (int v = 0; v < number; v += 64 / (W * sizeof(*from(0))))
        __builtin_prefetch(from(j) + at + v * W + ahead, 0, 2);
    for (int v = 0; v < number; v++) store(to + at + v * W, SCALE ? sums[v] * factor : sums[v]);
  };
  ptrdiff_t i = 0;
  for (; i + 4 * W <= floats; i += 4 * W) vectors(std::integral_constant<int, 4>{}, i);
  for (; i + W <= floats; i += W) vectors(std::integral_constant<int, 1>{}, i);
  if (ROOM && i < floats) return vectors(std::integral_constant<int, 1>{}, i);
  for (; i < floats; i++) {
    float sum = widen(from(0)[i]);
    for (ptrdiff_t j = 1; j < count; j++) sum = HOW::join(sum, widen(from(j)[i]));
    to[i] = SCALE ? sum * factor : sum;
  }
}

struct Span {  // the voxels of a window that are in the image
  ptrdiff_t first, last;

  Span(const WindowPool &t, int axis, ptrdiff_t out)
      : first(out * t.stride[axis] - t.before[axis]), last(least(first + t.window[axis], t.n[axis])) {
    first = most(first, 0);
    last = most(first, last);
  }
};

// Computes the outputs [first, last) of a line; `lines` are those of its windows, and `scratch` holds one of them and
// the outputs, each followed by room for a vector.
template <class HOW, class E>
void line(const WindowPool &t, const E *const *lines, ptrdiff_t count, ptrdiff_t first, ptrdiff_t last, float *scratch,
          E *out, float divisor) {
  const bool average = std::is_same<HOW, Sum>::value;
  const ptrdiff_t f = t.f, begin = Span(t, 2, first).first, end = Span(t, 2, last - 1).last;
  const ptrdiff_t voxels = most(end - begin, 0);
  float *const to = scratch + ((t.run - 1) * t.stride[2] + t.window[2]) * f + LANES;
  if (count > 0) {
    const bool neighbours = t.pitch[2] == f;
    // Lines of bfloat16 are short: without a hint most of the time is spent waiting for their first voxels.
    const ptrdiff_t ahead = std::is_same<E, Bf16>::value ? t.stride[1] * t.pitch[1] : 0;
    const ptrdiff_t runs = neighbours ? 1 : voxels, floats = neighbours ? voxels * f : f;
    for (ptrdiff_t i = 0; i < runs; i++) {
      const ptrdiff_t at = (begin + i) * t.pitch[2];
      over<HOW, false, false>([&](ptrdiff_t j) ALWAYS_LAMBDA { return lines[j] + at; }, count, scratch + i * f, floats, 1.0f,
                              ahead);
    }
  }
  const auto outputs = [&](ptrdiff_t i, ptrdiff_t number) {
    const Span span(t, 2, i);
    const ptrdiff_t taps = count > 0 ? span.last - span.first : 0;
    float *const target = to + (i - first) * f;
    if (taps == 0) {
      for (ptrdiff_t map = 0; map < number * f; map++) target[map] = HOW::start();
      return;
    }
    const float *const source = scratch + (span.first - begin) * f;
    const auto from = [&](ptrdiff_t j) ALWAYS_LAMBDA { return source + j * f; };
    if (average) over<HOW, true, true>(from, taps, target, number * f, 1.0f / (divisor * t.counts[2][i]));
    else over<HOW, false, true>(from, taps, target, number * f, 1.0f);
  };
  for (ptrdiff_t i = first; i < last;) {
    ptrdiff_t number = 1;
    const ptrdiff_t at = i - t.before[2];
    if (t.stride[2] == 1 && at >= 0)  // outputs whose windows are whole are neighbours in every tap
      number = most(1, least(last - i, t.n[2] - t.window[2] - at + 1));
    outputs(i, number);
    i += number;
  }
  copy_out(to, out, (last - first) * f, t.past);
}

template <class HOW, class E>
void run(const WindowPool &t, float *scratch, ptrdiff_t lo, ptrdiff_t hi) {
  const E *lines[MOST_LINES];
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t z = unit % t.m[0], block = unit / t.m[0] * t.lines;
    const Span planes(t, 0, z);
    for (ptrdiff_t y = block; y < least(block + t.lines, t.m[1]); y++) {
      const Span rows(t, 1, y);
      ptrdiff_t count = 0;
      for (ptrdiff_t plane = planes.first; plane < planes.last; plane++)
        for (ptrdiff_t row = rows.first; row < rows.last; row++)
          lines[count++] = static_cast<const E *>(t.x) + plane * t.pitch[0] + row * t.pitch[1];
      E *const out = static_cast<E *>(t.out) + (z * t.m[1] + y) * t.m[2] * t.f;
      const float divisor = std::is_same<HOW, Sum>::value ? t.counts[0][z] * t.counts[1][y] : 1.0f;
      for (ptrdiff_t first = 0; first < t.m[2]; first += t.run)
        line<HOW, E>(t, lines, count, first, least(first + t.run, t.m[2]), scratch, out + first * t.f, divisor);
    }
  }
  if (t.past) fence();
}

}  // namespace

// Computes units [lo, hi): (block of lines, plane) of outputs.
EXPORT void znnpy_window_pool(const WindowPool *pooling, float *scratch, int64_t lo, int64_t hi) {
  with_type(pooling->bf16, [&](auto type) {
    if (pooling->average) run<Sum, decltype(type)>(*pooling, scratch, lo, hi);
    else run<Maximum, decltype(type)>(*pooling, scratch, lo, hi);
  });
}
