// Moments and maxima of the maps of a whole image, and its values with another mean and variance; see
// graph_norm_lanes.py.
//
// A block of voxels is read twice while it is in the cache: for the means of its maps, and for the sums of squared
// deviations from these. Blocks are joined in double precision, so that no large numbers cancel.
#include "norm.hpp"

#include <cmath>
#include <type_traits>

#include "activations.hpp"
#include "rows.hpp"

using namespace znnpy;

namespace {

constexpr ptrdiff_t SPARE = 16;  // floats behind each array of a buffer, as in graph_norm_lanes.py

// How values are read and written: a vector, or one value at the end of a row.
struct Whole {
  template <class E>
  static ALWAYS V get(const E *p) { return load(p); }
  static ALWAYS void put(float *p, V v) { store(p, v); }
};
struct Single {
  template <class E>
  static ALWAYS V get(const E *p) { return broadcast_at(p); }
  static ALWAYS void put(float *p, V v) { *p = v[0]; }
};

// Calls each(part, i, at) for values of rows of `row` floats: at place i of their row, and at place `at` of all.
template <class EACH>
ALWAYS void by_rows(ptrdiff_t floats, ptrdiff_t row, EACH each) {
  for (ptrdiff_t first = 0; first < floats; first += row) {
    const ptrdiff_t size = least(row, floats - first);
    ptrdiff_t i = 0;
    for (; i + W <= size; i += W) each(Whole(), i, first + i);
    for (; i < size; i++) each(Single(), i, first + i);
  }
}

// Calls column(part, at, vectors) for columns of all places of a row: some vectors side by side, then one, then values.
template <class COLUMN>
ALWAYS void by_columns(ptrdiff_t row, COLUMN column) {
  ptrdiff_t i = 0;
  for (; i + 4 * W <= row; i += 4 * W) column(Whole(), i, std::integral_constant<int, 4>());
  for (; i + W <= row; i += W) column(Whole(), i, std::integral_constant<int, 1>());
  for (; i < row; i++) column(Single(), i, std::integral_constant<int, 1>());
}

// Sums up rows: into sum[i] what is at place i of them, less centre[i] if there is one, and into squares[i] its square.
template <bool CENTRED, class E>
ALWAYS void sum_rows(const E *x, ptrdiff_t floats, ptrdiff_t row, const float *centre, float *sum, float *squares) {
  const ptrdiff_t whole = floats / row * row;
  by_columns(row, [&](auto part, ptrdiff_t i, auto vectors) ALWAYS_LAMBDA {
    constexpr int N = decltype(vectors)::value;
    V middle[N] = {}, sums[N] = {}, of_squares[N] = {};
    for (int v = 0; CENTRED && v < N; v++) middle[v] = part.get(centre + i + v * W);
    for (ptrdiff_t at = i; at < whole; at += row)
      for (int v = 0; v < N; v++) {
        const V value = part.get(x + at + v * W) - middle[v];
        sums[v] += value;
        if (CENTRED) of_squares[v] += value * value;
      }
    for (int v = 0; v < N; v++) {
      part.put(sum + i + v * W, sums[v]);
      if (CENTRED) part.put(squares + i + v * W, of_squares[v]);
    }
  });
  by_rows(floats - whole, row, [&](auto part, ptrdiff_t i, ptrdiff_t at) ALWAYS_LAMBDA {
    const V value = CENTRED ? part.get(x + whole + at) - part.get(centre + i) : part.get(x + whole + at);
    part.put(sum + i, part.get(sum + i) + value);
    if (CENTRED) part.put(squares + i, part.get(squares + i) + value * value);
  });
}

// Joins the maps of `repeat` voxels (a power of two) with `both`, by halves.
template <class BOTH>
ALWAYS void fold(float *x, ptrdiff_t f, ptrdiff_t repeat, BOTH both) {
  for (ptrdiff_t half = repeat / 2; half > 0; half /= 2)
    by_rows(half * f, half * f, [&](auto part, ptrdiff_t i, ptrdiff_t) ALWAYS_LAMBDA {
      part.put(x + i, both(part.get(x + i), part.get(x + half * f + i)));
    });
}

ALWAYS void repeated(const float *maps, const Norm &p, float *row) {
  for (ptrdiff_t i = 0; i < p.repeat * p.f; i++) row[i] = maps[i % p.f];
}

// Calls use(values) for some voxels whose maps are side by side: in place, or copied to `buffer`.
template <class E, class USE>
ALWAYS void with_voxels(const Norm &p, ptrdiff_t first, ptrdiff_t count, float *buffer, USE use) {
  const E *const x = static_cast<const E *>(p.x);
  const ptrdiff_t f = p.f, line = p.n[2];
  if (p.pitch[2] == f && p.pitch[1] == f * line && p.pitch[0] == f * line * p.n[1]) return use(x + first * f);
  for (ptrdiff_t done = 0; done < count;) {
    const ptrdiff_t voxel = first + done, at = voxel % line, y = voxel / line, run = least(count - done, line - at);
    const E *const from = x + y / p.n[1] * p.pitch[0] + y % p.n[1] * p.pitch[1] + at * p.pitch[2];
    if (p.pitch[2] == f) copy_values(from, buffer + done * f, run * f);
    else
      for (ptrdiff_t i = 0; i < run; i++) copy_maps(from + i * p.pitch[2], buffer + (done + i) * f, f);
    done += run;
  }
  use(static_cast<const float *>(buffer));
}

// The arrays of a buffer: a block, and some rows of maps.
struct Rows {
  float *block, *row[3];
  ALWAYS Rows(const Norm &p, float *buffer) : block(buffer) {
    float *next = buffer + p.block * p.f + SPARE;
    for (int i = 0; i < 3; i++, next += p.repeat * p.f + SPARE) row[i] = next;
  }
};

// Joins the moments of the maps of one block with those of the blocks before it (Chan, Golub and LeVeque 1979).
template <class E>
ALWAYS void add_moments(const Norm &p, const E *x, ptrdiff_t count, const Rows &rows, ptrdiff_t before, double *found) {
  const ptrdiff_t f = p.f, floats = count * f, row = p.repeat * f;
  float *const centre = rows.row[0], *const sum = rows.row[1], *const squares = rows.row[2];
  const auto plus = [](V a, V b) ALWAYS_LAMBDA { return a + b; };
  sum_rows<false>(x, floats, row, nullptr, centre, nullptr);
  fold(centre, f, p.repeat, plus);
  for (ptrdiff_t map = 0; map < f; map++) centre[map] /= (float)count;
  for (ptrdiff_t i = f; i < row; i++) centre[i] = centre[i - f];
  sum_rows<true>(x, floats, row, centre, sum, squares);
  fold(sum, f, p.repeat, plus);
  fold(squares, f, p.repeat, plus);
  const double one = 1.0 / (double)count, share = (double)count / (double)(before + count);
  double *const mean = found, *const deviations = found + f;
  for (ptrdiff_t map = 0; map < f; map++) {
    const double rest = sum[map] * one, away = (centre[map] + rest) - mean[map];
    mean[map] += away * share;
    deviations[map] += squares[map] - rest * sum[map] + away * away * share * (double)before;
  }
}

template <class E>
ALWAYS void add_maxima(const Norm &p, const E *x, ptrdiff_t count, const Rows &rows, double *found) {
  const ptrdiff_t f = p.f, row = p.repeat * f;
  float *const largest = rows.row[0];
  for (ptrdiff_t i = 0; i < row; i++) largest[i] = i < f ? (float)found[i] : -INFINITY;
  by_rows(count * f, row, [&](auto part, ptrdiff_t i, ptrdiff_t at) ALWAYS_LAMBDA {
    part.put(largest + i, larger_or_nan(part.get(largest + i), part.get(x + at)));
  });
  fold(largest, f, p.repeat, [](V a, V b) ALWAYS_LAMBDA { return larger_or_nan(a, b); });
  for (ptrdiff_t map = 0; map < f; map++) found[map] = largest[map];
}

// Calls each(first, count) for the blocks of a unit.
template <class EACH>
ALWAYS void by_blocks(const Norm &p, ptrdiff_t unit, EACH each) {
  const ptrdiff_t end = least(p.n[0] * p.n[1] * p.n[2], (unit + 1) * p.unit);
  for (ptrdiff_t first = unit * p.unit; first < end; first += p.block) each(first, least(p.block, end - first));
}

template <class E>
void moments(const Norm &p, float *buffer, int64_t lo, int64_t hi) {
  const Rows rows(p, buffer);
  const ptrdiff_t f = p.f, numbers = p.how == MAXIMA ? f : 2 * f;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    double *const found = p.found + unit * numbers;
    for (ptrdiff_t i = 0; i < numbers; i++) found[i] = p.how == MAXIMA ? -INFINITY : 0.0;
    by_blocks(p, unit, [&](ptrdiff_t first, ptrdiff_t count) ALWAYS_LAMBDA {
      with_voxels<E>(p, first, count, rows.block, [&](const auto *x) ALWAYS_LAMBDA {
        if (p.how == MAXIMA) add_maxima(p, x, count, rows, found);
        else add_moments(p, x, count, rows, first - unit * p.unit, found);
      });
    });
  }
}

