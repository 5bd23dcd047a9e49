// Direct convolution with output channels in SIMD lanes; see conv_direct_lanes.py, which owns the memory and divides
// the work.
//
// A block of neighbouring outputs of a line, times a panel of one to three blocks of channels, is summed in registers:
// per tap the kernels of the panel are loaded, and the input of each voxel is broadcast to a vector. In channels-last
// data the inputs (x, fin) of a voxel along x are one run.
#include "direct.hpp"
#include "vector.hpp"

namespace znnpy {
namespace {

constexpr int PER_BLOCK = LANES / W;

// The most voxels summed at once with so many blocks of channels, limited by the number of registers.
constexpr int voxels_with(int blocks) { return W == LANES ? 24 / (blocks < 2 ? 2 : blocks) : 6 / blocks; }

constexpr ptrdiff_t CHUNK = 256;  // taps: longer sums would round more than those of other methods

struct Line {  // one panel of the outputs of a line
  const float *kernels, *bias;
  ptrdiff_t fin, fout;
  const int64_t *offsets;  // from an output's first input to that of each tap
  ptrdiff_t taps, pitch;  // pitch: floats of the kernels from tap to tap
  int lanes;  // lanes of the panel's last block
  bool relu, stream;
};

// Sums and finishes VOXELS outputs; `finite` stays finite while they are. COUNT: only counts values that are not
// finite.
template <int VOXELS, int BLOCKS, bool COUNT>
ALWAYS int64_t sum(const Line l, const float *x, float *out, V *finite) {
  constexpr int VECTORS = BLOCKS * PER_BLOCK;
  V sums[VOXELS][VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    const V bias = load(l.bias + v * W);
    for (int i = 0; i < VOXELS; i++) sums[i][v] = bias;
  }
  // Only the last line of the next outputs' inputs is not in the caches yet.
  const float *const ahead = x + l.offsets[l.taps - 1] + 1 + (VOXELS - 1) * l.fin;
  for (ptrdiff_t i = 0; i < VOXELS * l.fin; i += LANES) __builtin_prefetch(ahead + i);
  const float *w = l.kernels;
  V totals[VOXELS][VECTORS];  // sums of whole chunks; not in registers
  for (ptrdiff_t first = 0;; first += CHUNK) {
    const ptrdiff_t last = l.taps - first > CHUNK ? first + CHUNK : l.taps;
    for (ptrdiff_t tap = first; tap < last; tap++, w += l.pitch) {
      const float *in = x + l.offsets[tap];
      V kernel[VECTORS];
      for (int v = 0; v < VECTORS; v++) kernel[v] = load(w + v * W);
      for (int i = 0; i < VOXELS; i++) {
        const V value = broadcast(in[i * l.fin]);
        for (int v = 0; v < VECTORS; v++) sums[i][v] += value * kernel[v];
      }
    }
    if (first > 0)
      for (int i = 0; i < VOXELS; i++)
        for (int v = 0; v < VECTORS; v++) sums[i][v] += totals[i][v];
    if (last == l.taps) break;
    for (int i = 0; i < VOXELS; i++) {
      for (int v = 0; v < VECTORS; v++) {
        totals[i][v] = sums[i][v];
        sums[i][v] = V{};
      }
    }
  }
  int64_t bad = 0;
  for (int v = 0; v < VECTORS; v++) {
    const int lanes = v < VECTORS - PER_BLOCK ? W : l.lanes - v % PER_BLOCK * W;
    if (COUNT) {
      for (int lane = 0; lane < W && lane < lanes; lane++) bad += sums[0][v][lane] * 0.0f != 0.0f;
      continue;
    }
    V checked = finite[v];
    for (int i = 0; i < VOXELS; i++) checked += sums[i][v] * 0.0f;
    finite[v] = checked;
    if (l.relu)
      for (int i = 0; i < VOXELS; i++) sums[i][v] = sums[i][v] > 0.0f ? sums[i][v] : V{};
    float *at = out + v * W;
    if (l.stream)
      for (int i = 0; i < VOXELS; i++) stream(at + i * l.fout, sums[i][v]);
    else if (lanes >= W)
      for (int i = 0; i < VOXELS; i++) store(at + i * l.fout, sums[i][v]);
    else
      for (int i = 0; i < VOXELS; i++) store_part(at + i * l.fout, sums[i][v], lanes);
  }
  return bad;
}

template <int VOXELS, int BLOCKS>
void some(const Line &l, const float *x, float *out, int voxels, V *finite) {
  if constexpr (VOXELS > 1) {
    if (voxels < VOXELS) return some<VOXELS - 1, BLOCKS>(l, x, out, voxels, finite);
  }
  sum<VOXELS, BLOCKS, false>(l, x, out, finite);
}

// Returns how many of the outputs are infinite or not a number.
template <int BLOCKS>
int64_t line(const Line &l, const float *x, float *out, ptrdiff_t outputs) {
  constexpr int MOST = voxels_with(BLOCKS);
  V finite[BLOCKS * PER_BLOCK] = {};
  const ptrdiff_t parts = (outputs + MOST - 1) / MOST;
  for (ptrdiff_t part = 0; part < parts; part++) {  // near-equal, because few sums would wait for each other
    const ptrdiff_t lo = outputs * part / parts, hi = outputs * (part + 1) / parts;
    some<MOST, BLOCKS>(l, x + lo * l.fin, out + lo * l.fout, (int)(hi - lo), finite);
  }
  bool all = true;  // kernels beyond the last channel are zero: their sums are not finite only if others are not
  for (int v = 0; v < BLOCKS * PER_BLOCK; v++)
    for (int lane = 0; lane < W; lane++) all = all && finite[v][lane] == 0.0f;
  int64_t bad = 0;
  for (ptrdiff_t i = 0; !all && i < outputs; i++) bad += sum<1, BLOCKS, true>(l, x + i * l.fin, nullptr, nullptr);
  return bad;
}

// Sets target[i] to the largest of source[i], source[pitch + i], ..; target may be source.
void maxima(const float *source, ptrdiff_t pitch, ptrdiff_t count, float *target, ptrdiff_t floats) {
  for (ptrdiff_t i = 0; i < floats; i += W) {
    V v = load(source + i);
    for (ptrdiff_t d = 1; d < count; d++) v = larger(v, load(source + d * pitch + i));
    store(target + i, v);
  }
}

struct Windows {  // some rows and columns of windows of one plane of an image
  const float *planes;  // (pz, rows, columns, blocks, lane): maxima over y and x
  ptrdiff_t plane;      // floats from plane to plane
  ptrdiff_t z, y, x;    // position of the first window
  ptrdiff_t rows, columns;
};

// Writes maxima over planes, each into its fragment; `out` is the image's first.
void scatter(const Direct &d, const Windows &w, float *out, bool streams) {
  const ptrdiff_t pz = d.p[0], py = d.p[1], px = d.p[2], voxel = (d.fout + LANES - 1) / LANES * LANES;
  const ptrdiff_t qy = (d.n[1] - d.k[1] + 1) / py, qx = (d.n[2] - d.k[2] + 1) / px;
  for (ptrdiff_t row = 0; row < w.rows; row++) {
    const ptrdiff_t y = w.y + row, fragment = (w.z % pz * py + y % py) * px;
    float *const lines = out + ((w.z / pz * qy + y / py) * qx) * d.fout;
    for (ptrdiff_t column = 0; column < w.columns; column++) {
      const ptrdiff_t x = w.x + column;
      float *const target = lines + (fragment + x % px) * d.out_image + x / px * d.fout;
      const float *const source = w.planes + (row * w.columns + column) * voxel;
      for (ptrdiff_t lane = 0; lane < d.fout; lane += W) {
        V v = load(source + lane);
        for (ptrdiff_t i = 1; i < pz; i++) v = larger(v, load(source + i * w.plane + lane));
        if (streams) stream(target + lane, v);
        else if (d.fout - lane >= W) store(target + lane, v);
        else store_part(target + lane, v, (int)(d.fout - lane));
      }
    }
  }
}

// Returns the blocks of channels in the next panel of `left` blocks: 3, unless that leaves a single one.
int panel(ptrdiff_t left) { return left == 4 ? 2 : left >= 3 ? 3 : (int)left; }

}  // namespace
}  // namespace znnpy

