// Overlapping tiles of the input, transformed: the first kernel of the fused tiled FFT.
//
// A block takes CB maps of one tile. Two maps ride through the transform along z as one complex number and part behind
// it; transforms along y and x follow through shared memory. Neighbouring lanes then write neighbouring maps of one
// frequency, so that whole sectors leave together.
#include "tile.cuh"

// Two neighbouring maps of a voxel, of which `maps` are there; the others are zero.
DEVICE Complex load_pair(const float* p, int maps) {
  if (maps > 1) {
    float2 v = *(const float2*)p;
    return {v.x, v.y};
  }
  return {maps > 0 ? p[0] : 0.0f, 0.0f};
}
DEVICE Complex load_pair(const half* p, int maps) {
  if (maps > 1) return load_complex(*(const half2*)p);
  return {maps > 0 ? __half2float(p[0]) : 0.0f, 0.0f};
}
// The same where pairs are not aligned: an odd number of maps.
template <class Value>
DEVICE Complex load_apart(const Value* p, int maps) {
  return {maps > 0 ? to_float(p[0]) : 0.0f, maps > 1 ? to_float(p[1]) : 0.0f};
}

// Where a number of a spectrum goes: maps are counted in whole groups, `stride` numbers from frequency to frequency.
DEVICE void write_spectrum(Halves, void* X, long long at, Complex v) { store_complex(((half2*)X)[at], v); }
DEVICE void write_spectrum(Floats, void* X, long long at, Complex v) { store_complex(((float2*)X)[at], v); }
DEVICE void write_spectrum(Split, void* X, long long at, Complex v) {
  // Four maps together: their larger parts, 16 bytes, then what these leave out, 16 bytes.
  half2* group = (half2*)X + at / 4 * 8 + at % 4;
  half2 high = __floats2half2_rn(v.re, v.im);
  float2 kept = __half22float2(high);
  group[0] = high;
  group[4] = __floats2half2_rn(v.re - kept.x, v.im - kept.y);
}

// Planes that come before those of x along z.
template <class Value>
struct Carried {
  const Value* before;
  int planes;
  long long image;  // values from image to image
};

template <class T, class Value>
DEVICE void load_column(Complex (&v)[T::TZ], const Value* x, const Grid& g, const Carried<Value>& c, Origin o, int y,
                        int x0, int map) {
  const bool inside = o.y + y < g.ny && o.x + x0 < g.nx;
  const long long row = (long long)g.nx * g.maps, plane = row * g.ny;
  const long long at = (o.y + y) * row + (long long)(o.x + x0) * g.maps + map;
  const Value* here = x + o.image * g.image + at;
  const Value* there = c.before + o.image * c.image + at;
  const int maps = T::CB > 1 ? g.maps - map : g.maps > map;
#pragma unroll
  for (int z = 0; z < T::TZ; z++) {
    const int depth = o.z + z;
    v[z] = {0.0f, 0.0f};
    if (inside && depth < g.nz) {
      const Value* p = depth < c.planes ? there + depth * plane : here + (depth - c.planes) * plane;
      v[z] = T::CB > 1 && g.maps % 2 == 0 ? load_pair(p, maps) : load_apart(p, maps);
    }
  }
}

