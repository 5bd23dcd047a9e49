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
  ptrdiff_t fout;
  const Taps *taps;
  int parts, later;  // number of `taps`; the last `later` of them read what is not in the caches yet
  ptrdiff_t pitch;   // floats of the kernels from tap to tap
  int lanes;         // lanes of the panel's last block
  bool relu, stream;
  float slope;
};

// Returns p, but hides from the compiler that it does. Otherwise the compiler would keep the distance of each voxel from
// the first, which are more numbers than there are registers.
ALWAYS const float *further(const float *p) {
  asm("" : "+r"(p));
  return p;
}
constexpr int NEAR = 4;  // voxels read from one pointer before it moves on

// Adds the products of taps [first, last) to the sums of VOXELS outputs; `x` is the first input of the first of them,
// `w` the kernels of the panel for the first of these taps. Returns the kernels of the next.
template <int VOXELS, int VECTORS>
ALWAYS const float *add_taps(V (&sums)[VOXELS][VECTORS], const float *x, ptrdiff_t voxel, const int64_t *offsets,
                             ptrdiff_t first, ptrdiff_t last, const float *w, ptrdiff_t pitch) {
  for (ptrdiff_t tap = first; tap < last; tap++, w += pitch) {
    const float *in = x + offsets[tap];
    V kernel[VECTORS];
    for (int v = 0; v < VECTORS; v++) kernel[v] = load(w + v * W);
    for (int i = 0; i < VOXELS; i++) {
      if (i > 0 && i % NEAR == 0) in = further(in + NEAR * voxel);
      const V value = broadcast(in[i % NEAR * voxel]);
      for (int v = 0; v < VECTORS; v++) sums[i][v] += value * kernel[v];
    }
  }
  return w;
}

