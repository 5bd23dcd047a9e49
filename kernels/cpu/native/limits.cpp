// Upper bounds for the speed of the stages of the tiled convolution: only for benchmarks/stages.py.
//
//   transform         whole transforms of tiles in cache, with the convolution's own straight-line code
//   gather, scatter   the reads and writes of `forward` and `inverse`, in their order, without the transforms
//   copy              a copy past the caches
//   peak              multiply-adds in registers
#include "tiled.hpp"

using namespace znnpy;

namespace {

struct Cube {  // one block of channels of a tile, in floats
  ptrdiff_t z, y, x, half, column, plane;

  explicit Cube(const int64_t *tile)
      : z(tile[0]),
        y(tile[1]),
        x(tile[2]),
        half(x / 2 + 1),
        column((z + 1 - z % 2) * BLOCK),  // an odd number of blocks: columns spread over the sets of a cache
        plane(y * x * LANES) {}
};

ALWAYS void copy_lanes(const float *from, float *to, ptrdiff_t count, bool past) {
  for (int half = 0; half < LANES; half += W) {
    const V v = load_part(from + half, (int)(count - half));
    if (past) stream(to + half, v);
    else store_part(to + half, v, (int)(count - half));
  }
}

}  // namespace

// Computes `times` real transforms of image (z, y, x, lane) into spectra (x, y; z in an odd number, re/im, lane).
// `scratch` holds a plane of spectra.
EXPORT void znnpy_limits_transform(const int64_t *tile, const float *image, float *spectra, float *scratch,
                                   int64_t times) {
  const Cube c(tile);
  const Side &along_z = *find(c.z), &along_y = *find(c.y), &along_x = *find(c.x);
  for (; times > 0; times--) {
    for (ptrdiff_t z = 0; z < c.z; z++) {
      along_x.from(image + z * c.plane, {c.x * LANES, LANES, (int)c.y, (int)c.x, LANES, scratch, nullptr, false});
      along_y.forward({scratch, c.half * BLOCK, BLOCK, spectra + z * BLOCK, c.column, c.y * c.column, (int)c.half, 0, 0});
    }
    along_z.forward({spectra, BLOCK, c.column, spectra, BLOCK, c.column, (int)(c.y * c.half), 0, 0});
  }
}

// Computes `times` inverse transforms, scaled by the tile's volume. The spectra are overwritten.
EXPORT void znnpy_limits_restore(const int64_t *tile, float *image, float *spectra, float *scratch, int64_t times) {
  const Cube c(tile);
  const Side &along_z = *find(c.z), &along_y = *find(c.y), &along_x = *find(c.x);
  const float bias[LANES] = {};
  for (; times > 0; times--) {
    along_z.inverse({spectra, BLOCK, c.column, spectra, BLOCK, c.column, (int)(c.y * c.half), 0, (int)c.z});
    for (ptrdiff_t z = 0; z < c.z; z++) {
      along_y.inverse(
          {spectra + z * BLOCK, c.column, c.y * c.column, scratch, c.half * BLOCK, BLOCK, (int)c.half, 0, (int)c.y,
           BLOCK});
      along_x.to(image + z * c.plane, {c.x * LANES, LANES, (int)c.y, (int)c.x, LANES, scratch, bias, false});
    }
  }
}

// Does the reads and writes of znnpy_tiled_forward, without padding.
EXPORT void znnpy_limits_gather(const Tiling *tiling, float *planes, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  const ptrdiff_t half = t.tile[2] / 2 + 1;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t tile = unit / t.tile[0], z = unit % t.tile[0];
    const Origin at = origin(t, t.first + tile);
    const ptrdiff_t rows = at.z + z < t.n[0] ? least(t.tile[1], t.n[1] - at.y) : 0;
    const ptrdiff_t voxels = least(t.tile[2], t.n[2] - at.x);
    for (ptrdiff_t block = 0; block < t.in; block++) {
      const Channels &c = t.channels[block];
      const float *image =
          static_cast<const float *>(c.x) + at.image * t.x_image + (at.z + z) * c.plane + at.y * c.row + at.x * c.voxel;
      for (ptrdiff_t y = 0; y < rows; y++)
        for (ptrdiff_t x = 0; x < voxels; x++)
          copy_lanes(image + y * c.row + x * c.voxel, planes + y * half * BLOCK + x * LANES, c.lanes, false);
      float *target = t.spectra + tile * t.tile_pitch + (z * t.in + block) * BLOCK;
      for (ptrdiff_t x = 0; x < half; x++)
        for (ptrdiff_t y = 0; y < t.tile[1]; y++)
          for (ptrdiff_t part = 0; part < BLOCK; part += LANES)
            copy_lanes(planes + (y * half + x) * BLOCK + part,
                       target + (x * t.tile[1] + y) * t.column_pitch + part, LANES, t.stream);
    }
  }
  if (t.stream) fence();
}

