// Tiled FFT convolution (overlap-save) with channels in SIMD lanes, in three stages; see conv_fft_lanes.py, which owns
// the memory, divides the work and passes the layout.
//
//   forward    per plane of a tile and block of channels, in L1 or L2: real transforms along x, then along y
//   multiply   per column of frequencies (fixed x, y), in L2: along z, the product of each frequency, inverse along z
//   inverse    per plane: inverse along y and x, bias, activation, scatter; tiled_pool.cpp if pooling is fused
//
// Every worker calls `run` and takes units of all stages of all groups until none is left.
//
// Spectra of a group of tiles are stored column by column: (x, y; tile, z, block of channels, re/im, lane).
//
// An array whose voxels are repeated twice along an axis is transformed at its own size, half the tile's. Had it zeros
// between its voxels, its spectrum would be that transform, twice; the sum of neighbours that makes the repetition is
// part of the kernels: 1 + exp(-i theta).
#include <cmath>
#include <cstring>
#include <thread>

#include "bf16_products.hpp"
#include "fft.hpp"
#include "tiled.hpp"

namespace znnpy {
namespace {

// Memory that is read after the product, prefetched into L2 a few cache lines at a time while the product computes.
struct Ahead {
  const float *at, *end;

  ALWAYS void fetch() {
    constexpr int LINES = 8;
    for (int line = 0; line < LINES && at < end; line++, at += 16) __builtin_prefetch(at, 0, 2);
  }
};

// Computes one frequency: y (tiles, blocks, re/im, lane) = x (tiles, fin in `in` blocks, re/im, lane) @ w (fin, blocks,
// re/im, lane).
template <int TILES, int VECTORS>
ALWAYS void accumulate(const float *x, ptrdiff_t tile, const float *w, ptrdiff_t map, float *y, ptrdiff_t tile_out,
                       const Channels *channels, int in, Ahead &ahead) {
  V re[TILES][VECTORS] = {}, im[TILES][VECTORS] = {};
  constexpr int PER_BLOCK = LANES / W;
  for (int block = 0; block < in; block++, x += BLOCK) {
    const int maps = (int)channels[block].lanes;
    ahead.fetch();
    for (int lane = 0; lane < maps; lane++, w += map) {
      V wr[VECTORS], wi[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        const float *at = w + v / PER_BLOCK * BLOCK + v % PER_BLOCK * W;
        wr[v] = load(at);
        wi[v] = load(at + LANES);
      }
      for (int t = 0; t < TILES; t++) {
        const V a = broadcast(x[t * tile + lane]);
        for (int v = 0; v < VECTORS; v++) {
          re[t][v] += a * wr[v];
          im[t][v] += a * wi[v];
        }
        const V b = broadcast(x[t * tile + lane + LANES]);
        for (int v = 0; v < VECTORS; v++) {
          re[t][v] -= b * wi[v];
          im[t][v] += b * wr[v];
        }
      }
    }
  }
  for (int t = 0; t < TILES; t++) {
    for (int v = 0; v < VECTORS; v++) {
      float *at = y + t * tile_out + v / PER_BLOCK * BLOCK + v % PER_BLOCK * W;
      store(at, re[t][v]);
      store(at + LANES, im[t][v]);
    }
  }
}

// Takes TILES at a time as long as there are so many, then fewer.
template <int TILES, int VECTORS>
void product(const float *x, ptrdiff_t tile, const float *w, ptrdiff_t map, float *y, ptrdiff_t tile_out,
             const Channels *channels, int in, int tiles, Ahead &ahead) {
  for (; tiles >= TILES; tiles -= TILES, x += TILES * tile, y += TILES * tile_out)
    accumulate<TILES, VECTORS>(x, tile, w, map, y, tile_out, channels, in, ahead);
  if constexpr (TILES > 1) {
    if (tiles > 0) product<TILES / 2, VECTORS>(x, tile, w, map, y, tile_out, channels, in, tiles, ahead);
  }
}

void products(const Tiling &t, const float *x, const float *w, float *y, ptrdiff_t tile_out, int tiles, int blocks,
              Ahead &ahead) {
  const ptrdiff_t map = blocks * BLOCK, tile = t.in * BLOCK;
  const int in = (int)t.in;
  if constexpr (W == LANES) {  // 32 registers
    if (blocks == 3) product<4, 3>(x, tile, w, map, y, tile_out, t.channels, in, tiles, ahead);
    else if (blocks == 2) product<6, 2>(x, tile, w, map, y, tile_out, t.channels, in, tiles, ahead);
    else product<8, 1>(x, tile, w, map, y, tile_out, t.channels, in, tiles, ahead);
  } else {  // 16 registers
    for (int b = 0; b < blocks; b++)
      product<2, 2>(x, tile, w + b * BLOCK, map, y + b * BLOCK, tile_out, t.channels, in, tiles, ahead);
  }
}

// Multiplies a frequency of a kernel by the spectrum of a repetition along a side, 1 + exp(-i theta). The spectrum is zero
// at half of the side. Rounded sines would leave 1e-16; products of several of these are subnormal numbers, with which
// processors compute slowly.
ALWAYS void repeat(ptrdiff_t frequency, ptrdiff_t side, float &re, float &im) {
  const bool zero = 2 * frequency == side;
  const double theta = 2 * PI * (double)frequency / (double)side, before = re;
  const double c = zero ? 0 : 1 + std::cos(theta), s = zero ? 0 : -std::sin(theta);
  re = (float)(before * c - im * s);
  im = (float)(before * s + im * c);
}

// Multiplies the frequencies along z of one kernel by the spectrum of a repetition, given as real and imaginary parts.
void repeat_along_z(const Tiling &t, const float *re, const float *im, float *spectrum, ptrdiff_t pitch) {
  for (ptrdiff_t z = 0; z < t.tile[0]; z++) {
    const float c = re[z], s = im[z];
    for (int lane = 0; lane < LANES; lane += W) {
      float *const at = spectrum + z * pitch + lane;
      const C h = load_complex(at);
      store_complex(at, {h.re * c - h.im * s, h.re * s + h.im * c});
    }
  }
}

// The kernels of one column of frequencies.
struct KernelColumn {
  const Tiling &t;
  ptrdiff_t fx;
  float cosines[2][32], sines[2][32];  // along y, of maps as they are, and of upsampled ones
  float repetition[2][32];             // the spectrum of one along z: real and imaginary parts

