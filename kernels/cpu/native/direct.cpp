// Direct convolution with output channels in the lanes of the vectors; see conv_direct_lanes.py, which owns the memory and
// cuts the work into shares.
//
// A block of neighbouring outputs of a line, times a panel of one to three blocks of channels, is summed in registers:
// per tap the kernels of the panel are loaded, and the input of each voxel is spread over a vector. In channels-last
// data the inputs (x, fin) that a voxel sees along x are one run.
#include "direct.hpp"
#include "vector.hpp"

namespace znnpy {
namespace {

constexpr int PER_BLOCK = LANES / W;

// The most voxels that are summed at once with so many blocks of channels, by the registers there are.
constexpr int voxels_with(int blocks) { return W == LANES ? 24 / (blocks < 2 ? 2 : blocks) : 6 / blocks; }

constexpr ptrdiff_t CHUNK = 256;  // taps: longer sums would round more than those of other methods

struct Line {  // outputs of a line, one panel of them
  const float *kernels, *bias;
  ptrdiff_t fin, fout;
  const int64_t *offsets;  // from an output's first input to that of each tap
  ptrdiff_t taps, pitch;  // pitch: floats of the kernels from tap to tap
  int lanes;  // of the panel's last block
  bool relu, stream;
};

// Not 0 + f: that is no plain load, as it makes 0 of -0.
ALWAYS V spread(float f) { return f - V{}; }

// Sums and finishes VOXELS outputs; `finite` stays finite while they are. COUNT: only counts those that are not.
template <int VOXELS, int BLOCKS, bool COUNT>
ALWAYS int64_t sum(const Line l, const float *x, float *out, V *finite) {
  constexpr int VECTORS = BLOCKS * PER_BLOCK;
  V sums[VOXELS][VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    const V bias = load(l.bias + v * W);
    for (int i = 0; i < VOXELS; i++) sums[i][v] = bias;
  }
  // Of the next outputs' inputs only the last line is new to the caches.
  const float *const ahead = x + l.offsets[l.taps - 1] + 1 + (VOXELS - 1) * l.fin;
  for (ptrdiff_t i = 0; i < VOXELS * l.fin; i += LANES) __builtin_prefetch(ahead + i);
  const float *w = l.kernels;
  V totals[VOXELS][VECTORS];  // of whole chunks; not in registers
  for (ptrdiff_t first = 0;; first += CHUNK) {
    const ptrdiff_t last = l.taps - first > CHUNK ? first + CHUNK : l.taps;
    for (ptrdiff_t tap = first; tap < last; tap++, w += l.pitch) {
      const float *in = x + l.offsets[tap];
      V kernel[VECTORS];
      for (int v = 0; v < VECTORS; v++) kernel[v] = load(w + v * W);
      for (int i = 0; i < VOXELS; i++) {
        const V value = spread(in[i * l.fin]);
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
  for (ptrdiff_t part = 0; part < parts; part++) {  // near-equal: few sums would wait for each other
    const ptrdiff_t lo = outputs * part / parts, hi = outputs * (part + 1) / parts;
    some<MOST, BLOCKS>(l, x + lo * l.fin, out + lo * l.fout, (int)(hi - lo), finite);
  }
  bool all = true;  // kernels beyond the last channel are zero: their sums are not finite only where others are not
  for (int v = 0; v < BLOCKS * PER_BLOCK; v++)
    for (int lane = 0; lane < W; lane++) all = all && finite[v][lane] == 0.0f;
  int64_t bad = 0;
  for (ptrdiff_t i = 0; !all && i < outputs; i++) bad += sum<1, BLOCKS, true>(l, x + i * l.fin, nullptr, nullptr);
  return bad;
}

// Blocks of channels in the panel that begins when `left` are left: 3 while no single one is left over.
int panel(ptrdiff_t left) { return left == 4 ? 2 : left >= 3 ? 3 : (int)left; }

}  // namespace
}  // namespace znnpy

using namespace znnpy;

// Lines [lo, hi) of the output, (image, z, y). Returns how many values are infinite or not a number.
EXPORT int64_t znnpy_direct(const Direct *direct, int64_t lo, int64_t hi) {
  const Direct &d = *direct;
  const ptrdiff_t mz = d.n[0] - d.k[0] + 1, my = d.n[1] - d.k[1] + 1, mx = d.n[2] - d.k[2] + 1;
  const ptrdiff_t row = d.n[2] * d.fin, blocks = (d.fout + LANES - 1) / LANES, taps = d.k[0] * d.k[1] * d.k[2] * d.fin;
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t y = unit % my, z = unit / my % mz, image = unit / (my * mz);
    const float *x = d.x + image * d.x_image + (z * d.n[1] + y) * row;
    float *out = d.out + image * d.out_image + (z * my + y) * mx * d.fout;
    for (ptrdiff_t first = 0; first < blocks;) {
      const int width = panel(blocks - first), at_once = W == LANES ? width : 1;
      for (int b = 0; b < width; b += at_once) {
        const ptrdiff_t left = d.fout - (first + b + at_once - 1) * LANES;
        const Line l{d.kernels + first * LANES * taps + b * LANES,
                     d.bias + (first + b) * LANES,
                     d.fin,
                     d.fout,
                     d.offsets,
                     taps,
                     width * LANES,
                     (int)(left < LANES ? left : LANES),
                     d.relu != 0,
                     d.stream != 0};
        float *target = out + (first + b) * LANES;
        bad += at_once == 3   ? line<3>(l, x, target, mx)
               : at_once == 2 ? line<2>(l, x, target, mx)
                              : line<1>(l, x, target, mx);
      }
      first += width;
    }
  }
  if (d.stream) fence();
  return bad;
}