// Sums and finishes VOXELS outputs, from output `at` of the line on; `finite` stays finite while they are. PARTS: there
// may be any number of parts of taps, not one. COUNT: only counts values that are not finite.
template <int VOXELS, int BLOCKS, bool PARTS, bool COUNT>
ALWAYS int64_t sum(const Line l, ptrdiff_t at, float *out, V *finite) {
  constexpr int VECTORS = BLOCKS * PER_BLOCK;
  V sums[VOXELS][VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    const V bias = load(l.bias + v * W);
    for (int i = 0; i < VOXELS; i++) sums[i][v] = bias;
  }
  // Only the last line of the next outputs' inputs is not in the caches yet.
  for (int part = PARTS ? l.parts - l.later : 0; part < (PARTS ? l.parts : 1); part++) {
    const Taps &t = l.taps[part];
    const float *const ahead = t.x + t.offsets[t.count - 1] + 1 + (at + VOXELS - 1) * t.voxel;
    for (ptrdiff_t i = 0; i < VOXELS * t.voxel; i += LANES) __builtin_prefetch(ahead + i);
  }
  if constexpr (PARTS) {
    V totals[VOXELS][VECTORS] = {};  // sums of whole chunks; not in registers
    const auto total = [&]() ALWAYS_LAMBDA {
      for (int i = 0; i < VOXELS; i++) {
        for (int v = 0; v < VECTORS; v++) {
          totals[i][v] += sums[i][v];
          sums[i][v] = V{};
        }
      }
    };
    ptrdiff_t left = CHUNK;
    for (int part = 0; part < l.parts; part++) {
      const Taps &t = l.taps[part];
      for (ptrdiff_t first = 0; first < t.count;) {
        const ptrdiff_t last = first + (t.count - first < left ? t.count - first : left);
        const float *const w = l.kernels + (t.first + first) * l.pitch;
        add_taps(sums, t.x + at * t.voxel, t.voxel, t.offsets, first, last, w, l.pitch);
        left -= last - first;
        first = last;
        if (left > 0) continue;
        total();
        left = CHUNK;
      }
    }
    for (int i = 0; i < VOXELS; i++)
      for (int v = 0; v < VECTORS; v++) sums[i][v] += totals[i][v];
  } else {
    const Taps &t = *l.taps;
    const float *const x = t.x + at * t.voxel, *w = l.kernels + t.first * l.pitch;
    V totals[VOXELS][VECTORS];
    for (ptrdiff_t first = 0;; first += CHUNK) {
      const ptrdiff_t last = t.count - first > CHUNK ? first + CHUNK : t.count;
      w = add_taps(sums, x, t.voxel, t.offsets, first, last, w, l.pitch);
      if (first > 0)
        for (int i = 0; i < VOXELS; i++)
          for (int v = 0; v < VECTORS; v++) sums[i][v] += totals[i][v];
      if (last == t.count) break;
      for (int i = 0; i < VOXELS; i++) {
        for (int v = 0; v < VECTORS; v++) {
          totals[i][v] = sums[i][v];
          sums[i][v] = V{};
        }
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
    else if (l.slope != 0)
      for (int i = 0; i < VOXELS; i++) sums[i][v] = sums[i][v] > 0.0f ? sums[i][v] : sums[i][v] * l.slope;
    float *target = out + v * W;
    if (l.stream)
      for (int i = 0; i < VOXELS; i++) stream(target + i * l.fout, sums[i][v]);
    else if (lanes >= W)
      for (int i = 0; i < VOXELS; i++) store(target + i * l.fout, sums[i][v]);
    else
      for (int i = 0; i < VOXELS; i++) store_part(target + i * l.fout, sums[i][v], lanes);
  }
  return bad;
}

template <int VOXELS, int BLOCKS, bool PARTS>
ALWAYS void some(const Line &l, ptrdiff_t at, float *out, int voxels, V *finite) {
  if constexpr (VOXELS > 1) {
    if (voxels < VOXELS) return some<VOXELS - 1, BLOCKS, PARTS>(l, at, out, voxels, finite);
  }
  sum<VOXELS, BLOCKS, PARTS, false>(l, at, out, finite);
}

// Returns how many of the outputs are infinite or not a number.
template <int BLOCKS, bool PARTS>
int64_t line(const Line &l, float *out, ptrdiff_t outputs) {
  constexpr int MOST = voxels_with(BLOCKS);
  V finite[BLOCKS * PER_BLOCK] = {};
  const ptrdiff_t parts = (outputs + MOST - 1) / MOST;
  for (ptrdiff_t part = 0; part < parts; part++) {  // near-equal, because few sums would wait for each other
    const ptrdiff_t lo = outputs * part / parts, hi = outputs * (part + 1) / parts;
    some<MOST, BLOCKS, PARTS>(l, lo, out + lo * l.fout, (int)(hi - lo), finite);
  }
  bool all = true;  // kernels beyond the last channel are zero: their sums are not finite only if others are not
  for (int v = 0; v < BLOCKS * PER_BLOCK; v++)
    for (int lane = 0; lane < W; lane++) all = all && finite[v][lane] == 0.0f;
  int64_t bad = 0;
  for (ptrdiff_t i = 0; !all && i < outputs; i++) bad += sum<1, BLOCKS, PARTS, true>(l, i, nullptr, nullptr);
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

}  // namespace
}  // namespace znnpy

using namespace znnpy;

namespace {

template <int BLOCKS>
int64_t line(const Line &l, float *out, ptrdiff_t outputs) {
  return l.parts == 1 ? line<BLOCKS, false>(l, out, outputs) : line<BLOCKS, true>(l, out, outputs);
}

// Computes a line of outputs, all channels, `fout` floats from one to the next, from `parts` parts of the taps, of which
// the last `later` read what is not in the caches yet; `whole`: there is space for whole blocks of channels.
int64_t whole_line(const Direct &d, const Taps *some, int parts, int later, float *out, ptrdiff_t outputs,
                   ptrdiff_t fout, bool whole) {
  const ptrdiff_t blocks = (d.fout + LANES - 1) / LANES, taps = d.k[0] * d.k[1] * d.k[2] * d.fin;
  int64_t bad = 0;
  for (ptrdiff_t first = 0; first < blocks;) {
    const int width = panel(blocks - first), at_once = W == LANES ? width : 1;
    for (int b = 0; b < width; b += at_once) {
      const ptrdiff_t left = whole ? LANES : d.fout - (first + b + at_once - 1) * LANES;
      const Line l{d.kernels + first * LANES * taps + b * LANES,
                   d.bias + (first + b) * LANES,
                   fout,
                   some,
                   parts,
                   later,
                   width * LANES,
                   (int)(left < LANES ? left : LANES),
                   d.relu != 0,
                   !whole && d.stream != 0,
                   (float)d.slope};
      float *target = out + (first + b) * LANES;
      bad += at_once == 3   ? line<3>(l, target, outputs)
             : at_once == 2 ? line<2>(l, target, outputs)
                            : line<1>(l, target, outputs);
    }
    first += width;
  }
  return bad;
}

// Returns all taps of outputs whose first input is at x.
Taps all_taps(const Direct &d, const float *x) { return {x, d.fin, d.offsets, 0, d.k[0] * d.k[1] * d.k[2] * d.fin}; }

struct Range {
  ptrdiff_t lo, hi;
};

// Returns the taps of an output whose inputs along one axis are in memory.
Range held_taps(const Padded &p, int axis, ptrdiff_t output) {
  const ptrdiff_t before = p.lead[axis] - output, behind = before + p.held[axis];
  return {before > 0 ? before : 0, behind < p.direct.k[axis] ? behind : p.direct.k[axis]};
}

// Lists the taps of output (z, y, x) whose inputs are in memory, in the order of the kernels; returns the parts.
int list_taps(const Padded &p, ptrdiff_t z, ptrdiff_t y, ptrdiff_t x, Taps *taps) {
  const Direct &d = p.direct;
  const Range along_z = held_taps(p, 0, z), along_y = held_taps(p, 1, y), along_x = held_taps(p, 2, x);
  int parts = 0;
  for (ptrdiff_t kz = along_z.lo; kz < along_z.hi; kz++) {
    for (ptrdiff_t ky = along_y.lo; ky < along_y.hi; ky++) {
      for (ptrdiff_t kx = along_x.lo; kx < along_x.hi; kx++) {
        const ptrdiff_t position = (kz * d.k[1] + ky) * d.k[2] + kx;
        for (int64_t i = 0; i < p.count; i++) {
          const Input &in = p.inputs[i];
          const ptrdiff_t first = position * d.fin + in.first;
          if (p.count == 1 && parts > 0 && taps[parts - 1].first + taps[parts - 1].count == first) {
            taps[parts - 1].count += in.maps;
            continue;
          }
          const float *at = in.x + (z - p.lead[0]) * in.plane + (y - p.lead[1]) * in.row + (x - p.lead[2]) * in.voxel;
          taps[parts++] = {at, in.voxel, in.offsets + position * in.maps, first, in.maps};
        }
      }
    }
  }
  return parts;
}

// Computes and ends neighbouring outputs, the first of which is (z, y, x); `sums` has space for whole blocks of channels
// of the voxels that are ended together.
int64_t ended_line(const Padded &p, Taps *taps, int parts, int later, ptrdiff_t z, ptrdiff_t y, ptrdiff_t x,
                   ptrdiff_t outputs, float *sums, float *out) {
  const Direct &d = p.direct;
  const ptrdiff_t width = (d.fout + LANES - 1) / LANES * LANES;
  int64_t bad = 0;
  for (ptrdiff_t first = 0; first < outputs; first += p.at_once) {
    const ptrdiff_t count = outputs - first < p.at_once ? outputs - first : p.at_once;
    whole_line(d, taps, parts, later, sums, count, width, true);
    for (int part = 0; part < parts; part++) taps[part].x += count * taps[part].voxel;
    const float *const addend = p.ending.addend.at(z, y, x + first);
    bad += end_lanes(p.ending, {sums, count, width, addend, out + first * d.fout}, d.fout, d.fout);
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
    const Taps taps = all_taps(d, d.x + image * d.x_image + (z * d.n[1] + y) * d.n[2] * d.fin);
    float *out = d.out + image * d.out_image + (z * my + y) * mx * d.fout;
    bad += whole_line(d, &taps, 1, 1, out, mx, d.fout, false);
  }
  if (d.stream) fence();
  return bad;
}

// Computes lines [lo, hi) of the output, (z, y), of an image with padding. `taps` has a place for every input of every
// position in the kernel; `sums` as in `ended_line`. Returns how many values are infinite or not a number.
EXPORT int64_t znnpy_direct_padded(const Padded *padded, Taps *taps, float *sums, int64_t lo, int64_t hi) {
  const Padded &p = *padded;
  const Direct &d = p.direct;
  const ptrdiff_t my = d.n[1] - d.k[1] + 1, mx = d.n[2] - d.k[2] + 1;
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t y = unit % my, z = unit / my;
    for (ptrdiff_t x = 0; x < mx;) {
      const Range along_x = held_taps(p, 2, x);
      ptrdiff_t outputs = 1;  // with the same taps
      if (along_x.lo == 0 && along_x.hi == d.k[2]) outputs = p.lead[2] + p.held[2] - d.k[2] + 1 - x;
      if (outputs > mx - x) outputs = mx - x;
      const int parts = list_taps(p, z, y, x, taps), later = parts < p.count ? parts : (int)p.count;
      float *const out = d.out + ((z * my + y) * mx + x) * d.fout;
      bad += p.ending.any() ? ended_line(p, taps, parts, later, z, y, x, outputs, sums, out)
                            : whole_line(d, taps, parts, later, out, outputs, d.fout, false);
      x += outputs;
    }
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
        const ptrdiff_t at = ((z * d.n[1] + first_y + y) * d.n[2] + first_x) * d.fin;
        const Taps taps = all_taps(d, d.x + image * d.x_image + at);
        float *const ring = scratch + y % py * line_floats;
        bad += whole_line(d, &taps, 1, 1, ring, columns + px - 1, voxel, true);
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