  KernelColumn(const Tiling &tiling, ptrdiff_t column) : t(tiling), fx(column / tiling.tile[1]) {
    const ptrdiff_t fy = column % t.tile[1];
    for (ptrdiff_t y = 0; y < t.k[1]; y++) {
      const double angle = 2 * PI * (double)(fy * y % t.tile[1]) / (double)t.tile[1];
      cosines[0][y] = cosines[1][y] = (float)std::cos(angle);
      sines[0][y] = sines[1][y] = (float)std::sin(angle);
      if (t.factor[1] > 1) repeat(fy, t.tile[1], cosines[1][y], sines[1][y]);
    }
    for (ptrdiff_t frequency = 0; t.factor[0] > 1 && frequency < t.tile[0]; frequency++) {
      repetition[0][frequency] = 1, repetition[1][frequency] = 0;
      repeat(frequency, t.tile[0], repetition[0][frequency], repetition[1][frequency]);
    }
  }

  // Computes the frequencies along z of one input map and a block of output maps, `pitch` floats apart, conjugate.
  ALWAYS void transform(ptrdiff_t block, ptrdiff_t map, float *spectrum, ptrdiff_t pitch) const {
    const ptrdiff_t kz = t.k[0], ky = t.k[1];
    const float *const half = t.kernels + ((fx * blocks_of(t.fout) + block) * t.fin + map) * kz * ky * BLOCK;
    const bool upsampled = map >= t.low_from && map < t.low_to;
    const float *const c = cosines[upsampled], *const s = sines[upsampled];
    float lines[32 * BLOCK];
    for (ptrdiff_t z = 0; z < kz; z++) {
      for (int lane = 0; lane < LANES; lane += W) {
        V re{}, im{};
        for (ptrdiff_t y = 0; y < ky; y++) {
          const C h = load_complex(half + (z * ky + y) * BLOCK + lane);
          re += h.re * c[y] - h.im * s[y];
          im += h.re * s[y] + h.im * c[y];
        }
        store_complex(lines + z * BLOCK + lane, {re, im});
      }
    }
    find(t.tile[0])->kernels({lines, BLOCK, 0, spectrum, pitch, 0, 1, (int)kz, (int)t.tile[0]});
    if (upsampled && t.factor[0] > 1) repeat_along_z(t, repetition[0], repetition[1], spectrum, pitch);
  }
};

// Computes the kernels of a column: panel by panel (z, fin, block, re/im, lane).
void kernel_column(const Tiling &t, ptrdiff_t column, float *target) {
  const KernelColumn kernels(t, column);
  const ptrdiff_t blocks = blocks_of(t.fout);
  for (ptrdiff_t first = 0; first < blocks;) {
    const int width = panel(blocks - first);
    const ptrdiff_t pitch = (t.fin * width + 1) * BLOCK;
    for (int b = 0; b < width; b++)
      for (ptrdiff_t map = 0; map < t.fin; map++)
        kernels.transform(first + b, map, target + (map * width + b) * BLOCK, pitch);
    target += t.tile[0] * pitch;
    first += width;
  }
}

// Computes their words, in the order of Products.w.
void kernel_words(const Tiling &t, ptrdiff_t column, Bf16 *target) {
  const KernelColumn kernels(t, column);
  const ptrdiff_t blocks = blocks_of(t.fout), steps = steps_of(t.fin), words = t.words, panel = 2 * LANES * LANES;
  const ptrdiff_t frequency = frequency_of(t.fin, blocks, words);
  alignas(64) float pair[2][32 * BLOCK];
  for (ptrdiff_t block = 0; block < blocks; block++) {
    for (ptrdiff_t map = 0; map < steps * LANES; map += 2) {
      for (ptrdiff_t i = 0; i < 2; i++) {
        if (map + i < t.fin) kernels.transform(block, map + i, pair[i], BLOCK);
        else std::memset(pair[i], 0, sizeof pair[i]);
      }
      for (ptrdiff_t part = 0; part < BLOCK; part += LANES) {
        const ptrdiff_t value = map + (part ? steps * LANES : 0), step = value / 32, at = value % 32 * LANES;
        for (ptrdiff_t z = 0; z < t.tile[0]; z++) {
          Bf16 *const to = target + z * frequency + (block * steps + step) * words * panel + at;
          for (int lane = 0; lane < LANES; lane += W) {
            V a = load(pair[0] + z * BLOCK + part + lane), b = load(pair[1] + z * BLOCK + part + lane);
            for (ptrdiff_t word = 0; word < words; word++) {
              const Half first = narrow(a), second = narrow(b);
              const Bits both = __builtin_convertvector(first, Bits) | __builtin_convertvector(second, Bits) << 16;
              store(reinterpret_cast<float *>(to + word * panel + 2 * lane), (V)both);
              a -= widen(first);
              b -= widen(second);
            }
          }
        }
      }
    }
  }
}

// Returns the floats that the kernels of a column take.
ptrdiff_t column_floats(const Tiling &t) {
  const ptrdiff_t blocks = blocks_of(t.fout);
  if (t.words) return t.tile[0] * frequency_of(t.fin, blocks, t.words) / 2;
  ptrdiff_t panels = 0;
  for (ptrdiff_t first = 0; first < blocks; first += panel(blocks - first)) panels++;
  return t.tile[0] * (t.fin * blocks + panels) * BLOCK;
}

void any_kernels(const Tiling &t, ptrdiff_t column, float *target) {
  if (t.words) kernel_words(t, column, reinterpret_cast<Bf16 *>(target));
  else kernel_column(t, column, target);
}

// The blocks of the input that lie on one lattice: those that are upsampled, or the others.
struct Lattice {
  const int64_t *lead, *held;
  int64_t factor[3], tile[3];  // tile: on this lattice
  int64_t in;                  // blocks
  float *spectra;
  int64_t column_pitch, tile_pitch;

