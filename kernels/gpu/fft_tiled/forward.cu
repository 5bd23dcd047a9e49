// Transforms of overlapping tiles of the input, along z and then along y and x. See tile.cuh for the layout.
#include "tile.cuh"

// Loads a column of two neighbouring maps, of which `there` exist; the others, and planes from `depth` on, are zero.
template <int TZ, class Value>
DEVICE void load_column(Complex (&v)[TZ], const Value* here, const Value* kept, int carried, int depth, long long plane,
                        int there, bool paired) {
  // Loads come first, with nothing between them, so that all are in flight at once.
  float2 two[TZ];
  if (paired && carried <= 0 && depth >= TZ) {
#pragma unroll
    for (int z = 0; z < TZ; z++) two[z] = load_activation2(here + z * plane);
  } else if (paired) {
#pragma unroll
    for (int z = 0; z < TZ; z++) {
      two[z] = make_float2(0.0f, 0.0f);
      if (z < depth) two[z] = load_activation2((z < carried ? kept : here) + z * plane);
    }
  } else {
#pragma unroll
    for (int z = 0; z < TZ; z++) {
      const Value* from = (z < carried ? kept : here) + z * plane;
      two[z] = make_float2(0.0f, 0.0f);
      if (z < depth && there > 0) two[z].x = load_activation(from);
      if (z < depth && there > 1) two[z].y = load_activation(from + 1);
    }
  }
#pragma unroll
  for (int z = 0; z < TZ; z++) v[z] = {two[z].x, two[z].y};
}

// Two maps of a column along z share one transform as a + i b and are separated after it.
//
// x       (S, z, y, x, maps) Value, `image` values from image to image, without the `carried` planes along z that are
//         in `before`; planes after the last are zero. Rows y0 .. y0 + ny - 1 of it go to U.
// U       times 2 * the scale by `peak`.
// Blocks: (x * pairs, y, slab).
template <int TZ, class Spectrum, class Value>
__global__ void __launch_bounds__(256, TZ > 24 ? 2 : TZ > 16 ? 2 : 3)
    forward_z(const Value* __restrict__ x, const Value* __restrict__ before, typename Spectrum::Number* __restrict__ U,
              const float* peak, long long first, long long gz, long long sz, long long nz, long long height, long long y0,
              long long ny, long long nx, long long maps, long long padded, long long image, long long carried,
              long long image_before, long long exponent) {
  constexpr int H = TZ / 2;
  const int i = blockIdx.x * blockDim.x + threadIdx.x, pairs = int(padded) / 2;
  const int column = i / pairs, map = i % pairs * 2, y = blockIdx.y, slab = blockIdx.z;
  if (column >= nx) return;
  const int number = int(first) + slab, z0 = number % int(gz) * int(sz);
  const long long of_image = number / int(gz);
  const int there = int(maps) - map;
  const bool paired = there > 1 && maps % 2 == 0;
  const long long plane = height * nx * maps, at = ((y0 + y) * nx + column) * maps + map;
  const Value* here = x + of_image * image + (z0 - carried) * plane + at;
  const Value* kept = before + of_image * image_before + z0 * plane + at;
  Complex v[TZ];
  const int depth = y0 + y < height ? int(nz) - z0 : 0;
  load_column(v, here, kept, int(carried) - z0, depth, plane, there, paired);
  transform<TZ, -1>(v);
  const float scale = spectrum_scale(peak, int(exponent)), twice = 2.0f * scale;
  const long long step = ny * nx * padded;
  typename Spectrum::Number* target = U + slab * H * step + ((long long)y * nx + column) * padded + map;
  store_two(target, {twice * v[0].re, twice * v[H].re}, {twice * v[0].im, twice * v[H].im});
#pragma unroll
  for (int k = 1; k < H; k++) {
    const Complex p = v[k], m = v[TZ - k];
    store_two(target + k * step, {scale * (p.re + m.re), scale * (p.im - m.im)},
              {scale * (p.im + m.im), scale * (m.re - p.re)});
  }
}

// Writes a number of X.
DEVICE void write_spectrum(Halves, void* X, long long at, Complex v) { store_complex(((half2*)X)[at], v); }
DEVICE void write_spectrum(Quick, void* X, long long at, Complex v) { store_complex(((half2*)X)[at], v); }
DEVICE void write_spectrum(Quick, void* X, long long at, Twins v) { *(uint2*)((half2*)X + at) = TwinLane::packed(v); }
DEVICE void write_spectrum(Floats, void* X, long long at, Complex v) { store_complex(((float2*)X)[at], v); }
DEVICE void write_spectrum(Split, void* X, long long at, Complex v) {
  // Four maps together: their larger parts, 16 bytes, then the remainders, 16 bytes.
  half2* group = (half2*)X + at / 4 * 8 + at % 4;
  const half2 high = to_half2(v.re, v.im);
  const float2 kept = to_float2(high);
  group[0] = high;
  group[4] = to_half2(v.re - kept.x, v.im - kept.y);
}

