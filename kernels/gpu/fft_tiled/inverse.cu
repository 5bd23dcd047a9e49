// Spectra of the result, transformed back, cropped, with bias and activation: the last kernel of the fused tiled FFT.
//
// The forward transform's steps in reverse, for the outputs that are kept alone: of TX positions along x only those of
// the tile's outputs take part in the transforms along y, and of TY in those along z.
#include "activation.cuh"
#include "tile.cuh"

DEVICE Complex read_spectrum(const half2* Y, long long at) { return load_complex(Y[at]); }
DEVICE Complex read_spectrum(const float2* Y, long long at) { return load_complex(Y[at]); }

DEVICE void store_pair(float* p, int maps, bool aligned, float a, float b) {
  if (maps > 1 && aligned) {
    *(float2*)p = make_float2(a, b);
    return;
  }
  if (maps > 0) p[0] = a;
  if (maps > 1) p[1] = b;
}
DEVICE void store_pair(half* p, int maps, bool aligned, float a, float b) {
  if (maps > 1 && aligned) {
    *(half2*)p = __floats2half2_rn(a, b);
    return;
  }
  if (maps > 0) p[0] = __float2half_rn(a);
  if (maps > 1) p[1] = __float2half_rn(b);
}

// F = A + i B of one row of plane 0, from kz = 0 and kz = TZ / 2; beyond TX / 2 from the conjugates.
template <class T, class Number>
DEVICE void read_edge(Complex (&v)[T::TX], const Number* Y, long long here, long long stride, int y) {
  const int mirror = y ? T::TY - y : 0;
#pragma unroll
  for (int k = 0; k < T::TX; k++) {
    const bool direct = k < T::HX;
    const int row = direct ? y : mirror, kx = direct ? k : T::TX - k;
    Complex a = read_spectrum(Y, T::frequency_of_edge(0, row, kx) * stride + here);
    Complex b = read_spectrum(Y, T::frequency_of_edge(1, row, kx) * stride + here);
    if (!direct) {
      a.im = -a.im;
      b.im = -b.im;
    }
    v[k] = {a.re - b.im, a.im + b.re};
  }
}

// Y       [frequency][tile][map] of half2 (Halves) or float2, `padded` maps.
// out     (S, z, y, x, maps) Value; every voxel of every tile that lies inside is written.
// factor  what brings results back to their size, before the scale by `peak` is undone.
template <class T, class Value>
DEVICE void inverse_tile(const typename T::Number* Y, Value* out, const float* bias, const float* peak, float* out_peak,
                         const Grid& g, int padded, int activation, float factor) {
  using Number = typename T::Number;
  EXTERN_SHARED(Number, tile);
  const int groups = padded / T::CB, map0 = blockIdx.x % groups * T::CB, number = blockIdx.x / groups;
  const long long stride = (long long)g.count * padded;
  const long long first = (long long)number * padded + map0;

  // Along x: lanes run over maps first.
  for (int i = threadIdx.x; i < T::CB * T::PLANES * T::TY; i += blockDim.x) {
    const int map = i % T::CB, y = i / T::CB % T::TY, plane = i / (T::CB * T::TY);
    const long long here = first + map;
    Complex v[T::TX];
    if (plane == 0) {
      read_edge<T>(v, Y, here, stride, y);
    } else {
      const long long source = T::frequency(plane, y, 0) * stride + here;
#pragma unroll
      for (int k = 0; k < T::TX; k++) v[k] = read_spectrum(Y, source + k * stride);
    }
    transform<T::TX, 1>(v);
    Number* at = tile + T::at(map, plane, y, 0);
#pragma unroll
    for (int k = 0; k < T::TX; k++)
      if (k < g.sx) store_complex(at[k], v[k]);
  }
  sync_block();

  // Along y: lanes run along x.
  for (int i = threadIdx.x; i < T::CB * T::PLANES * T::TX; i += blockDim.x) {
    const int x0 = i % T::TX, plane = i / T::TX % T::PLANES, map = i / (T::TX * T::PLANES);
    if (x0 >= g.sx) continue;
    Number* at = tile + T::at(map, plane, 0, x0);
    Complex v[T::TY];
#pragma unroll
    for (int y = 0; y < T::TY; y++) v[y] = load_complex(at[y * T::ROW]);
    transform<T::TY, 1>(v);
#pragma unroll
    for (int y = 0; y < T::TY; y++)
      if (y < g.sy) store_complex(at[y * T::ROW], v[y]);
  }
  sync_block();

  // Along z, two maps at a time.
  const Origin o = origin_of(g, number);
  const float back = factor / (peak == nullptr ? 1.0f : spectrum_scale<T::VOXELS>(*peak));
  const long long row = (long long)g.nx * g.maps, plane = row * g.ny;
  constexpr int PAIRS = (T::CB + 1) / 2, H = T::TZ / 2;
  float largest = 0.0f;
  for (int i = threadIdx.x; i < g.sy * g.sx * PAIRS; i += blockDim.x) {
    const int a = i % PAIRS * 2, column = i / PAIRS, y = column / g.sx, x0 = column % g.sx;
    const int map = map0 + a, maps = T::CB > 1 ? g.maps - map : g.maps > map;
    if (maps <= 0 || o.y + y >= g.ny || o.x + x0 >= g.nx) continue;
    const Number* at = tile + T::at(a, 0, y, x0);
    Complex v[T::TZ];
    {
      const Complex p = load_complex(at[0]);
      const Complex q = T::CB > 1 ? load_complex(at[T::MAP]) : Complex{0.0f, 0.0f};
      v[0] = {p.re, q.re};
      v[H] = {p.im, q.im};
    }
#pragma unroll
    for (int k = 1; k < H; k++) {
      const Complex p = load_complex(at[k * T::PLANE]);
      const Complex q = T::CB > 1 ? load_complex(at[T::MAP + k * T::PLANE]) : Complex{0.0f, 0.0f};
      v[k] = {p.re - q.im, p.im + q.re};
      v[T::TZ - k] = {p.re + q.im, q.re - p.im};
    }
    transform<T::TZ, 1>(v);
    const float b0 = bias[map], b1 = maps > 1 ? bias[map + 1] : 0.0f;
    Value* target = out + o.image * g.image + (long long)o.z * plane + (o.y + y) * row + (long long)(o.x + x0) * g.maps + map;
#pragma unroll
    for (int z = 0; z < T::TZ; z++) {
      if (z < g.sz && o.z + z < g.nz) {
        const float r0 = activate(back * v[z].re + b0, activation);
        const float r1 = maps > 1 ? activate(back * v[z].im + b1, activation) : 0.0f;
        largest = larger_magnitude(largest, larger_magnitude(r0, r1));
        store_pair(target + z * plane, maps, T::CB > 1 && g.maps % 2 == 0, r0, r1);
      }
    }
  }
  raise_peak_by_warp(out_peak, largest);
}

template <int TZ, int TY, int TX, int CB, class Spectrum, class Value, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    inverse(const void* Y, Value* out, const float* bias, const float* peak, float* out_peak, long long first,
            long long count, long long gz, long long gy, long long gx, long long sz, long long sy, long long sx, long long nz,
            long long ny, long long nx, long long maps, long long image, long long padded, long long activation,
            float factor) {
  using T = Tile<TZ, TY, TX, CB, Spectrum>;
  const Grid g = {int(first), int(count), int(gz), int(gy), int(gx), int(sz), int(sy),
                  int(sx),    int(nz),    int(ny), int(nx), int(maps), image};
  inverse_tile<T, Value>((const typename T::Number*)Y, out, bias, peak, out_peak, g, int(padded), int(activation), factor);
}