  ALWAYS ptrdiff_t half() const { return tile[2] / 2 + 1; }
  ALWAYS bool holds(ptrdiff_t plane) const { return plane >= 0 && plane < held[0]; }

  // Returns where a plane of the group's tiles begins, in voxels that are in memory: negative in the padding before.
  ALWAYS Origin plane(const Tiling &t, ptrdiff_t unit) const {
    const Origin at = origin(t, t.first + unit / t.tile[0]);
    return {at.image, at.z / factor[0] + unit % t.tile[0] - lead[0], at.y / factor[1] - lead[1],
            at.x / factor[2] - lead[2]};
  }
};

Lattice lattice(const Tiling &t, bool upsampled) {
  Lattice found{t.lead, t.held, {1, 1, 1}, {t.tile[0], t.tile[1], t.tile[2]}, t.in - t.low_in, t.spectra,
                t.column_pitch, t.tile_pitch};
  if (!upsampled) return found;
  found.lead = t.low_lead, found.held = t.low_held, found.in = t.low_in, found.spectra = t.low;
  found.column_pitch = t.low_column_pitch, found.tile_pitch = t.low_tile_pitch;
  for (int axis = 0; axis < 3; axis++) found.factor[axis] = t.factor[axis], found.tile[axis] /= t.factor[axis];
  return found;
}

// Returns the address of the first voxel of a plane that is in memory; rows and voxels before it may not be.
const char *address(const Tiling &t, const Origin &at, ptrdiff_t block) {
  const Channels &c = t.channels[block];
  const bool carried = at.z < t.carried;
  const void *const from = carried ? t.before : c.x;
  const ptrdiff_t image = carried ? block * LANES + at.image * t.before_image : at.image * t.x_image;
  const ptrdiff_t z = carried ? at.z : at.z - t.carried;
  return static_cast<const char *>(from) + (image + z * c.plane + at.y * c.row + at.x * c.voxel) * value_bytes(t);
}

// Returns how many positions from `from` on precede those in memory.
ptrdiff_t first_held(ptrdiff_t from) { return from < 0 ? -from : 0; }

// Returns how many of `length` positions from `from` on precede the end of the `held` in memory.
ptrdiff_t until_held(ptrdiff_t from, ptrdiff_t length, ptrdiff_t held) { return least(length, held - from); }

// Transforms a column of one tile along z: all blocks of the input, each frequency `pitch` floats after the one before.
void column_along_z(const Tiling &t, ptrdiff_t column, ptrdiff_t tile, float *target, ptrdiff_t pitch) {
  for (ptrdiff_t block = 0, end; block < t.in; block = end) {
    const Channels &c = t.channels[block];
    for (end = block + 1; end < t.in && t.channels[end].upsampled == c.upsampled;) end++;
    const int lines = (int)(end - block);
    float *const at = target + block * BLOCK;
    if (!c.upsampled) {
      const float *source = t.spectra + column * t.column_pitch + tile * t.tile_pitch + c.slot * BLOCK;
      find(t.tile[0])->forward({source, (t.in - t.low_in) * BLOCK, BLOCK, at, pitch, BLOCK, lines, 0, 0});
      continue;
    }
    const Lattice l = lattice(t, true);
    ptrdiff_t fx = column / t.tile[1] % l.tile[2], fy = column % t.tile[1] % l.tile[1];
    const bool conjugate = fx > l.tile[2] / 2;  // the transform of real lines holds the other half
    if (conjugate) fx = l.tile[2] - fx, fy = (l.tile[1] - fy) % l.tile[1];
    const float *source = l.spectra + (fx * l.tile[1] + fy) * l.column_pitch + tile * l.tile_pitch + c.slot * BLOCK;
    const Side &z = *find(l.tile[0]);
    (conjugate ? z.inverse : z.forward)(
        {source, l.in * BLOCK, BLOCK, at, pitch, BLOCK, lines, 0, (int)l.tile[0]});
    for (ptrdiff_t k = 0; k < l.tile[0]; k++) {
      for (ptrdiff_t f = 0; f < lines * BLOCK; f += BLOCK) {
        for (int lane = 0; lane < LANES; lane += W) {
          float *const here = at + k * pitch + f + lane;
          C h = load_complex(here);
          if (conjugate) h = conj(h), store_complex(here, h);
          for (ptrdiff_t again = k + l.tile[0]; again < t.tile[0]; again += l.tile[0])
            store_complex(here + (again - k) * pitch, h);
        }
      }
    }
  }
}

constexpr ptrdiff_t LATER_FLOATS = 5 << 13;  // part of a plane of spectra that is prefetched: larger ones gain nothing

int64_t units_of(const Tiling &t, int stage) {
  if (stage == 0) return t.tiles * t.tile[0];
  if (stage == 1) return t.tile[1] * (t.tile[2] / 2 + 1);
  return t.tiles * (pools(t) ? blocks_of(t.fout) : t.step[0]);
}

// Transforms lines of results of a block back, one by one, and ends them. `at` is the output `image`, the first one that
// is stored: it is voxel `skipped` of a line. The function is no part of its caller, whose other path would be slower.
__attribute__((noinline)) int64_t ended_lines(const Tiling &t, bool stream, float *planes, const Origin &at,
                                              ptrdiff_t block, ptrdiff_t lines, ptrdiff_t skipped, ptrdiff_t voxels,
                                              void *image) {
  Ending ending = t.ending;
  ending.past = stream;
  const Side &along_x = *find(t.tile[2]);
  const ptrdiff_t mx = t.n[2] - t.k[2] + 1 - t.skip[2], line = (t.tile[2] / 2 + 1) * BLOCK, count = voxels - skipped;
  const ptrdiff_t lanes = least(LANES, t.fout - block * LANES), bytes = value_bytes(t);
  alignas(64) float sums[32 * LANES];
  int64_t bad = 0;
  for (ptrdiff_t y = 0; y < lines; y++) {
    const ptrdiff_t map = block * LANES;
    const void *const addend = t.half ? (const void *)ending.addend.at<Bf16>(at.z, at.y + y, at.x, map)
                                      : ending.addend.at(at.z, at.y + y, at.x, map);
    for (ptrdiff_t i = 0; addend != nullptr && i < count; i++)
      __builtin_prefetch(static_cast<const char *>(addend) + i * ending.addend.voxel * bytes);
    along_x.to(sums, {0, LANES, 1, (int)voxels, LANES, planes + y * line, t.bias + block * LANES, false});
    char *const out = static_cast<char *>(image) + (y * mx * t.fout + map) * bytes;
    bad += end_lanes(ending, {sums + skipped * LANES, count, LANES, addend, out}, t.fout, lanes);
  }
  return bad;
}

// Waits for units that other workers have started; that is short, and those workers do not wait.
void wait_for(const Stage &stage, int64_t units) {
  constexpr int SPINS = 20000;  // about a millisecond: waking a thread takes a tenth of it
  for (int spin = 0; stage.done.load(std::memory_order_acquire) < units; spin++) {
    if (spin < SPINS) pause();
    else std::this_thread::yield();
  }
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

EXPORT int64_t znnpy_version() { return VERSION; }

// Transforms kernels of input maps [lo, hi) along x, scaled: t.kernels (x, block, fin, kz, ky, re/im, lane).
EXPORT void znnpy_tiled_kernels(const Tiling *tiling, const float *weight, float *target, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  const ptrdiff_t kx = t.k[2], rows = t.k[0] * t.k[1], blocks = blocks_of(t.fout), half = t.tile[2] / 2 + 1;
  const double scale = 1.0 / (double)(t.tile[0] * t.tile[1] * t.tile[2]);
  float taps[32 * LANES];
  for (ptrdiff_t block = 0; block < blocks; block++) {
    const ptrdiff_t lanes = least(LANES, t.fout - block * LANES);
    for (ptrdiff_t map = lo; map < hi; map++) {
      const bool upsampled = map >= t.low_from && map < t.low_to && t.factor[2] > 1;
      for (ptrdiff_t row = 0; row < rows; row++) {
        std::memset(taps, 0, sizeof taps);
        for (ptrdiff_t lane = 0; lane < lanes; lane++)
          for (ptrdiff_t x = 0; x < kx; x++)
            taps[x * LANES + lane] = weight[(((block * LANES + lane) * t.fin + map) * rows + row) * kx + x];
        for (ptrdiff_t fx = 0; fx < half; fx++) {
          float *out = target + (((fx * blocks + block) * t.fin + map) * rows + row) * BLOCK;
          std::memset(out, 0, BLOCK * sizeof(float));
          for (ptrdiff_t x = 0; x < kx; x++) {
            const double angle = 2 * PI * (double)(fx * x % t.tile[2]) / (double)t.tile[2];
            float c = (float)(scale * std::cos(angle)), s = (float)(scale * std::sin(angle));
            if (upsampled) repeat(fx, t.tile[2], c, s);
            for (int lane = 0; lane < LANES; lane++) {
              out[lane] += taps[x * LANES + lane] * c;
              out[LANES + lane] += taps[x * LANES + lane] * s;
            }
          }
        }
      }
    }
  }
}

// Computes kernel spectra of columns [lo, hi): (column; panel, z, fin, block, re/im, lane), or their words.
EXPORT void znnpy_tiled_spectra(const Tiling *tiling, float *target, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  for (int64_t column = lo; column < hi; column++) any_kernels(t, column, target + column * column_floats(t));
}

// Transforms planes [lo, hi) of the group's tiles, tile.z per tile.
EXPORT void znnpy_tiled_forward(const Tiling *tiling, float *planes, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  const bool stream = STREAMS && t.stream;
  for (const bool upsampled : {false, true}) {
    const Lattice l = lattice(t, upsampled);
    const Side &along_x = *find(l.tile[2]), &along_y = *find(l.tile[1]);
    const ptrdiff_t row = l.half() * BLOCK;
    for (ptrdiff_t unit = lo; unit < hi && l.in > 0; unit++) {
      const ptrdiff_t tile = unit / t.tile[0], z = unit % t.tile[0];
      if (z >= l.tile[0]) continue;
      const Origin plane = l.plane(t, unit), next = l.plane(t, unit + 1);
      const bool later = unit + 1 < hi && z + 1 < l.tile[0] && l.holds(next.z);
      const ptrdiff_t skipped = first_held(plane.x), voxels = until_held(plane.x, l.tile[2], l.held[2]);
      const bool any = l.holds(plane.z) && skipped < voxels;
      const ptrdiff_t above = any ? least(first_held(plane.y), l.tile[1]) : 0;
      const ptrdiff_t below = any ? until_held(plane.y, l.tile[1], l.held[1]) : 0;
      const ptrdiff_t rows = below > above ? below - above : 0;
      for (ptrdiff_t block = 0; block < t.in; block++) {
        const Channels &c = t.channels[block];
        if ((c.upsampled != 0) != upsampled) continue;
        Rows r{c.row, c.voxel, (int)rows, (int)voxels, (int)c.lanes, planes + above * row, nullptr, false};
        r.first = (int)skipped;
        if (later) {
          r.later = address(t, next, block - c.part) + above * c.row * value_bytes(t);
          r.at = (int)(c.part * rows), r.passes = (int)c.parts;
        }
        const bool spaced = skipped > 0 || c.voxel > c.maps, part = voxels < l.tile[2] || c.lanes < LANES;
        const From from = t.half   ? along_x.from_half
                          : spaced ? along_x.from_spaced
                          : part   ? along_x.from_part
                                   : along_x.from;
        from(address(t, plane, block) + above * c.row * value_bytes(t), r);
        std::memset(planes, 0, (size_t)(above * row) * sizeof(float));
        const ptrdiff_t left = l.tile[1] - above - rows;
        std::memset(planes + (above + rows) * row, 0, (size_t)(left * row) * sizeof(float));
        float *target = l.spectra + tile * l.tile_pitch + (z * l.in + c.slot) * BLOCK;
        (stream ? along_y.forward_stream : along_y.forward)(
            {planes, row, BLOCK, target, l.column_pitch, l.tile[1] * l.column_pitch, (int)l.half(), 0, 0});
      }
    }
  }
  if (stream) fence();
}

namespace {

// Multiplies columns as znnpy_tiled_multiply does, on a unit for bfloat16. `scratch` holds a column of kernels unless they
// are kept, then `chunk` tiles, whole groups, which the products overwrite, and room for the words of a frequency.
void multiply_on_unit(const Tiling &t, float *scratch, int64_t lo, int64_t hi) {
  const Side &along_z = *find(t.tile[0]);
  const ptrdiff_t in = t.in, out = blocks_of(t.fout), tz = t.tile[0], tile_floats = (in > out ? in : out) * BLOCK;
  const ptrdiff_t pitch = t.chunk * tile_floats + BLOCK;
  const bool stream = STREAMS && t.stream;
  float *const x = scratch + (t.kept ? 0 : column_floats(t));
  Products p{x, pitch, tile_floats, tz, 0, t.words, in, out, t.fin, t.channels, nullptr, nullptr, nullptr, nullptr};
  p.left = reinterpret_cast<Bf16 *>(x + tz * pitch);
  for (ptrdiff_t column = lo; column < hi; column++) {
    const float *const w = t.kept ? t.kernels + column * column_floats(t) : scratch;
    if (!t.kept) any_kernels(t, column, scratch);
    p.w = reinterpret_cast<const Bf16 *>(w);
    float *const spectra = t.spectra + column * t.column_pitch;
    for (ptrdiff_t first = 0; first < t.tiles; first += t.chunk) {
      p.tiles = least(t.chunk, t.tiles - first);
      for (ptrdiff_t tile = 0; tile < p.tiles; tile++) column_along_z(t, column, first + tile, x + tile * tile_floats, pitch);
      const bool last = first + t.chunk >= t.tiles;  // followed by the next column's first tiles
      const ptrdiff_t left = !last ? t.tiles - first - t.chunk : column + 1 < hi ? t.tiles : 0;
      p.ahead = last ? spectra + t.column_pitch : spectra + (first + t.chunk) * t.tile_pitch;
      p.end = p.ahead + least(t.chunk, left) * t.tile_pitch;
      t.multiply(&p);
      for (ptrdiff_t tile = 0; tile < p.tiles; tile++)
        (stream ? along_z.inverse_stream : along_z.inverse)(
            {x + tile * tile_floats, pitch, BLOCK, spectra + (first + tile) * t.tile_pitch, out * BLOCK, BLOCK, (int)out,
             0, (int)(tz - t.k[0] + 1)});
    }
  }
  if (stream) fence();
}

}  // namespace

// Multiplies columns [lo, hi) of the group, in place. `scratch` holds a column of kernels unless they are kept, then
// `chunk` tiles before the product and after it.
EXPORT void znnpy_tiled_multiply(const Tiling *tiling, float *scratch, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  if (t.words) return multiply_on_unit(t, scratch, lo, hi);
  const Side &along_z = *find(t.tile[0]);
  const ptrdiff_t in = t.in, out = blocks_of(t.fout), tz = t.tile[0];
  const ptrdiff_t before = (t.chunk * in + 1) * BLOCK;
  const bool stream = STREAMS && t.stream;
  float *const x = scratch + (t.kept ? 0 : column_floats(t)), *const y = x + tz * before;
  for (ptrdiff_t column = lo; column < hi; column++) {
    const float *w = t.kept ? t.kernels + column * column_floats(t) : scratch;
    if (!t.kept) kernel_column(t, column, scratch);
    float *const spectra = t.spectra + column * t.column_pitch;
    for (ptrdiff_t first = 0; first < t.tiles; first += t.chunk) {
      const int tiles = (int)least(t.chunk, t.tiles - first);
      for (int tile = 0; tile < tiles; tile++)
        column_along_z(t, column, first + tile, x + tile * in * BLOCK, before);
      const bool last = first + t.chunk >= t.tiles;  // followed by the next column's first tiles
      const float *next = last ? spectra + t.column_pitch : spectra + (first + t.chunk) * t.tile_pitch;
      const ptrdiff_t left = !last ? t.tiles - first - t.chunk : column + 1 < hi ? t.tiles : 0;
      Ahead ahead{next, next + least(t.chunk, left) * t.tile_pitch};
      const float *kernels = w;
      for (ptrdiff_t block = 0; block < out;) {
        const int width = panel(out - block);
        const ptrdiff_t after = (t.chunk * width + 1) * BLOCK, pitch = (t.fin * width + 1) * BLOCK;
        for (ptrdiff_t z = 0; z < tz; z++)
          products(t, x + z * before, kernels + z * pitch, y + z * after, width * BLOCK, tiles, width, ahead);
        for (int tile = 0; tile < tiles; tile++)
          (stream ? along_z.inverse_stream : along_z.inverse)(
              {y + tile * width * BLOCK, after, BLOCK,
               spectra + (first + tile) * t.tile_pitch + block * BLOCK, out * BLOCK, BLOCK, width, 0,
               (int)(tz - t.k[0] + 1)});
        kernels += tz * pitch;
        block += width;
      }
    }
  }
  if (stream) fence();
}

// Transforms planes [lo, hi) of the group's results back, step.z per tile. Returns how many values are infinite or not
// a number.
EXPORT int64_t znnpy_tiled_inverse(const Tiling *tiling, float *planes, int64_t lo, int64_t hi) {
  const Tiling &t = *tiling;
  const Side &along_x = *find(t.tile[2]), &along_y = *find(t.tile[1]);
  const ptrdiff_t half = t.tile[2] / 2 + 1, blocks = blocks_of(t.fout);
  const ptrdiff_t mz = t.n[0] - t.k[0] + 1, my = t.n[1] - t.k[1] + 1, mx = t.n[2] - t.k[2] + 1;
  const bool stream = STREAMS && streams_out(t), ahead = blocks * half * t.tile[1] * BLOCK <= LATER_FLOATS;
  const ptrdiff_t bytes = value_bytes(t);
  int64_t bad = 0;
  for (ptrdiff_t unit = lo; unit < hi; unit++) {
    const ptrdiff_t tile = unit / t.step[0], z = unit % t.step[0];
    const Origin at = origin(t, t.first + tile);
    if (at.z + z >= mz || at.z + z < t.skip[0]) continue;
    const ptrdiff_t rows = least(t.step[1], my - at.y), voxels = least(t.step[2], mx - at.x);
    const ptrdiff_t above = at.y == 0 ? t.skip[1] : 0, skipped = at.x == 0 ? t.skip[2] : 0;
    const ptrdiff_t line = (mx - t.skip[2]) * t.fout;
    const ptrdiff_t row = (at.z + z - t.skip[0]) * (my - t.skip[1]) + at.y - t.skip[1];
    const ptrdiff_t begin = at.image * t.out_image + row * line + (at.x - t.skip[2]) * t.fout;
    char *const image = static_cast<char *>(t.out) + begin * bytes;
    const ptrdiff_t next = (unit + 1) / t.step[0] * t.tile_pitch + (unit + 1) % t.step[0] * blocks * BLOCK;
    const float *const later = ahead && unit + 1 < hi ? t.spectra + next : nullptr;
    for (ptrdiff_t block = 0; block < blocks; block++) {
      const int lanes = (int)least(LANES, t.fout - block * LANES);
      const float *source = t.spectra + tile * t.tile_pitch + (z * blocks + block) * BLOCK;
      along_y.inverse({source, t.column_pitch, t.tile[1] * t.column_pitch, planes, half * BLOCK, BLOCK, (int)half, 0,
                       (int)rows, BLOCK, later, (int)(block * half), (int)blocks});
      if (t.ending.any()) {
        const Origin first{at.image, at.z + z - t.skip[0], at.y + above - t.skip[1], at.x + skipped - t.skip[2]};
        bad += ended_lines(t, stream, planes + above * half * BLOCK, first, block, rows - above, skipped, voxels,
                           image + (above * line + skipped * t.fout) * bytes);
        continue;
      }
      const Rows r{line, t.fout, (int)(rows - above), (int)voxels, lanes, planes + above * half * BLOCK,
                   t.bias + block * LANES, t.relu != 0, nullptr, 0, 1, stream, (int)skipped, (float)t.slope};
      const To leaky = t.half ? along_x.to_half_leaky : along_x.to_leaky;
      const To plain = t.half ? along_x.to_half : lanes < LANES ? along_x.to_part : along_x.to;
      bad += (t.slope != 0 ? leaky : plain)(image + (above * line + block * LANES) * bytes, r);
    }
  }
  if (stream) fence();
  return bad;
}

// Does the remaining work of all stages of `count` groups, in parallel with other workers that call it: returns 0 when
// every unit has started, 1 when the caller should check its stop flag and call again. `stages` holds three counters
// per group, initially zero; `grain` is how many units of each kind are taken at once, `most` how many are done before
// it returns. `bad` is increased by the number of values that are infinite or not a number.
EXPORT int64_t znnpy_tiled_run(const Tiling *groups, int64_t count, float *scratch, Stage *stages, const int64_t *grain,
                               const int64_t *most, int64_t *bad) {
  double left = 1;
  for (int64_t i = 0; i < 3 * count; i++) {
    const Tiling &t = groups[i / 3];
    const int kind = (int)(i % 3);
    const int64_t units = units_of(t, kind);
    Stage &stage = stages[i];
    while (stage.started.load(std::memory_order_relaxed) < units) {
      if (left <= 0) return 1;
      const int64_t lo = stage.started.fetch_add(grain[kind], std::memory_order_relaxed);
      if (lo >= units) break;
      const int64_t hi = least(lo + grain[kind], units);
      if (kind == 0) znnpy_tiled_forward(&t, scratch, lo, hi);
      else if (kind == 1) znnpy_tiled_multiply(&t, scratch, lo, hi);
      else *bad += pools(t) ? znnpy_tiled_pool(&t, scratch, lo, hi) : znnpy_tiled_inverse(&t, scratch, lo, hi);
      stage.done.fetch_add(hi - lo, std::memory_order_release);
      left -= (double)(hi - lo) / (double)most[kind];
    }
    if (i + 1 < 3 * count) wait_for(stage, units);
  }
  return 0;
}