// x       (S, z, y, x, maps) Value, without the planes that are carried.
// X       [frequency][tile][map] of Spectrum, `padded` maps: a multiple of CB; times 2 * the scale by `peak`.
template <class T, class Spectrum, class Value>
DEVICE void forward_tile(const Value* x, void* X, const float* peak, const Grid& g, const Carried<Value>& c, int padded) {
  using Number = typename T::Number;
  EXTERN_SHARED(Number, tile);
  const int groups = padded / T::CB, map0 = blockIdx.x % groups * T::CB, number = blockIdx.x / groups;
  const Origin o = origin_of(g, number);
  const float scale = peak == nullptr ? 1.0f : spectrum_scale<T::VOXELS>(*peak);

  // Along z, two maps at a time.
  constexpr int PAIRS = (T::CB + 1) / 2;
  for (int i = threadIdx.x; i < T::TY * T::TX * PAIRS; i += blockDim.x) {
    const int a = i % PAIRS * 2, column = i / PAIRS, y = column / T::TX, x0 = column % T::TX;
    Complex v[T::TZ];
    load_column<T>(v, x, g, c, o, y, x0, map0 + a);
    transform<T::TZ, -1>(v);
    constexpr int H = T::TZ / 2;
    const float twice = 2.0f * scale;
    Number* at = tile + T::at(a, 0, y, x0);
    store_complex(at[0], {twice * v[0].re, twice * v[H].re});
    if (T::CB > 1) store_complex(at[T::MAP], {twice * v[0].im, twice * v[H].im});
#pragma unroll
    for (int k = 1; k < H; k++) {
      const Complex p = v[k], m = v[T::TZ - k];
      store_complex(at[k * T::PLANE], {scale * (p.re + m.re), scale * (p.im - m.im)});
      if (T::CB > 1) store_complex(at[T::MAP + k * T::PLANE], {scale * (p.im + m.im), scale * (m.re - p.re)});
    }
  }
  sync_block();

  // Along y: lanes run along x.
  for (int i = threadIdx.x; i < T::CB * T::PLANES * T::TX; i += blockDim.x) {
    const int x0 = i % T::TX, plane = i / T::TX % T::PLANES, map = i / (T::TX * T::PLANES);
    Number* at = tile + T::at(map, plane, 0, x0);
    Complex v[T::TY];
#pragma unroll
    for (int y = 0; y < T::TY; y++) v[y] = load_complex(at[y * T::ROW]);
    transform<T::TY, -1>(v);
#pragma unroll
    for (int y = 0; y < T::TY; y++) store_complex(at[y * T::ROW], v[y]);
  }
  sync_block();

  // Along x: lanes run over maps first. Plane 0 stays for what follows.
  const long long stride = (long long)g.count * padded;
  const long long here = (long long)number * padded + map0;
  for (int i = threadIdx.x; i < T::CB * T::PLANES * T::TY; i += blockDim.x) {
    const int map = i % T::CB, y = i / T::CB % T::TY, plane = i / (T::CB * T::TY);
    Number* at = tile + T::at(map, plane, y, 0);
    Complex v[T::TX];
#pragma unroll
    for (int k = 0; k < T::TX; k++) v[k] = load_complex(at[k]);
    transform<T::TX, -1>(v);
    if (plane == 0) {
#pragma unroll
      for (int k = 0; k < T::TX; k++) store_complex(at[k], v[k]);
    } else {
      const long long target = T::frequency(plane, y, 0) * stride + here + map;
#pragma unroll
      for (int k = 0; k < T::TX; k++) write_spectrum(Spectrum(), X, target + k * stride, v[k]);
    }
  }
  sync_block();

  // Plane 0 is A + i B, A of kz = 0 and B of kz = TZ / 2, both of real planes: A(k) = (F(k) + conj F(-k)) / 2.
  for (int i = threadIdx.x; i < T::CB * T::TY * T::HX; i += blockDim.x) {
    const int map = i % T::CB, k = i / T::CB % T::HX, y = i / (T::CB * T::HX);
    const Complex p = load_complex(tile[T::at(map, 0, y, k)]);
    const Complex m = load_complex(tile[T::at(map, 0, y ? T::TY - y : 0, k ? T::TX - k : 0)]);
    const Complex a = {0.5f * (p.re + m.re), 0.5f * (p.im - m.im)}, b = {0.5f * (p.im + m.im), 0.5f * (m.re - p.re)};
    write_spectrum(Spectrum(), X, T::frequency_of_edge(0, y, k) * stride + here + map, a);
    write_spectrum(Spectrum(), X, T::frequency_of_edge(1, y, k) * stride + here + map, b);
  }
}

template <int TZ, int TY, int TX, int CB, class Spectrum, class Value, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    forward(const Value* x, const Value* before, void* X, const float* peak, long long first, long long count, long long gz,
            long long gy, long long gx, long long sz, long long sy, long long sx, long long nz, long long ny, long long nx,
            long long maps, long long image, long long carried, long long image_before, long long padded) {
  const Grid g = {int(first), int(count), int(gz), int(gy), int(gx), int(sz), int(sy),
                  int(sx),    int(nz),    int(ny), int(nx), int(maps), image};
  const Carried<Value> c = {before, int(carried), image_before};
  forward_tile<Tile<TZ, TY, TX, CB, Spectrum>, Spectrum, Value>(x, X, peak, g, c, int(padded));
}
