// Spectra of the result, transformed back, cropped, with bias and activation: forward.cu's steps in reverse, for the
// outputs that are kept alone.
#include "activation.cuh"
#include "tile.cuh"

// F = A + i B of one row of plane 0, from kz = 0 and kz = TZ / 2; beyond TX / 2 from the conjugates.
template <class P, class Number>
DEVICE void read_edge(Complex (&v)[P::TX], const Number* Y, long long here, long long stride, int planes, int y) {
  const int mirror = y ? P::TY - y : 0;
#pragma unroll
  for (int k = 0; k < P::TX; k++) {
    const bool direct = k < P::HX;
    const int row = direct ? y : mirror, kx = direct ? k : P::TX - k;
    const Complex a = load_complex(Y[frequency_of_edge<P>(planes, 0, row, kx) * stride + here]);
    const Complex b = load_complex(Y[frequency_of_edge<P>(planes, 1, row, kx) * stride + here]);
    v[k] = direct ? Complex{a.re - b.im, a.im + b.re} : Complex{a.re + b.im, b.re - a.im};
  }
}

// A block takes one plane of one tile for CB maps, as in forward_plane.
template <int TY, int TX, int CB, class Number, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    inverse_plane(const Number* __restrict__ Y, Number* __restrict__ V, long long slabs, long long rows, long long columns,
                  long long sy, long long sx, long long ny, long long nx, long long padded, long long planes) {
  using P = Plane<TY, TX, CB>;
  EXTERN_SHARED(Number, shared);
  const Group g = {0, int(slabs), int(rows), int(columns), int(sy), int(sx), int(ny), int(nx), int(padded), int(planes)};
  const int chunks = g.padded / CB, tiles = g.tiles();
  const int map0 = blockIdx.x % chunks * CB, tile = blockIdx.x / chunks % tiles, plane = blockIdx.x / chunks / tiles;
  const int x_first = tile % g.columns * g.sx, y_first = tile / g.columns % g.rows * g.sy;

  // Along x: lanes run over maps, then y. Only what is kept goes on.
  const long long stride = (long long)tiles * g.padded;
  for (int i = threadIdx.x; i < TY * CB; i += THREADS) {
    const int map = i % CB, y = i / CB;
    const long long here = (long long)tile * g.padded + map0 + map;
    Complex v[TX];
    if (plane == 0) {
      read_edge<P>(v, Y, here, stride, g.planes, y);
    } else {
      const Number* from = Y + frequency<P>(plane, y, 0) * stride + here;
      typename Bits<Number>::Type bits[TX];
#pragma unroll
      for (int x = 0; x < TX; x++) bits[x] = *(const typename Bits<Number>::Type*)(from + x * stride);
#pragma unroll
      for (int x = 0; x < TX; x++) v[x] = Bits<Number>::complex(bits[x]);
    }
    transform<TX, 1>(v);
#pragma unroll
    for (int x = 0; x < TX; x++)
      if (x < g.sx) store_complex(shared[P::at(y, x, map)], v[x]);
  }
  sync_block();

  // Along y: lanes run over maps, then x.
  Number* target = V + g.plane_at(tile / (g.columns * g.rows), plane) + map0;
  const long long row = (long long)g.nx * g.padded;
  for (int i = threadIdx.x; i < g.sx * CB; i += THREADS) {
    const int map = i % CB, x = i / CB;
    if (x_first + x >= g.nx) continue;
    Complex v[TY];
#pragma unroll
    for (int y = 0; y < TY; y++) v[y] = load_complex(shared[P::at(y, x, map)]);
    transform<TY, 1>(v);
    Number* to = target + y_first * row + (long long)(x_first + x) * g.padded + map;
#pragma unroll
    for (int y = 0; y < TY; y++)
      if (y < g.sy && y_first + y < g.ny) store_complex(to[y * row], v[y]);
  }
}

DEVICE void store_pair(float* p, int maps, bool paired, float a, float b) {
  if (paired) {
    store_activation2(p, make_float2(a, b));
    return;
  }
  p[0] = a;
  if (maps > 1) p[1] = b;
}
DEVICE void store_pair(half* p, int maps, bool paired, float a, float b) {
  if (paired) {
    store_activation2(p, make_float2(a, b));
    return;
  }
  p[0] = to_half(a);
  if (maps > 1) p[1] = to_half(b);
}

// Two maps of a column along z, as in forward_z; rows y0 .. y0 + ny - 1 of `out` come from V.
//
// out     (S, z, y, x, maps) Value, `image` values from image to image.
// factor  what brings results back to their size, before the scale by `peak` is undone.
// Blocks: (x * pairs, y, slab).
template <int TZ, class Number, class Value>
__global__ void __launch_bounds__(256, TZ > 16 ? 2 : 3)
    inverse_z(const Number* __restrict__ V, Value* __restrict__ out, const float* __restrict__ bias, const float* peak,
              float* out_peak, long long first, long long gz, long long sz, long long nz, long long height, long long y0,
              long long ny, long long nx, long long maps, long long padded, long long image, long long activation,
              float factor, long long exponent) {
  constexpr int H = TZ / 2;
  const int i = blockIdx.x * blockDim.x + threadIdx.x, pairs = int(padded) / 2;
  const int column = i / pairs, map = i % pairs * 2, y = blockIdx.y, slab = blockIdx.z;
  const int there = int(maps) - map;
  float largest = 0.0f;
  if (column < nx && there > 0) {
    const long long step = ny * nx * padded;
    const Number* source = V + slab * H * step + ((long long)y * nx + column) * padded + map;
    Complex v[TZ];
#pragma unroll
    for (int k = 0; k < H; k++) {
      Complex p, q;
      load_two(source + k * step, p, q);
      if (k == 0) {
        v[0] = {p.re, q.re};
        v[H] = {p.im, q.im};
      } else {
        v[k] = {p.re - q.im, p.im + q.re};
        v[TZ - k] = {p.re + q.im, q.re - p.im};
      }
    }
    transform<TZ, 1>(v);
    const float back = factor / spectrum_scale(peak, int(exponent));
    const float b0 = bias[map], b1 = there > 1 ? bias[map + 1] : 0.0f;
    const bool paired = there > 1 && maps % 2 == 0;
    const int number = int(first) + slab, z0 = number % int(gz) * int(sz);
    const long long plane = height * nx * maps;
    Value* target = out + number / int(gz) * image + z0 * plane + ((y0 + y) * nx + column) * maps + map;
    const int depth = min(int(sz), int(nz) - z0);
    // relu, or nothing, is a bound from below; the others are rare enough to ask again for every value.
    const float least = activation == RELU ? 0.0f : -INFINITY;
#pragma unroll
    for (int z = 0; z < TZ; z++) {
      if (z < depth) {
        float a = back * v[z].re + b0, b = back * v[z].im + b1;
        if (activation > RELU) {
          a = activate(a, int(activation));
          b = activate(b, int(activation));
        }
        a = a < least ? least : a;
        b = b < least ? least : b;
        largest = larger_magnitude(largest, a);
        if (there > 1) largest = larger_magnitude(largest, b);
        store_pair(target + z * plane, there, paired, a, b);
      }
    }
  }
  raise_peak_by_warp(out_peak, largest);
}
