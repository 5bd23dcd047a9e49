// The last stage of a tiled FFT convolution with fused max-pooling into fragments: values before pooling are never
// written.
//
// Per tile and block of channels, in L2: plane by plane the inverse along y and x, bias and activation as in tiled.cpp;
// the maxima over columns in place, over lines into one of p_z planes; and from plane p_z on the maxima over those,
// each into its fragment. Tiles overlap by k - 1 + p - 1, so that every window lies within one.
//
// Fragment (oz * py + oy) * px + ox of image s is output image s * P + fragment; its voxel i is the maximum of the
// window at i * p + o.
#include "activations.hpp"
#include "tiled.hpp"

namespace znnpy {
namespace {

// Computes maxima over (py, px) windows of an image with lines of `voxels` voxels, in place along x: target (rows,
// columns, lane).
void plane_maxima(float *image, ptrdiff_t voxels, ptrdiff_t py, ptrdiff_t px, float *target, ptrdiff_t rows,
                  ptrdiff_t columns) {
  const ptrdiff_t line = voxels * LANES;
  for (ptrdiff_t y = 0; y < rows + py - 1 && px > 1; y++) {
    for (ptrdiff_t x = 0; x < columns * LANES; x += W) {
      float *const at = image + y * line + x;
      V v = larger(load(at), load(at + LANES));
      for (ptrdiff_t d = 2; d < px; d++) v = larger(v, load(at + d * LANES));
      store(at, v);
    }
  }
  for (ptrdiff_t y = 0; y < rows; y++) {
    for (ptrdiff_t x = 0; x < columns * LANES; x += W) {
      const float *const at = image + y * line + x;
      V v = load(at);
      for (ptrdiff_t d = 1; d < py; d++) v = larger(v, load(at + d * line));
      store(target + y * columns * LANES + x, v);
    }
  }
}

struct Fragments {  // one plane of windows of a tile, for one block of channels
  const float *planes;  // (pz, rows, columns, lane)
  ptrdiff_t plane;      // floats from plane to plane
  ptrdiff_t z, y, x;    // position of the first window
  ptrdiff_t rows, columns;
  int lanes;
};

template <class T, bool PART, bool STREAM>
void scatter(const Tiling &t, const Fragments &f, T *out) {
  const ptrdiff_t pz = t.p[0], py = t.p[1], px = t.p[2];
  const ptrdiff_t qy = (t.n[1] - t.k[1] + 1) / py, qx = (t.n[2] - t.k[2] + 1) / px;
  for (ptrdiff_t row = 0; row < f.rows; row++) {
    const ptrdiff_t y = f.y + row, fragment = (f.z % pz * py + y % py) * px;
    T *const lines = out + ((f.z / pz * qy + y / py) * qx) * t.fout;
    for (ptrdiff_t first = 0; first < least(px, f.columns); first++) {
      const ptrdiff_t x = f.x + first;
      T *target = lines + (fragment + x % px) * t.out_image + x / px * t.fout;
      const float *source = f.planes + (row * f.columns + first) * LANES;
      for (ptrdiff_t column = first; column < f.columns; column += px, target += t.fout, source += px * LANES) {
        for (int half = 0; half < LANES; half += W) {
          V v = load(source + half);
          for (ptrdiff_t d = 1; d < pz; d++) v = larger(v, load(source + d * f.plane + half));
          if constexpr (PART) store_part(target + half, v, f.lanes - half);
          else if constexpr (STREAM) stream(target + half, v);
          else store(target + half, v);
        }
      }
    }
  }
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

// Computes units [lo, hi) of the group, one per tile and block of channels. `scratch` holds the half transformed plane
// of a tile, the plane itself, and p_z planes of maxima. Returns how many values before pooling are infinite or not a
// number.
EXPORT int64_t znnpy_tiled_pool(const Tiling *tiling, float *scratch, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  const Side &along_x = *find(t.tile[2]), &along_y = *find(t.tile[1]);
  const ptrdiff_t half = t.tile[2] / 2 + 1, blocks = blocks_of(t.fout), pz = t.p[0], py = t.p[1], px = t.p[2];
  float *const image = scratch + t.tile[1] * half * BLOCK;
  float *const planes = image + (t.step[1] + py - 1) * (t.step[2] + px - 1) * LANES;
  const bool stream = streams_out(t);
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t tile = unit / blocks, block = unit % blocks;
    const Origin at = origin(t, t.first + tile);
    const ptrdiff_t depth = least(t.step[0] + pz - 1, t.n[0] - t.k[0] + 1 - at.z);
    const ptrdiff_t rows = least(t.step[1], t.n[1] - t.k[1] + 1 - (py - 1) - at.y);
    const ptrdiff_t columns = least(t.step[2], t.n[2] - t.k[2] + 1 - (px - 1) - at.x);
    const ptrdiff_t voxels = columns + px - 1, plane = rows * columns * LANES;
    const int lanes = (int)least(LANES, t.fout - block * LANES);
    const ptrdiff_t first = at.image * pz * py * px * t.out_image + block * LANES;
    float *const out = static_cast<float *>(t.out) + first;
    Bf16 *const half_out = static_cast<Bf16 *>(t.out) + first;
    for (ptrdiff_t z = 0; z < depth; z++) {
      const float *source = t.spectra + tile * t.tile_pitch + (z * blocks + block) * BLOCK;
      along_y.inverse({source, t.column_pitch, t.tile[1] * t.column_pitch, scratch, half * BLOCK, BLOCK, (int)half, 0,
                       (int)(rows + py - 1), blocks * BLOCK});
      bad += along_x.to(image, {voxels * LANES, LANES, (int)(rows + py - 1), (int)voxels, lanes, scratch,
                                t.bias + block * LANES, t.relu != 0});
      if (t.ending.function != NONE)
        activate(t.ending.function, 0, 0, image, image, (rows + py - 1) * voxels * LANES);
      plane_maxima(image, voxels, py, px, planes + z % pz * plane, rows, columns);
      if (z < pz - 1) continue;
      const Fragments f{planes, plane, at.z + z - (pz - 1), at.y, at.x, rows, columns, lanes};
      if (t.half) scatter<Bf16, true, false>(t, f, half_out);
      else if (lanes < LANES) scatter<float, true, false>(t, f, out);
      else if (stream) scatter<float, false, true>(t, f, out);
      else scatter<float, false, false>(t, f, out);
    }
  }
  if (stream) fence();
  return bad;
}