using namespace znnpy;

namespace {

// Computes a line of outputs, all channels, `fout` floats from one to the next; `whole`: there is space for whole
// blocks of channels.
int64_t whole_line(const Direct &d, const float *x, float *out, ptrdiff_t outputs, ptrdiff_t fout, bool whole) {
  const ptrdiff_t blocks = (d.fout + LANES - 1) / LANES, taps = d.k[0] * d.k[1] * d.k[2] * d.fin;
  int64_t bad = 0;
  for (ptrdiff_t first = 0; first < blocks;) {
    const int width = panel(blocks - first), at_once = W == LANES ? width : 1;
    for (int b = 0; b < width; b += at_once) {
      const ptrdiff_t left = whole ? LANES : d.fout - (first + b + at_once - 1) * LANES;
      const Line l{d.kernels + first * LANES * taps + b * LANES,
                   d.bias + (first + b) * LANES,
                   d.fin,
                   fout,
                   d.offsets,
                   taps,
                   width * LANES,
                   (int)(left < LANES ? left : LANES),
                   d.relu != 0,
                   !whole && d.stream != 0};
      float *target = out + (first + b) * LANES;
      bad += at_once == 3   ? line<3>(l, x, target, outputs)
             : at_once == 2 ? line<2>(l, x, target, outputs)
                            : line<1>(l, x, target, outputs);
    }
    first += width;
  }
  return bad;
}

}  // namespace

