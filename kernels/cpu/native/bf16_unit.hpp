// The unit that multiplies matrices of bfloat16, with sums in float32: AMX's tiles, or AVX512-BF16's products of pairs.
//
// A is the left factor: up to ROWS rows of STEP values, `pitch` bytes from row to row. B is the right factor in panels
// of LANES columns: a panel is (STEP / 2 pairs, LANES, 2), 1 KiB. A Block of sums is C (ROWS, PANELS, LANES).
//
// The same code compiles with plain C++ twins of the instructions: ZNNPY_TWIN_AMX, ZNNPY_TWIN_AVX512_BF16.
#pragma once
#include <cstring>

#include "bf16.hpp"

namespace znnpy {

constexpr int STEP = 32;     // products of a step
constexpr int PANELS = 2;    // most panels that are summed at once
constexpr int PANEL = STEP * LANES;  // values of a step of B in one panel

typedef float Lanes __attribute__((vector_size(4 * LANES)));

#if defined(__AMX_BF16__) || defined(ZNNPY_TWIN_AMX)

constexpr int ROWS = 32;  // two tiles

#if defined(ZNNPY_TWIN_AMX)

// Twins of the instructions, for tiles of up to 16 rows of 64 bytes.
struct Tile {
  alignas(64) unsigned char bytes[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local int tile_rows[8];

template <int T>
inline void tile_zero() {
  std::memset(&tiles[T], 0, sizeof(Tile));
}
template <int T>
inline void tile_load(const void *from, ptrdiff_t pitch) {
  for (int row = 0; row < tile_rows[T]; row++) std::memcpy(tiles[T].bytes[row], (const char *)from + row * pitch, 64);
}
template <int T>
inline void tile_store(void *to, ptrdiff_t pitch) {
  for (int row = 0; row < tile_rows[T]; row++) std::memcpy((char *)to + row * pitch, tiles[T].bytes[row], 64);
}
// Adds the product of tiles A and B to tile T, as the instruction is described: the first and the second values of pairs
// are summed by themselves.
template <int T, int A, int B>
inline void tile_multiply() {
  for (int row = 0; row < tile_rows[T]; row++) {
    float sums[LANES][2] = {}, total[LANES];
    for (int pair = 0; pair < STEP / 2; pair++) {
      Bf16 a[2], b[LANES][2];
      std::memcpy(a, tiles[A].bytes[row] + 4 * pair, sizeof a);
      std::memcpy(b, tiles[B].bytes[pair], sizeof b);
      for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 2; i++) sums[lane][i] = __builtin_fmaf(widen(a[i]), widen(b[lane][i]), sums[lane][i]);
    }
    std::memcpy(total, tiles[T].bytes[row], 64);
    for (int lane = 0; lane < LANES; lane++) total[lane] += sums[lane][0] + sums[lane][1];
    std::memcpy(tiles[T].bytes[row], total, 64);
  }
}
inline void unit_begin(int rows = 16) {
  for (int tile = 0; tile < 8; tile++) tile_rows[tile] = tile < 6 ? rows : 16;
}
inline void unit_end() {}

#else

struct alignas(64) TileSizes {  // what LDTILECFG reads
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Compilers' own functions for these instructions take no number of a tile that is a parameter of a template.
template <int T>
ALWAYS void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
ALWAYS void tile_load(const void *from, ptrdiff_t pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(pitch), "i"(T) : "memory");
}
template <int T>
ALWAYS void tile_store(void *to, ptrdiff_t pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(pitch), "i"(T) : "memory");
}
template <int T, int A, int B>
ALWAYS void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}
// Lets tiles 0 to 5 have so many rows, and tiles 6 and 7 all.
inline void unit_begin(int rows = 16) {
  TileSizes sizes;
  for (int tile = 0; tile < 6; tile++) sizes.rows[tile] = (uint8_t)rows;
  _tile_loadconfig(&sizes);
}
inline void unit_end() { _tile_release(); }

#endif

#elif defined(__AVX512BF16__) || defined(ZNNPY_TWIN_AVX512_BF16)

constexpr int ROWS = 12;  // as many sums as registers hold, in two panels

typedef uint32_t Pairs __attribute__((vector_size(4 * LANES)));
typedef uint32_t UnalignedPairs __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

// Returns sums plus the products of pairs of values.
ALWAYS Lanes multiply_pairs(Lanes sums, Pairs a, Pairs b) {
#if defined(ZNNPY_TWIN_AVX512_BF16)
  constexpr uint32_t UPPER = 0xffff0000u;
  const Lanes a1 = (Lanes)(a & UPPER), b1 = (Lanes)(b & UPPER), a0 = (Lanes)(a << 16), b0 = (Lanes)(b << 16);
  for (int lane = 0; lane < LANES; lane++)
    sums[lane] = __builtin_fmaf(a0[lane], b0[lane], __builtin_fmaf(a1[lane], b1[lane], sums[lane]));
  return sums;
#else
  return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#endif
}
inline void unit_begin(int = 0) {}
inline void unit_end() {}

#else
#error "this processor's instructions have no unit for bfloat16"
#endif

}  // namespace znnpy