// Does the reads and writes of znnpy_tiled_inverse.
EXPORT void znnpy_limits_scatter(const Tiling *tiling, float *planes, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  const ptrdiff_t half = t.tile[2] / 2 + 1, blocks = blocks_of(t.fout);
  const ptrdiff_t mz = t.n[0] - t.k[0] + 1, my = t.n[1] - t.k[1] + 1, mx = t.n[2] - t.k[2] + 1;
  const bool past = streams_out(t);
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t tile = unit / t.step[0], z = unit % t.step[0];
    const Origin at = origin(t, t.first + tile);
    if (at.z + z >= mz) continue;
    const ptrdiff_t rows = least(t.step[1], my - at.y), voxels = least(t.step[2], mx - at.x);
    float *const out = static_cast<float *>(t.out), *image = out + at.image * t.out_image + (((at.z + z) * my + at.y) * mx + at.x) * t.fout;
    for (ptrdiff_t block = 0; block < blocks; block++) {
      const ptrdiff_t lanes = least(LANES, t.fout - block * LANES);
      const float *source = t.spectra + tile * t.tile_pitch + (z * blocks + block) * BLOCK;
      for (ptrdiff_t x = 0; x < half; x++) {
        for (ptrdiff_t y = 0; y < t.tile[1]; y++) {
          const float *from = source + (x * t.tile[1] + y) * t.column_pitch;
          __builtin_prefetch(from + BLOCK);
          __builtin_prefetch(from + BLOCK + LANES);
          for (ptrdiff_t part = 0; part < BLOCK; part += LANES)
            copy_lanes(from + part, planes + (y * half + x) * BLOCK + part, LANES, false);
        }
      }
      for (ptrdiff_t y = 0; y < rows; y++)
        for (ptrdiff_t x = 0; x < voxels; x++)
          copy_lanes(planes + y * half * BLOCK + x * LANES, image + (y * mx + x) * t.fout + block * LANES, lanes,
                     past);
    }
  }
  if (past) fence();
}

// Copies blocks of LANES floats [lo, hi) from x to y, which is aligned to cache lines.
EXPORT void znnpy_limits_copy(const float *x, float *y, int64_t lo, int64_t hi) {
  for (int64_t block = lo; block < hi; block++) copy_lanes(x + block * LANES, y + block * LANES, LANES, true);
  fence();
}

// Returns the number of flops done in registers; `factors` holds LANES floats for every chain, and 2 * LANES more.
EXPORT int64_t znnpy_limits_peak(float *factors, int64_t times) {
  constexpr int CHAINS = 12;  // enough to hide the latency of two units, few enough for 16 registers
  const V scale = load(factors), shift = load(factors + LANES);
  V sums[CHAINS];  // read from memory, because the compiler would merge chains it knows to be equal
  unroll<CHAINS>([&](auto c) ALWAYS_LAMBDA { sums[c] = load(factors + (c + 2) * LANES); });
  for (int64_t i = 0; i < times; i++)
    unroll<CHAINS>([&](auto c) ALWAYS_LAMBDA { sums[c] = sums[c] * scale + shift; });
  V sum{};
  unroll<CHAINS>([&](auto c) ALWAYS_LAMBDA { sum += sums[c]; });
  store(factors, sum);
  return times * CHAINS * W * 2;
}
