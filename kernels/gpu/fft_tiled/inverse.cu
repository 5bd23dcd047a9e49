// Inverse transforms of the result's spectra, cropped, with bias and activation: forward.cu's steps in reverse, only
// for the outputs that are kept.
#include "activation.cuh"
#include "tile.cuh"

constexpr int POOL_THREADS = 128;  // threads of a block of inverse_z_pool, as in tiles.py

// Reads F = A + i B of one row of plane 0, from kz = 0 and kz = TZ / 2; beyond TX / 2 from the conjugates.
template <class P, class L, class Number>
DEVICE void read_edge(typename L::C (&v)[P::TX], const Number* Y, long long here, long long stride, int planes, int y) {
  const int mirror = y ? P::TY - y : 0;
#pragma unroll
  for (int k = 0; k < P::TX; k++) {
    const bool direct = k < P::HX;
    const int row = direct ? y : mirror, kx = direct ? k : P::TX - k;
    using Bits = const typename L::Bits;
    const auto a = L::unpacked(*(Bits*)(Y + frequency_of_edge<P>(planes, 0, row, kx) * stride + here));
    const auto b = L::unpacked(*(Bits*)(Y + frequency_of_edge<P>(planes, 1, row, kx) * stride + here));
    if (direct) {
      v[k] = {subtract(a.re, b.im), add(a.im, b.re)};
    } else {
      v[k] = {add(a.re, b.im), subtract(b.re, a.im)};
    }
  }
}

// A block takes one plane of one tile for CB maps, as in forward_plane.
template <int TY, int TX, int CB, class Number, class L, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    inverse_plane(const Number* __restrict__ Y, Number* __restrict__ V, long long slabs, long long rows, long long columns,
                  long long sy, long long sx, long long ny, long long nx, long long padded, long long planes) {
  using P = Plane<TY, TX, CB>;
  using Bits = typename L::Bits;
  constexpr int LANES = CB / L::MAPS;
  EXTERN_SHARED(Number, shared);
  const Group g = {0, int(slabs), int(rows), int(columns), int(sy), int(sx), int(ny), int(nx), int(padded), int(planes)};
  const int chunks = g.padded / CB, tiles = g.tiles();
  const int map0 = blockIdx.x % chunks * CB, tile = blockIdx.x / chunks % tiles, plane = blockIdx.x / chunks / tiles;
  const int x_first = tile % g.columns * g.sx, y_first = tile / g.columns % g.rows * g.sy;

  // Along x: lanes run over maps, then y. Only the outputs that are kept go on.
  const long long stride = (long long)tiles * g.padded;
  for (int i = threadIdx.x; i < TY * LANES; i += THREADS) {
    const int map = i % LANES * L::MAPS, y = i / LANES;
    const long long here = (long long)tile * g.padded + map0 + map;
    typename L::C v[TX];
    if (plane == 0) {
      read_edge<P, L>(v, Y, here, stride, g.planes, y);
    } else {
      const Number* from = Y + frequency<P>(plane, y, 0) * stride + here;
      Bits bits[TX];
#pragma unroll
      for (int x = 0; x < TX; x++) bits[x] = *(const Bits*)(from + x * stride);
#pragma unroll
      for (int x = 0; x < TX; x++) v[x] = L::unpacked(bits[x]);
    }
    transform<TX, 1>(v);
#pragma unroll
    for (int x = 0; x < TX; x++)
      if (x < g.sx) *(Bits*)(shared + P::at(y, x, map)) = L::packed(v[x]);
  }
  sync_block();

  // Along y: lanes run over maps, then x.
  Number* target = V + g.plane_at(tile / (g.columns * g.rows), plane) + map0;
  const long long row = (long long)g.nx * g.padded;
  for (int i = threadIdx.x; i < g.sx * LANES; i += THREADS) {
    const int map = i % LANES * L::MAPS, x = i / LANES;
    if (x_first + x >= g.nx) continue;
    typename L::C v[TY];
#pragma unroll
    for (int y = 0; y < TY; y++) v[y] = L::unpacked(*(const Bits*)(shared + P::at(y, x, map)));
    transform<TY, 1>(v);
    Number* to = target + y_first * row + (long long)(x_first + x) * g.padded + map;
#pragma unroll
    for (int y = 0; y < TY; y++)
      if (y < g.sy && y_first + y < g.ny) *(Bits*)(to + y * row) = L::packed(v[y]);
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

// Reads two maps of a column along z from its planes, `step` apart, and transforms them.
template <int TZ, class Number>
DEVICE void results_of_column(Complex (&v)[TZ], const Number* source, long long step) {
  constexpr int H = TZ / 2;
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
}

// The epilogue of results: scale, bias and activation.
struct Finish {
  float back, bias[2];
  int activation;

  DEVICE float operator()(float result, int map) const {
    const float value = back * result + bias[map];
    // relu, or none, is a lower bound; the others are rare enough to be tested for every value.
    if (activation > RELU) return activate(value, activation);
    const float least = activation == RELU ? 0.0f : -INFINITY;
    return value < least ? least : value;
  }
};

// Two maps of a column along z, as in forward_z; rows y0 .. y0 + ny - 1 of `out` come from V.
//
// out     (S, z, y, x, maps) Value, `image` values from image to image.
// factor  rescales results, before the scale by `peak` is undone.
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
    results_of_column(v, source, step);
    const Finish finish = {
        factor / spectrum_scale(peak, int(exponent)), {bias[map], there > 1 ? bias[map + 1] : 0.0f}, int(activation)};
    const bool paired = there > 1 && maps % 2 == 0;
    const int number = int(first) + slab, z0 = number % int(gz) * int(sz);
    const long long plane = height * nx * maps;
    Value* target = out + number / int(gz) * image + z0 * plane + ((y0 + y) * nx + column) * maps + map;
    const int depth = min(int(sz), int(nz) - z0);
#pragma unroll
    for (int z = 0; z < TZ; z++) {
      if (z < depth) {
        const float a = finish(v[z].re, 0), b = finish(v[z].im, 1);
        largest = larger_magnitude(largest, a);
        if (there > 1) largest = larger_magnitude(largest, b);
        store_pair(target + z * plane, there, paired, a, b);
      }
    }
  }
  raise_peak_by_warp(out_peak, largest);
}

