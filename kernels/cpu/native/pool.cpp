// Maxima over windows in one pass over memory; see pool_lanes.py, which owns the memory and cuts the work into shares.
//
// A column of the image, narrow enough for the cache, is followed along z. Of its planes, per line: the maximum over the
// window's planes, over its lines (the last ones are kept in a ring), over its voxels straight into the output.
#include "pool.hpp"
#include "vector.hpp"

namespace znnpy {
namespace {

ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

// The larger one; not a number if any of them is not.
ALWAYS V larger(V a, V b) {
  const V most = a > b ? a : b;  // b where any is not a number
  return a == a ? most : a;
}
ALWAYS float larger(float a, float b) {
  const float most = a > b ? a : b;
  return a == a ? most : a;
}

// target[i] = the maximum of count arrays source[i], source[pitch + i], ..
template <bool STREAM>
ALWAYS void over(const float *source, ptrdiff_t pitch, ptrdiff_t count, float *target, ptrdiff_t floats) {
  ptrdiff_t i = 0;
  for (; i + W <= floats; i += W) {
    V most = load(source + i);
    for (ptrdiff_t j = 1; j < count; j++) most = larger(most, load(source + j * pitch + i));
    if (STREAM) stream(target + i, most);
    else store(target + i, most);
  }
  if (i == floats) return;
  if (i > 0) {  // the last vector begins within the one before; lines that are streamed end with a vector
    V most = load(source + floats - W);
    for (ptrdiff_t j = 1; j < count; j++) most = larger(most, load(source + j * pitch + floats - W));
    return store(target + floats - W, most);
  }
  for (; i < floats; i++) {
    float most = source[i];
    for (ptrdiff_t j = 1; j < count; j++) most = larger(most, source[j * pitch + i]);
    target[i] = most;
  }
}

// One voxel after the other, `apart` voxels from each other in the source, neighbours in the target.
template <bool STREAM>
void spread(const float *source, ptrdiff_t apart, ptrdiff_t window, float *target, ptrdiff_t voxels, ptrdiff_t f) {
  if (apart == 1) return over<STREAM>(source, f, window, target, voxels * f);
  for (ptrdiff_t i = 0; i < voxels; i++) over<STREAM>(source + i * apart * f, f, window, target + i * f, f);
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

// Columns [lo, hi): (image, block of lines, run of voxels). `room` holds p.y + 1 lines of run windows.
EXPORT void znnpy_pool(const Pooling *pooling, float *room, int64_t lo, int64_t hi) {
  const Pooling &t = *pooling;
  const ptrdiff_t f = t.f, row = t.n[2] * f, plane = t.n[1] * row;
  const ptrdiff_t blocks = (t.m[1] + t.lines - 1) / t.lines, runs = (t.m[2] + t.run - 1) / t.run;
  const ptrdiff_t out_row = t.m[2] / t.into[2] * f, out_plane = t.m[1] / t.into[1] * out_row;
  const ptrdiff_t pitch = ((t.run - 1) * t.step[2] + t.p[2]) * f;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t first_x = unit % runs * t.run, first_y = unit / runs % blocks * t.lines;
    const ptrdiff_t image = unit / (runs * blocks);
    const ptrdiff_t width = least(t.run, t.m[2] - first_x), last_y = least(first_y + t.lines, t.m[1]);
    const ptrdiff_t floats = ((width - 1) * t.step[2] + t.p[2]) * f;
    for (ptrdiff_t z = 0; z < t.m[0]; z++) {
      const float *x = t.x + image * t.x_image + z * t.step[0] * plane + first_x * t.step[2] * f;
      ptrdiff_t given = first_y * t.step[1];  // lines whose maximum over planes is in the ring
      for (ptrdiff_t y = first_y; y < last_y; y++) {
        const float *lines = room;
        if (t.p[1] == 1 && t.p[0] == 1) {
          lines = x + y * t.step[1] * row;
        } else {
          for (; given < y * t.step[1] + t.p[1]; given++)
            over<false>(x + given * row, plane, t.p[0], room + given % t.p[1] * pitch, floats);
          if (t.p[1] > 1) {
            over<false>(room, pitch, t.p[1], room + t.p[1] * pitch, floats);
            lines = room + t.p[1] * pitch;
          }
        }
        const ptrdiff_t fragments = ((image * t.into[0] + z % t.into[0]) * t.into[1] + y % t.into[1]) * t.into[2];
        for (ptrdiff_t o = 0; o < least(t.into[2], width); o++) {
          float *out = t.out + (fragments + o) * t.out_image + z / t.into[0] * out_plane + y / t.into[1] * out_row +
                       first_x / t.into[2] * f;
          const ptrdiff_t voxels = (width - o + t.into[2] - 1) / t.into[2];
          const float *source = lines + o * f;
          if (t.stream) spread<true>(source, t.into[2] * t.step[2], t.p[2], out, voxels, f);
          else spread<false>(source, t.into[2] * t.step[2], t.p[2], out, voxels, f);
        }
      }
    }
  }
  if (t.stream) _mm_sfence();
}
