// Maxima over windows in one pass over memory; see pool_lanes.py, which owns the memory and divides the work.
//
// A column of the image, narrow enough for the cache, is followed along z. For each line of its planes the maximum is
// taken over the window's planes, over its lines (the last ones are kept in a ring), and over its voxels straight into
// the output.
#include "pool.hpp"
#include "rows.hpp"

namespace znnpy {
namespace {

constexpr int AT_ONCE = 4;  // vectors, since one maximum waits for the one before

// Sets target[i] to the maximum of `count` arrays source[i], source[pitch + i], ..; AHEAD: the array after them is used
// soon.
template <bool STREAM, bool AHEAD, class E>
ALWAYS void over(const E *source, ptrdiff_t pitch, ptrdiff_t count, E *target, ptrdiff_t values) {
  const auto vectors = [&](auto number, ptrdiff_t at) ALWAYS_LAMBDA {
    V most[number];
    for (int v = 0; v < number; v++) {
      most[v] = load(source + at + v * W);
      if (AHEAD) __builtin_prefetch(source + count * pitch + at + v * W, 0, 2);
    }
    for (ptrdiff_t j = 1; j < count; j++)
      for (int v = 0; v < number; v++) most[v] = larger_or_nan(most[v], load(source + j * pitch + at + v * W));
    for (int v = 0; v < number; v++) {
      if (STREAM) stream_exact(target + at + v * W, most[v]);
      else store_exact(target + at + v * W, most[v]);
    }
  };
  ptrdiff_t i = 0;
  for (; i + AT_ONCE * W <= values; i += AT_ONCE * W) vectors(std::integral_constant<int, AT_ONCE>{}, i);
  for (; i + W <= values; i += W) vectors(std::integral_constant<int, 1>{}, i);
  if (i == values) return;
  const int left = (int)(values - i);
  V most = load_part(source + i, left);
  for (ptrdiff_t j = 1; j < count; j++) most = larger_or_nan(most, load_part(source + j * pitch + i, left));
  store_part(target + i, most, left);
}

// Handles one voxel after the other, `spacing` voxels from one to the next in the source, neighbours in the target.
template <bool STREAM, class E>
void spread(const E *source, ptrdiff_t spacing, ptrdiff_t window, E *target, ptrdiff_t voxels, ptrdiff_t f) {
  if (spacing == 1) return over<STREAM, false>(source, f, window, target, voxels * f);
  for (ptrdiff_t i = 0; i < voxels; i++)
    over<STREAM, false>(source + i * spacing * f, f, window, target + i * f, f);
}

template <class E>
void columns(const Pooling &t, E *scratch, int64_t lo, int64_t hi) {
  const ptrdiff_t f = t.f, row = t.n[2] * f, plane = t.n[1] * row;
  const ptrdiff_t blocks = (t.m[1] + t.lines - 1) / t.lines, runs = (t.m[2] + t.run - 1) / t.run;
  const ptrdiff_t out_row = t.m[2] / t.into[2] * f, out_plane = t.m[1] / t.into[1] * out_row;
  const ptrdiff_t pitch = ((t.run - 1) * t.step[2] + t.p[2]) * f;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t first_x = unit % runs * t.run, first_y = unit / runs % blocks * t.lines;
    const ptrdiff_t image = unit / (runs * blocks);
    const ptrdiff_t width = least(t.run, t.m[2] - first_x), last_y = least(first_y + t.lines, t.m[1]);
    const ptrdiff_t values = ((width - 1) * t.step[2] + t.p[2]) * f;
    for (ptrdiff_t z = 0; z < t.m[0]; z++) {
      const E *x = static_cast<const E *>(t.x) + image * t.x_image + z * t.step[0] * plane + first_x * t.step[2] * f;
      ptrdiff_t given = first_y * t.step[1];  // lines whose maximum over planes is in the ring
      for (ptrdiff_t y = first_y; y < last_y; y++) {
        const E *lines = scratch;
        if (t.p[1] == 1 && t.p[0] == 1) {
          lines = x + y * t.step[1] * row;
        } else {
          for (; given < y * t.step[1] + t.p[1]; given++)
            over<false, true>(x + given * row, plane, t.p[0], scratch + given % t.p[1] * pitch, values);
          if (t.p[1] > 1) {
            over<false, false>(scratch, pitch, t.p[1], scratch + t.p[1] * pitch, values);
            lines = scratch + t.p[1] * pitch;
          }
        }
        const ptrdiff_t fragments = ((image * t.into[0] + z % t.into[0]) * t.into[1] + y % t.into[1]) * t.into[2];
        for (ptrdiff_t o = 0; o < least(t.into[2], width); o++) {
          E *out = static_cast<E *>(t.out) + (fragments + o) * t.out_image + z / t.into[0] * out_plane +
                   y / t.into[1] * out_row + first_x / t.into[2] * f;
          const ptrdiff_t voxels = (width - o + t.into[2] - 1) / t.into[2];
          const E *source = lines + o * f;
          const ptrdiff_t spacing = t.into[2] * t.step[2];
          if (t.past == WHOLE_LINES) {
            spread<true>(source, spacing, t.p[2], out, voxels, f);
          } else if (t.past == ANY_LINES) {
            E *const ready = scratch + t.ready;
            spread<false>(source, spacing, t.p[2], ready, voxels, f);
            copy_past(ready, out, voxels * f);
          } else {
            spread<false>(source, spacing, t.p[2], out, voxels, f);
          }
        }
      }
    }
  }
  if (t.past) fence();
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

// Computes columns [lo, hi): (image, block of lines, run of voxels). `scratch` holds p.y lines of the input of `run`
// windows, their maximum, and from `ready` on the output of a line, all of the type of the input.
EXPORT void znnpy_pool(const Pooling *pooling, void *scratch, int64_t lo, int64_t hi) {
  with_type(pooling->bf16, [&](auto type) { columns(*pooling, static_cast<decltype(type) *>(scratch), lo, hi); });
}
