// Tiles and their spectra: numbering and storage.
//
// A tile is TZ x TY x TX voxels. Along z it is real, so of TZ frequencies TZ / 2 - 1 are kept as they are, and
// frequencies 0 and TZ / 2, which are real, share plane 0 as real and imaginary part: TZ / 2 planes of complex numbers,
// none stored twice. The four kernels (* numbers of maps are padded with zeros):
//
//   forward_z      x (S, z, y, x, maps)              -> U [slab][plane][y][x][map*]    no shared memory
//   forward_plane  U, tiles of TY x TX that overlap  -> X [frequency][tile][map*]
//   inverse_plane  Y [frequency][tile][map*]         -> V [slab][plane][y][x][map*]    outputs only
//   inverse_z      V                                 -> out (S, z, y, x, maps)
//
// A slab is one row of tiles along z of one image. Frequencies: planes p = 1 .. TZ / 2 - 1, (p - 1, ky, kx); then, for
// kz = 0 and for kz = TZ / 2, those with kx <= TX / 2, (ky, kx): the others are their conjugates.
#pragma once
#include "fft.cuh"

// Storage types of spectra. `Number` is the type of complex numbers between the kernels.
struct Halves {  // float16, scaled so that none can overflow
  using Number = half2;
};
struct Quick {  // the same, with passes along y and x in float16 too
  using Number = half2;
};
struct Split {  // X as two float16, the second being the remainder of the first; the others in float32
  using Number = float2;
};
struct Floats {  // float32, not scaled
  using Number = float2;
};

DEVICE void store_complex(half2& target, Complex v) { target = to_half2(v.re, v.im); }
DEVICE void store_complex(float2& target, Complex v) { target = make_float2(v.re, v.im); }
DEVICE Complex load_complex(half2 v) {
  const float2 f = to_float2(v);
  return {f.x, f.y};
}
DEVICE Complex load_complex(float2 v) { return {v.x, v.y}; }

// The data of one lane in a pass along y or x: a number of one map in float32, or those of two neighbouring maps in
// float16. Bits are loaded and stored unconverted: conversions between loads would delay the next load.
template <class Number>
struct Lane;
template <>
struct Lane<half2> {
  static constexpr int MAPS = 1;
  using C = Complex;
  using Bits = unsigned;
  static DEVICE C unpacked(Bits bits) { return load_complex(half2_from_bits(bits)); }
  static DEVICE Bits packed(C v) { return bits_of(to_half2(v.re, v.im)); }
};
template <>
struct Lane<float2> {
  static constexpr int MAPS = 1;
  using C = Complex;
  using Bits = float2;
  static DEVICE C unpacked(Bits bits) { return {bits.x, bits.y}; }
  static DEVICE Bits packed(C v) { return make_float2(v.re, v.im); }
};
struct TwinLane {
  static constexpr int MAPS = 2;
  using C = Twins;
  using Bits = uint2;
  static DEVICE C unpacked(Bits bits) {
    return {half2_from_bits(__byte_perm(bits.x, bits.y, 0x5410)), half2_from_bits(__byte_perm(bits.x, bits.y, 0x7632))};
  }
  static DEVICE Bits packed(C v) {
    return make_uint2(__byte_perm(bits_of(v.re), bits_of(v.im), 0x5410), __byte_perm(bits_of(v.re), bits_of(v.im), 0x7632));
  }
};

template <class Spectrum>
struct LaneOf {
  using Type = Lane<typename Spectrum::Number>;
};
template <>
struct LaneOf<Quick> {
  using Type = TwinLane;
};

// Numbers of two neighbouring maps, aligned to their total size.
DEVICE void store_two(half2* target, Complex a, Complex b) {
  *(uint2*)target = make_uint2(bits_of(to_half2(a.re, a.im)), bits_of(to_half2(b.re, b.im)));
}
DEVICE void store_two(float2* target, Complex a, Complex b) { *(float4*)target = make_float4(a.re, a.im, b.re, b.im); }
DEVICE void load_two(const half2* source, Complex& a, Complex& b) {
  const uint2 v = *(const uint2*)source;
  a = load_complex(half2_from_bits(v.x));
  b = load_complex(half2_from_bits(v.y));
}
DEVICE void load_two(const float2* source, Complex& a, Complex& b) {
  const float4 v = *(const float4*)source;
  a = {v.x, v.y};
  b = {v.z, v.w};
}

// A plane of a tile in shared memory: rows along x of CB maps each, padded by one number against bank conflicts: lanes
// run over maps, then along x in one pass and along y in the other.
template <int TY_, int TX_, int CB_>
struct Plane {
  static constexpr int TY = TY_, TX = TX_, CB = CB_, ROW = TX + 1, HX = TX / 2 + 1;
  static constexpr int NUMBERS = TY * ROW * CB;
  static DEVICE int at(int y, int x, int map) { return (y * ROW + x) * CB + map; }
};

// The frequency of a plane other than the first, and of the two that share the first.
template <class P>
DEVICE long long frequency(int plane, int ky, int kx) {
  return ((plane - 1) * P::TY + ky) * P::TX + kx;
}
template <class P>
DEVICE long long frequency_of_edge(int planes, int upper, int ky, int kx) {
  return (planes - 1) * P::TY * P::TX + (upper * P::TY + ky) * P::HX + kx;
}

// Tiles of a launch: `slabs` from `first` on, and in each the rows of tiles that cover outputs from y0 on.
struct Group {
  int first, slabs;  // slabs, counted (image, z)
  int rows, columns; // tiles along y and x
  int sy, sx;        // outputs of a tile
  int ny, nx;        // size of U: inputs; of V: outputs
  int padded;        // maps
  int planes;        // TZ / 2

  DEVICE int tiles() const { return slabs * rows * columns; }
  // The first number of a plane of U or V.
  DEVICE long long plane_at(int slab, int plane) const {
    return ((long long)slab * planes + plane) * ny * ((long long)nx * padded);
  }
};

// A power of two that scales the spectrum of values up to `peak` into float16: 2 (|X| + |X'|) <= 4 * voxels * peak, for
// the two planes in one, becomes less than 65504. 1 if there is no peak, or it is not a positive finite number.
// exponent: 2^exponent is the largest power of two not above the voxels of a tile.
DEVICE float spectrum_scale(const float* peak, int exponent) {
  if (peak == nullptr || !(*peak > 0.0f) || *peak > 3e38f) return 1.0f;
  const int e = 12 - ilogbf(*peak) - exponent;
  return scalbnf(1.0f, e < -120 ? -120 : e > 120 ? 120 : e);
}