// Does what inverse_z does, max-pooled into fragments: windows of 1 or 2 along each axis. The offered activations are
// monotonic, so the maximum is taken before them.
//
// Lanes run over 4 pairs of maps, then 8 neighbouring columns; with px = 2 the last column only contributes to the one
// before. Rows follow one another: with py = 2 the previous row is kept in shared memory, in places that only its own
// thread uses.
//
// V       results before pooling: rows y0 .. y0 + ny - 1 of them.
// out     (S * pz * py * px, z, y, x, maps) Value: the maximum of the window that starts at i is voxel i / p of
//         fragment i % p.
// sz, nz  windows of a slab, and of an image; my, mx: of an image along y and x.
// rows    windows along y per block.
// Blocks: (8 columns * 8 maps in warps, windows along y / rows, slab). Shared memory: sz float2 per thread if py = 2.
template <int TZ, class Number, class Value>
__global__ void __launch_bounds__(POOL_THREADS, TZ > 16 ? 4 : 6)
    inverse_z_pool(const Number* __restrict__ V, Value* __restrict__ out, const float* __restrict__ bias, const float* peak,
                   float* out_peak, long long first, long long gz, long long sz, long long nz, long long my,
                   long long mx, long long y0, long long ny, long long nx, long long maps, long long padded,
                   long long image, long long activation, float factor, long long exponent, long long pz, long long py,
                   long long px, long long rows) {
  EXTERN_SHARED(float2, before);
  const int lane = threadIdx.x % WARP, warp = blockIdx.x * (POOL_THREADS / WARP) + threadIdx.x / WARP;
  const int by_maps = int(padded) / 8, slab = blockIdx.z;
  const int column = warp / by_maps * (9 - int(px)) + lane / 4, map = (warp % by_maps * 4 + lane % 4) * 2;
  const int there = int(maps) - map;
  const bool paired = there > 1 && maps % 2 == 0, reads = column < nx;
  const bool writes = column < mx && lane / 4 < 9 - px && there > 0;
  const int number = int(first) + slab, z0 = number % int(gz) * int(sz), half_of = int(pz) - 1;
  const Finish finish = {factor / spectrum_scale(peak, int(exponent)),
                         {there > 0 ? bias[map] : 0.0f, there > 1 ? bias[map + 1] : 0.0f},
                         int(activation)};
  const long long step = ny * nx * padded;
  const Number* source = V + slab * (TZ / 2) * step + (long long)column * padded + map;
  const long long line = mx / px * maps, plane = my / py * line, fragment = py * px * image;
  // Windows 0, 2, 4 .. along z of a slab go to one fragment, the others to another or, with pz = 1, between them.
  const long long even = (z0 & half_of) * fragment + (z0 >> half_of) * plane;
  const long long odd = ((z0 + 1) & half_of) * fragment + ((z0 + 1) >> half_of) * plane;
  Value* const target = out + (number / int(gz) * pz * py * px + column % px) * image + column / px * maps + map + even;
  const int begin = int(blockIdx.y * rows), last = int(py) - 1, end = min(begin + int(rows) + last, int(ny));
  float largest = 0.0f;
#pragma unroll 1
  for (int y = begin; y < end; y++) {
    Complex v[TZ] = {};
    if (reads) results_of_column(v, source + y * nx * padded, step);
    if (pz > 1) {
#pragma unroll
      for (int z = 0; z + 1 < TZ; z++) v[z] = {maximum(v[z].re, v[z + 1].re), maximum(v[z].im, v[z + 1].im)};
    }
    const long long at = y0 + y - last;  // a window
    Value* row = target + at % py * px * image + at / py * line;
    // The shuffle prevents these values from being computed for every window before the loop and kept in registers.
    const long long to_odd = shuffle(odd - even, 0), to_next = shuffle(pz > 1 ? plane : 2 * plane, 0);
    const int depth = shuffle(min(int(sz), int(nz) - z0), 0);
#pragma unroll
    for (int z = 0; z < TZ; z++) {
      if (z < depth) {
        float2 found = make_float2(v[z].re, v[z].im);
        if (px > 1) {
          found.x = maximum(found.x, shuffle_down(found.x, 4));
          found.y = maximum(found.y, shuffle_down(found.y, 4));
        }
        if (py > 1) {
          float2& kept = before[z * POOL_THREADS + threadIdx.x];
          const float2 old = kept;
          kept = found;
          found = make_float2(maximum(found.x, old.x), maximum(found.y, old.y));
        }
        if (writes && y >= begin + last) {
          const float a = finish(found.x, 0), b = finish(found.y, 1);
          largest = larger_magnitude(largest, a);
          if (there > 1) largest = larger_magnitude(largest, b);
          store_pair(row + (z % 2 ? to_odd : 0), there, paired, a, b);
        }
        if (z % 2) row += to_next;
      }
    }
  }
  raise_peak_by_warp(out_peak, largest);
}
