// How a tile lies in shared memory and its spectrum in device memory.
//
// A tile is TZ x TY x TX voxels of CB maps. Along z it is real, so of TZ frequencies TZ / 2 - 1 are kept as they are, and
// frequencies 0 and TZ / 2, whose planes are real before the other two transforms, share plane 0 as real and imaginary
// part: TZ / 2 planes of TY x TX complex numbers, and none twice.
//
// Frequencies of a spectrum: planes p = 1 .. TZ / 2 - 1, (p - 1, ky, kx); then, of kz = 0 and of kz = TZ / 2, those with
// kx <= TX / 2, (ky, kx): the others are their conjugates.
#pragma once
#include "fft.cuh"

// What a spectrum is stored as, and what a tile is in shared memory.
struct Halves {};  // float16, scaled; tiles as half2
struct Split {};   // two float16, the second what the first leaves out; tiles as float2
struct Floats {};  // float32, not scaled; tiles as float2

template <class Spectrum>
struct Stored {
  using Type = float2;
  static constexpr int BANKS = 16;  // shared memory is read in half warps
};
template <>
struct Stored<Halves> {
  using Type = half2;
  static constexpr int BANKS = 32;
};

DEVICE void store_complex(half2& target, Complex v) { target = __floats2half2_rn(v.re, v.im); }
DEVICE void store_complex(float2& target, Complex v) { target = make_float2(v.re, v.im); }
DEVICE Complex load_complex(half2 v) {
  float2 f = __half22float2(v);
  return {f.x, f.y};
}
DEVICE Complex load_complex(float2 v) { return {v.x, v.y}; }

template <int TZ_, int TY_, int TX_, int CB_, class Spectrum>
struct Tile {
  static constexpr int TZ = TZ_, TY = TY_, TX = TX_, CB = CB_;
  static constexpr int PLANES = TZ / 2, HX = TX / 2 + 1;
  static constexpr int VOXELS = TZ * TY * TX;
  using Number = typename Stored<Spectrum>::Type;
  // Rows are one number longer than they need be, and maps lie BANKS / CB banks apart, so that no two lanes of an access
  // meet in a bank: in the passes along y lanes run along x, in those along x over maps first and then y.
  static constexpr int ROW = TX + 1, PLANE = TY * ROW;
  static constexpr int BANKS = Stored<Spectrum>::BANKS;
  static constexpr int MAP = (PLANES * PLANE + BANKS - 1) / BANKS * BANKS + BANKS / CB % BANKS;
  static constexpr int SHARED = CB * MAP * int(sizeof(Number));
  static constexpr int FREQUENCIES = (PLANES - 1) * TY * TX + 2 * TY * HX;

  static DEVICE int at(int map, int plane, int y, int x) { return map * MAP + plane * PLANE + y * ROW + x; }
  static DEVICE long long frequency(int plane, int ky, int kx) { return ((plane - 1) * TY + ky) * TX + kx; }  // plane > 0
  static DEVICE long long frequency_of_edge(int upper, int ky, int kx) {  // kz = 0, or TZ / 2 if `upper`
    return (PLANES - 1) * TY * TX + (upper * TY + ky) * HX + kx;
  }
};

// Tiles of a layer, counted (image, z, y, x), and the tensor that they are read from or written to.
struct Grid {
  int first, count;    // tiles of this launch
  int gz, gy, gx;      // tiles of an image along each axis
  int sz, sy, sx;      // outputs of a tile along each axis
  int nz, ny, nx;      // size of an image
  int maps;            // in device memory
  long long image;     // values from image to image
};

struct Origin {
  int image, z, y, x;
};

DEVICE Origin origin_of(const Grid& g, int tile) {
  tile += g.first;
  int x = tile % g.gx;
  tile /= g.gx;
  int y = tile % g.gy;
  tile /= g.gy;
  return {tile / g.gz, tile % g.gz * g.sz, y * g.sy, x * g.sx};
}

constexpr DEVICE int floor_log2(int n) { return n < 2 ? 0 : 1 + floor_log2(n / 2); }

// A power of two that brings the spectrum of values up to `peak` into float16: 2 (|X| + |X'|) <= 4 * voxels * peak, of
// the two planes in one, becomes less than 65504. 1 where there is no peak, or none that is a number.
template <int VOXELS>
DEVICE float spectrum_scale(float peak) {
  if (!(peak > 0.0f) || peak > 3e38f) return 1.0f;
  const int e = 12 - ilogbf(peak) - floor_log2(VOXELS);
  return scalbnf(1.0f, e < -100 ? -100 : e > 100 ? 100 : e);
}
