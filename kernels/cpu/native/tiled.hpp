// Arguments that conv_fft_lanes.py passes to the tiled convolution, and declarations shared by its stages. Sizes are in
// elements; the last axis of an image is its channels. Images are float32 or, if `half`, bfloat16.
//
// The input has `n` voxels, of which `held` are in memory, from voxel `lead` on; the others are zero (padding).
//
// Some of its blocks may be of arrays that are upsampled: along each axis every voxel counts `factor` times. Of these
// `low_held` voxels are in memory, from voxel `low_lead` on, both on their own lattice. Every tile begins with a whole
// voxel of them; for that the first tiles compute `skip` outputs too many, which are stored nowhere.
#pragma once
#include <atomic>
#include <cstdint>

#include "bf16.hpp"
#include "ending.hpp"

struct Products;

struct Channels {  // one block of channels of the input
  const void *x;              // the block's first channel in the first voxel that is in memory
  int64_t plane, row, voxel;  // values from plane to plane, row to row, voxel to voxel
  int64_t lanes;              // channels of the block
  int64_t part, parts;        // which of the blocks of its array it is, and how many these are
  int64_t maps;               // channels of its array
  int64_t upsampled;          // whether its voxels are repeated
  int64_t slot;               // its number among the blocks that are upsampled, or among the others
};

struct Tiling {
  int64_t n[3], k[3], p[3], tile[3];  // input, kernel, window of the fused pooling (1: none), tile: z, y, x
  int64_t lead[3], held[3];
  int64_t factor[3], low_lead[3], low_held[3], skip[3];
  int64_t step[3];              // outputs of a whole tile: tile - k + 1, less p - 1
  int64_t counts[3];            // tiles of an image along each axis
  int64_t fin, fout;
  int64_t in, low_in;     // blocks of channels of the input, and of them those that are upsampled
  int64_t low_from, low_to;  // the channels that are upsampled
  int64_t first, tiles;   // tiles of the group
  int64_t chunk;          // tiles whose columns are multiplied at once
  int64_t column_pitch;   // floats from column to column of the spectra
  int64_t tile_pitch;     // floats from tile to tile of a column
  int64_t low_column_pitch, low_tile_pitch;  // the same of upsampled blocks
  int64_t x_image, out_image;  // values from image to image
  int64_t relu, kept, stream, half;
  int64_t carried, before_image;  // planes that precede those of x, and values from image to image of these planes
  double slope;                   // not 0: negative results are multiplied by it
  const Channels *channels;
  const void *before;  // only if all blocks are of one array
  void *out;
  float *spectra, *low;   // low: of upsampled blocks
  const float *kernels;  // kept: spectra (or their words), column by column; else transformed along x alone
  const float *bias;     // padded to whole blocks
  int64_t words;  // words of bfloat16 that values are divided into for the product on a unit for these; 0: none is used
  void (*multiply)(const Products *);  // znnpy_spectral_products of the unit's library
  znnpy::Ending ending;  // what follows besides relu and slope; its addend is one image
};

// Counters of one stage of one group, whose units the workers take one after the other; a cache line, since all write
// it.
struct alignas(64) Stage {
  std::atomic<int64_t> started, done;
};

// The last stage of a group with fused pooling, in tiled_pool.cpp.
EXPORT int64_t znnpy_tiled_pool(const Tiling *tiling, float *scratch, int64_t lo, int64_t hi);

namespace znnpy {

struct Complex {  // where the lines of a pass are, in floats
  const float *source;
  ptrdiff_t from, from_line;  // point to point, line to line
  float *target;
  ptrdiff_t to, to_line;
  int lines;
  int given;  // points that are not zero
  int wanted;  // points to store
  ptrdiff_t ahead = 0;  // floats from the data read now to the data to prefetch; 0: no prefetch
  // The first line of the next `passes` passes, all of which read a point at once, is prefetched into L2; `at` counts the
  // lines prefetched before.
  const float *later = nullptr;
  int at = 0, passes = 1;
};

struct Rows {  // real lines of one block of channels, and their spectra
  ptrdiff_t row, voxel;  // strides in the image, in values
  int rows, voxels, lanes;  // inside the image; `voxels` counts those before `first`
  float *spectra;  // (y, x, re/im, lane)
  const float *bias;
  bool relu;
  // The first row of the next `passes` blocks of channels is prefetched into L2, row after row, all channels at once; `at`
  // counts the rows of single blocks prefetched before.
  const void *later = nullptr;
  int at = 0, passes = 1;
  bool stream = false;  // whole, aligned blocks are written past the caches
  int first = 0;  // voxels before it are zero
  float slope = 0;
};

using Pass = void (*)(const Complex &);
using From = void (*)(const void *, const Rows &);
using To = int64_t (*)(void *, const Rows &);

struct Side {  // the transforms of one length
  int length;
  Pass forward, forward_stream, inverse, inverse_stream, kernels;
  From from, from_part, from_spaced, from_half;
  To to, to_part, to_leaky, to_half, to_half_leaky;
};

const Side *find(int64_t length);  // null if tiles have no such side

// Whether blocks of channels of the output are whole cache lines, and so many that they do not stay in the cache
// anyway.
inline bool streams_out(const Tiling &t) {
  return t.stream && !t.half && t.fout % LANES == 0 && t.out_image % LANES == 0 && (uintptr_t)t.out % (4 * LANES) == 0;
}

// Whether spectra and lines of the output may be written past the caches: vectors of half a cache line would write it in
// two parts, with so many other lines between that memory gets each part by itself, which takes twice as long as without.
constexpr bool STREAMS = W == LANES;

inline ptrdiff_t value_bytes(const Tiling &t) { return t.half ? sizeof(Bf16) : sizeof(float); }

inline bool pools(const Tiling &t) { return t.p[0] * t.p[1] * t.p[2] > 1; }

inline ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }
inline ptrdiff_t blocks_of(int64_t maps) { return (maps + LANES - 1) / LANES; }

struct Origin {  // position of a tile
  ptrdiff_t image, z, y, x;
};

inline Origin origin(const Tiling &t, ptrdiff_t tile) {
  const ptrdiff_t x = tile % t.counts[2], y = tile / t.counts[2] % t.counts[1];
  const ptrdiff_t z = tile / (t.counts[2] * t.counts[1]) % t.counts[0];
  const ptrdiff_t image = tile / (t.counts[2] * t.counts[1] * t.counts[0]);
  return {image, z * t.step[0], y * t.step[1], x * t.step[2]};
}

}  // namespace znnpy