template <class E>
int64_t normalised(const Norm &p, float *buffer, int64_t lo, int64_t hi) {
  const Rows rows(p, buffer);
  const ptrdiff_t f = p.f;
  const float *const shift = rows.row[0], *const factor = rows.row[1], *const offset = rows.row[2];
  repeated(p.shift, p, rows.row[0]);
  repeated(p.factor, p, rows.row[1]);
  repeated(p.offset, p, rows.row[2]);
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    by_blocks(p, unit, [&](ptrdiff_t first, ptrdiff_t count) ALWAYS_LAMBDA {
      const ptrdiff_t floats = count * f;
      float *const block = rows.block;
      with_voxels<E>(p, first, count, block, [&](const auto *x) ALWAYS_LAMBDA {
        by_rows(floats, p.repeat * f, [&](auto part, ptrdiff_t i, ptrdiff_t at) ALWAYS_LAMBDA {
          const V away = part.get(x + at) - part.get(shift + i);
          part.put(block + at, away * part.get(factor + i) + part.get(offset + i));
        });
      });
      bad += not_finite(block, floats);
      E *const out = static_cast<E *>(p.out) + first * f;
      if (p.function == SOFTMAX) softmax(block, count, f);
      if (p.function == SOFTMAX || p.function == NONE) copy_out(block, out, floats, p.past);
      else activate<float, E>(p.function, (float)p.a, (float)p.b, block, out, floats, p.past);
    });
  }
  if (p.past) fence();
  return bad;
}

}  // namespace

// Finds the moments or the maxima of units [lo, hi).
EXPORT void znnpy_moments(const Norm *norm, void *buffer, int64_t lo, int64_t hi) {
  with_type(norm->bf16, [&](auto type) {
    moments<decltype(type)>(*norm, static_cast<float *>(buffer), lo, hi);
    return 0;
  });
}

// Computes the output of units [lo, hi). Returns how many values before the function are infinite or not a number.
EXPORT int64_t znnpy_norm(const Norm *norm, void *buffer, int64_t lo, int64_t hi) {
  return with_type(norm->bf16, [&](auto type) {
    return normalised<decltype(type)>(*norm, static_cast<float *>(buffer), lo, hi);
  });
}