// A block takes one plane of one tile for CB maps. Lanes run over maps first, so whole sectors are read and written.
//
// Blocks: maps / CB, then tiles, then planes.
template <int TY, int TX, int CB, class Spectrum, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    forward_plane(const typename Spectrum::Number* __restrict__ U, void* __restrict__ X, long long slabs, long long rows,
                  long long columns, long long sy, long long sx, long long ny, long long nx, long long padded,
                  long long planes) {
  using P = Plane<TY, TX, CB>;
  using Number = typename Spectrum::Number;
  using L = typename LaneOf<Spectrum>::Type;
  using Bits = typename L::Bits;
  constexpr int LANES = CB / L::MAPS;
  EXTERN_SHARED(Number, shared);
  const Group g = {0, int(slabs), int(rows), int(columns), int(sy), int(sx), int(ny), int(nx), int(padded), int(planes)};
  const int chunks = g.padded / CB, tiles = g.tiles();
  const int map0 = blockIdx.x % chunks * CB, tile = blockIdx.x / chunks % tiles, plane = blockIdx.x / chunks / tiles;
  const int x_first = tile % g.columns * g.sx, y_first = tile / g.columns % g.rows * g.sy;

  // Along y: lanes run over maps, then x. All loads are issued before the first value is needed.
  const bool inside = x_first + TX <= g.nx && y_first + TY <= g.ny;
  const Number* source = U + g.plane_at(tile / (g.columns * g.rows), plane) + map0;
  const long long row = (long long)g.nx * g.padded;
  for (int i = threadIdx.x; i < TX * LANES; i += THREADS) {
    const int map = i % LANES * L::MAPS, x = i / LANES;
    const Number* from = source + y_first * row + (long long)(x_first + x) * g.padded + map;
    Bits bits[TY];
    if (inside) {
#pragma unroll
      for (int y = 0; y < TY; y++) bits[y] = *(const Bits*)(from + y * row);
    } else {
      const bool column = x_first + x < g.nx;
#pragma unroll
      for (int y = 0; y < TY; y++) {
        bits[y] = {};
        if (column && y_first + y < g.ny) bits[y] = *(const Bits*)(from + y * row);
      }
    }
    typename L::C v[TY];
#pragma unroll
    for (int y = 0; y < TY; y++) v[y] = L::unpacked(bits[y]);
    transform<TY, -1>(v);
#pragma unroll
    for (int y = 0; y < TY; y++) *(Bits*)(shared + P::at(y, x, map)) = L::packed(v[y]);
  }
  sync_block();

  // Along x: lanes run over maps, then y.
  const long long stride = (long long)tiles * g.padded, here = (long long)tile * g.padded + map0;
  for (int i = threadIdx.x; i < TY * LANES; i += THREADS) {
    const int map = i % LANES * L::MAPS, y = i / LANES;
    typename L::C v[TX];
#pragma unroll
    for (int x = 0; x < TX; x++) v[x] = L::unpacked(*(const Bits*)(shared + P::at(y, x, map)));
    transform<TX, -1>(v);
    if (plane == 0) {
#pragma unroll
      for (int x = 0; x < TX; x++) *(Bits*)(shared + P::at(y, x, map)) = L::packed(v[x]);
    } else {
      const long long target = frequency<P>(plane, y, 0) * stride + here + map;
#pragma unroll
      for (int x = 0; x < TX; x++) write_spectrum(Spectrum(), X, target + x * stride, v[x]);
    }
  }
  if (plane > 0) return;
  sync_block();

  // Plane 0 is A + i B, A for kz = 0 and B for kz = TZ / 2, both of real planes: A(k) = (F(k) + conj F(-k)) / 2.
  for (int i = threadIdx.x; i < TY * P::HX * CB; i += THREADS) {
    const int map = i % CB, x = i / CB % P::HX, y = i / (CB * P::HX);
    const Complex p = load_complex(shared[P::at(y, x, map)]);
    const Complex m = load_complex(shared[P::at(y ? TY - y : 0, x ? TX - x : 0, map)]);
    const Complex a = {0.5f * (p.re + m.re), 0.5f * (p.im - m.im)}, b = {0.5f * (p.im + m.im), 0.5f * (m.re - p.re)};
    write_spectrum(Spectrum(), X, frequency_of_edge<P>(g.planes, 0, y, x) * stride + here + map, a);
    write_spectrum(Spectrum(), X, frequency_of_edge<P>(g.planes, 1, y, x) * stride + here + map, b);
  }
}