// Computes lines [lo, hi) of the output, (image, z, y). Returns how many values are infinite or not a number.
EXPORT int64_t znnpy_direct(const Direct *direct, int64_t lo, int64_t hi) {
  const Direct &d = *direct;
  const ptrdiff_t mz = d.n[0] - d.k[0] + 1, my = d.n[1] - d.k[1] + 1, mx = d.n[2] - d.k[2] + 1;
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t y = unit % my, z = unit / my % mz, image = unit / (my * mz);
    const float *x = d.x + image * d.x_image + (z * d.n[1] + y) * d.n[2] * d.fin;
    float *out = d.out + image * d.out_image + (z * my + y) * mx * d.fout;
    bad += whole_line(d, x, out, mx, d.fout, false);
  }
  if (d.stream) fence();
  return bad;
}

// Computes the convolution max-pooled into fragments; values before pooling are never written. Units [lo, hi) are
// (image, rows, run of columns) of windows, each followed along z. `scratch` holds p.y lines, and p.z planes of maxima
// over y and x. Returns how many of the computed values are infinite or not a number; those on the rims of units are
// computed twice.
EXPORT int64_t znnpy_direct_pool(const Direct *direct, float *scratch, int64_t lo, int64_t hi) {
  const Direct &d = *direct;
  const ptrdiff_t pz = d.p[0], py = d.p[1], px = d.p[2], voxel = (d.fout + LANES - 1) / LANES * LANES;
  const ptrdiff_t depth = d.n[0] - d.k[0] + 1;
  const ptrdiff_t windows_y = d.n[1] - d.k[1] + 1 - (py - 1), windows_x = d.n[2] - d.k[2] + 1 - (px - 1);
  const ptrdiff_t blocks = (windows_y + d.rows - 1) / d.rows, runs = (windows_x + d.run - 1) / d.run;
  const ptrdiff_t line_floats = (d.run + px - 1) * voxel;
  float *const planes = scratch + py * line_floats;
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t first_x = unit % runs * d.run, first_y = unit / runs % blocks * d.rows, image = unit / (runs * blocks);
    const ptrdiff_t rows = d.rows < windows_y - first_y ? d.rows : windows_y - first_y;
    const ptrdiff_t columns = d.run < windows_x - first_x ? d.run : windows_x - first_x;
    const ptrdiff_t line = columns * voxel, plane = rows * line;
    for (ptrdiff_t z = 0; z < depth; z++) {
      for (ptrdiff_t y = 0; y < rows + py - 1; y++) {
        const float *x = d.x + image * d.x_image + ((z * d.n[1] + first_y + y) * d.n[2] + first_x) * d.fin;
        float *const ring = scratch + y % py * line_floats;
        bad += whole_line(d, x, ring, columns + px - 1, voxel, true);
        maxima(ring, voxel, px, ring, line);
        if (y >= py - 1) maxima(scratch, line_floats, py, planes + z % pz * plane + (y - (py - 1)) * line, line);
      }
      if (z < pz - 1) continue;
      const Windows w{planes, plane, z - (pz - 1), first_y, first_x, rows, columns};
      scatter(d, w, d.out + image * pz * py * px * d.out_image, d.stream != 0);
    }
  }
  if (d.stream) fence();
  return bad;
}
