// Straight-line transforms of the lines of a tile, one set per length (Side), for the stages in tiled.cpp and tiled_pool.cpp.
#include <type_traits>

#include "fft.hpp"
#include "tiled.hpp"

namespace znnpy {
namespace {

ALWAYS void fetch(const float *block) {
  __builtin_prefetch(block);
  __builtin_prefetch(block + LANES);
}

// One line's share of the data that the next passes read: scattered cache lines arrive slowly, so neighbours are
// prefetched together.
__attribute__((noinline)) void fetch_later(const Complex &p, int line, int points) {
  const int slot = p.at + line, part = slot % p.passes;
  const float *const from = p.later + slot / p.passes * p.from_line;
  for (int i = part * points / p.passes; i < (part + 1) * points / p.passes; i++)
    for (int f = 0; f < p.passes * BLOCK; f += LANES) __builtin_prefetch(from + i * p.from + f, 0, 2);
  asm volatile("");  // the compiler sees no effect in a function that only prefetches, and would drop the calls
}

template <int N, bool INVERSE, bool PRUNED, bool STREAM>
void along(const Complex &p) {
  for (int line = 0; line < p.lines; line++) {
    if (INVERSE && !PRUNED && !STREAM && p.later) fetch_later(p, line, N);
    for (int half = 0; half < LANES; half += W) {
      const float *source = p.source + line * p.from_line + half;
      float *target = p.target + line * p.to_line + half;
      C out[N];
      transform<N, INVERSE, 0, 1>(
          [&](auto i) ALWAYS_LAMBDA {
            if (PRUNED && i >= p.given) return C{};
            if (INVERSE && !PRUNED && !STREAM && p.ahead) fetch(source + i * p.from + p.ahead);
            return load_complex(source + i * p.from);
          },
          out);
      unroll<N>([&](auto k) ALWAYS_LAMBDA {
        if (INVERSE && !PRUNED && k >= p.wanted) return;
        if (STREAM) {
          stream(target + k * p.to, out[k].re);
          stream(target + k * p.to + LANES, out[k].im);
        } else {
          store_complex(target + k * p.to, out[k]);
        }
      });
    }
  }
}

// SPACED: lines may begin in the padding, and voxels may be further apart than their channels need.
template <class T, int N, bool PART, bool SPACED>
void from_rows(const void *image, const Rows &r) {
  constexpr int HALF = N / 2 + 1;
  for (int y = 0; y < r.rows; y++) {
    const int slot = r.at + y;
    const T *later = static_cast<const T *>(r.later) + slot / r.passes * r.row + slot % r.passes * (SPACED ? 1 : N) * LANES;
    for (int half = 0; half < LANES; half += W) {
      const T *source = static_cast<const T *>(image) + y * r.row + half;
      C out[HALF];
      transform_real<N, 0, 1>(
          [&](auto i) ALWAYS_LAMBDA {
            if (r.later) __builtin_prefetch(later + i * (SPACED ? r.voxel : LANES), 0, 2);
            if (!PART) return load(source + i * r.voxel);
            if (i >= r.voxels) return V{};
            if constexpr (SPACED) {
              if (i < r.first) return V{};
            }
            return load_part(source + i * r.voxel, r.lanes - half);
          },
          out);
      float *target = r.spectra + y * HALF * BLOCK + half;
      unroll<HALF>([&](auto k) ALWAYS_LAMBDA { store_complex(target + k * BLOCK, out[k]); });
    }
  }
}

// Returns how many of the results are infinite or not a number. LEAKY: negative results are multiplied by a slope.
template <class T, int N, bool PART, bool LEAKY>
int64_t to_rows(void *image, const Rows &r) {
  constexpr bool MAY_STREAM = std::is_same_v<T, float>;
  constexpr int HALF = N / 2 + 1;
  int64_t count = 0;
  for (int y = 0; y < r.rows; y++) {
    for (int half = 0; half < LANES; half += W) {
      const float *source = r.spectra + y * HALF * BLOCK + half;
      T *target = static_cast<T *>(image) + y * r.row + half;
      C in[HALF];
      unroll<HALF>([&](auto k) ALWAYS_LAMBDA { in[k] = load_complex(source + k * BLOCK); });
      const V bias = load(r.bias + half);
      Mask bad{};
      restore_real<N, 0, 1>(in, [&](auto i, V value) ALWAYS_LAMBDA {
        if (i >= r.voxels || i < r.first) return;
        V v = value + bias;
        bad -= v * 0.0f != 0.0f;
        if constexpr (LEAKY) v = v > 0.0f ? v : v * r.slope;
        else if (r.relu) v = v > 0.0f ? v : V{};
        if constexpr (!MAY_STREAM) store_part(target + i * r.voxel, v, r.lanes - half);
        else if (PART && !(LEAKY && r.stream)) store_part(target + i * r.voxel, v, r.lanes - half);
        else if (r.stream) stream(target + i * r.voxel, v);
        else store(target + i * r.voxel, v);
      });
      for (int lane = 0; lane < W && half + lane < r.lanes; lane++) count += bad[lane];
    }
  }
  return count;
}

template <int N>
constexpr Side side() {
  return {N,
          along<N, false, false, false>,
          along<N, false, false, true>,
          along<N, true, false, false>,
          along<N, true, false, true>,
          along<N, true, true, false>,
          from_rows<float, N, false, false>,
          from_rows<float, N, true, false>,
          from_rows<float, N, true, true>,
          from_rows<Bf16, N, true, true>,
          to_rows<float, N, false, false>,
          to_rows<float, N, true, false>,
          to_rows<float, N, true, true>,
          to_rows<Bf16, N, true, false>,
          to_rows<Bf16, N, true, true>};
}

// Half the side of a tile: only what upsampled blocks need.
template <int N>
constexpr Side half_side() {
  return {N,
          along<N, false, false, false>,
          along<N, false, false, true>,
          along<N, true, false, false>,
          nullptr,
          nullptr,
          from_rows<float, N, false, false>,
          from_rows<float, N, true, false>,
          from_rows<float, N, true, true>,
          from_rows<Bf16, N, true, true>,
          nullptr,
          nullptr,
          nullptr,
          nullptr,
          nullptr};
}

const Side SIDES[] = {side<1>(),       half_side<2>(), half_side<3>(), side<4>(),  half_side<5>(), side<6>(),
                      half_side<7>(),  side<8>(),      half_side<9>(), side<10>(), side<12>(),     side<14>(),
                      side<16>(),      side<18>(),     side<20>(),     side<24>(), side<28>(),     side<32>()};

}  // namespace

const Side *find(int64_t length) {
  for (const Side &s : SIDES)
    if (s.length == length) return &s;
  return nullptr;
}
}  // namespace znnpy

using namespace znnpy;

// Returns 1 if tiles may have sides of that length.
EXPORT int64_t znnpy_tiled_side(int64_t length) { return find(length) != nullptr && find(length)->to != nullptr; }
