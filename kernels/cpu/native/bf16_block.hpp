// Sums of a block of places: up to ROWS places times one or two panels of maps, over all taps and steps, which are
// factors, and over products of words. Of values divided into words the products are those of words 0 and 0, 0 and 1, 1
// and 0, and with three words also 1 and 1, 0 and 2, 2 and 0.
#pragma once
#include "bf16_unit.hpp"

namespace znnpy {

struct Sums {
  const char *const *x;  // (count, words): where the inputs of the first place begin
  ptrdiff_t count;       // factors
  ptrdiff_t voxel;       // bytes from place to place
  const char *kernels;   // (count, words, panels)
  const float *bias;
  float *out;  // (ROWS, PANELS * LANES)
};

constexpr ptrdiff_t PANEL_BYTES = 2 * PANEL;
constexpr int WIDTH = PANELS * LANES;

#if defined(__AMX_BF16__) || defined(ZNNPY_TWIN_AMX)

constexpr ptrdiff_t CHUNK = 16;  // factors of values in several words: longer sums round more than other methods

// Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 kernels.
template <int TILES>
ALWAYS void load_inputs(const char *x, ptrdiff_t voxel) {
  tile_load<4>(x, voxel);
  if constexpr (TILES > 1) tile_load<5>(x + 16 * voxel, voxel);
}

template <int COUNT>
ALWAYS void load_kernels(const char *panels) {
  tile_load<6>(panels, 64);
  if constexpr (COUNT > 1) tile_load<7>(panels + PANEL_BYTES, 64);
}

struct Factors {  // one of them: its inputs, by words, and its kernels
  const char *const *x, *kernels;
};

// Multiplies the words of one factor. The factors of the first product are loaded; those of each further product,
// and those of `next` behind the last, are loaded as soon as the tiles have been read, so that no product waits for a load
// just before it.
template <int TILES, int COUNT, int WORDS, bool LAST>
ALWAYS void multiply_words(const Sums &s, const Factors &now, const Factors &next) {
  unroll<WORDS>([&](auto a) ALWAYS_LAMBDA {
    unroll<WORDS - a>([&](auto b) ALWAYS_LAMBDA {
      constexpr bool end = a + 1 == WORDS, other = b + 1 == WORDS - a;  // of the products; of the inputs' word
      constexpr bool loads = !(end && LAST);
      const char *const x = end ? next.x[0] : now.x[a + 1 < WORDS ? a + 1 : 0];
      const char *const panels = end ? next.kernels : now.kernels + (other ? 0 : b + 1) * COUNT * PANEL_BYTES;
      tile_multiply<0, 4, 6>();
      if constexpr (COUNT > 1) tile_multiply<1, 4, 7>();
      if constexpr (loads && other) tile_load<4>(x, s.voxel);
      if constexpr (TILES > 1) tile_multiply<2, 5, 6>();
      if constexpr (loads) tile_load<6>(panels, 64);
      if constexpr (TILES > 1 && COUNT > 1) tile_multiply<3, 5, 7>();
      if constexpr (loads && other && TILES > 1) tile_load<5>(x + 16 * s.voxel, s.voxel);
      if constexpr (loads && COUNT > 1) tile_load<7>(panels + PANEL_BYTES, 64);
    });
  });
}

// Sums `count` factors, from the first of these on, to what is in the tiles.
template <int TILES, int COUNT, int WORDS>
ALWAYS void add_factors(const Sums &s, Factors now, ptrdiff_t count) {
  load_inputs<TILES>(now.x[0], s.voxel);
  load_kernels<COUNT>(now.kernels);
  for (ptrdiff_t left = count - 1; left > 0; left--) {
    const Factors next{now.x + WORDS, now.kernels + WORDS * COUNT * PANEL_BYTES};
    multiply_words<TILES, COUNT, WORDS, false>(s, now, next);
    now = next;
  }
  multiply_words<TILES, COUNT, WORDS, true>(s, now, now);
}

template <int TILES, int COUNT>
ALWAYS void store_sums(float *out) {
  tile_store<0>(out, 4 * WIDTH);
  if constexpr (COUNT > 1) tile_store<1>(out + LANES, 4 * WIDTH);
  if constexpr (TILES > 1) tile_store<2>(out + 16 * WIDTH, 4 * WIDTH);
  if constexpr (TILES > 1 && COUNT > 1) tile_store<3>(out + 16 * WIDTH + LANES, 4 * WIDTH);
}

template <int TILES, int COUNT, int WORDS>
void sum_block(const Sums &s) {
  tile_load<0>(s.bias, 0);
  if constexpr (COUNT > 1) tile_load<1>(s.bias + LANES, 0);
  if constexpr (TILES > 1) tile_load<2>(s.bias, 0);
  if constexpr (TILES > 1 && COUNT > 1) tile_load<3>(s.bias + LANES, 0);
  if (WORDS == 1 || s.count <= CHUNK) {
    if (s.count > 0) add_factors<TILES, COUNT, WORDS>(s, {s.x, s.kernels}, s.count);
    return store_sums<TILES, COUNT>(s.out);
  }
  alignas(64) float part[ROWS * WIDTH];
  for (ptrdiff_t first = 0; first < s.count; first += CHUNK) {
    const Factors now{s.x + first * WORDS, s.kernels + first * WORDS * COUNT * PANEL_BYTES};
    add_factors<TILES, COUNT, WORDS>(s, now, s.count - first < CHUNK ? s.count - first : CHUNK);
    store_sums<TILES, COUNT>(first == 0 ? s.out : part);
    for (ptrdiff_t i = 0; first > 0 && i < 16 * TILES * WIDTH; i += W) store(s.out + i, load(s.out + i) + load(part + i));
    tile_zero<0>();
    if constexpr (COUNT > 1) tile_zero<1>();
    if constexpr (TILES > 1) tile_zero<2>();
    if constexpr (TILES > 1 && COUNT > 1) tile_zero<3>();
  }
}

template <int COUNT, int WORDS>
ALWAYS void sum_rows(const Sums &s, ptrdiff_t rows) {
  if (rows > 16) sum_block<2, COUNT, WORDS>(s);
  else sum_block<1, COUNT, WORDS>(s);
}

#else

constexpr ptrdiff_t CHUNK = 4;  // factors of values in several words: longer sums round more than other methods

// Returns p, but hides from the compiler that it does, which would keep the distance of each row in a register.
ALWAYS const char *moved(const char *p) {
  asm("" : "+r"(p));
  return p;
}
constexpr int NEAR_ROWS = 4;  // rows read from one pointer before it moves on

template <int NUMBER, int COUNT>
ALWAYS void add_pairs(Lanes (&sums)[NUMBER][COUNT], const char *x, ptrdiff_t voxel, const char *kernels) {
  for (int pair = 0; pair < STEP / 2; pair++, x += 4, kernels += 4 * LANES) {
    Pairs right[COUNT];
    for (int c = 0; c < COUNT; c++) right[c] = *(const UnalignedPairs *)(kernels + c * PANEL_BYTES);
    const char *at = x;
    unroll<NUMBER>([&](auto row) ALWAYS_LAMBDA {
      if (row > 0 && row % NEAR_ROWS == 0) at = moved(at + NEAR_ROWS * voxel);
      uint32_t value;
      std::memcpy(&value, at + row % NEAR_ROWS * voxel, sizeof value);
      const Pairs left = value - Pairs{};
      for (int c = 0; c < COUNT; c++) sums[row][c] = multiply_pairs(sums[row][c], left, right[c]);
    });
  }
}

template <int NUMBER, int COUNT, int WORDS>
void sum_block(const Sums &s) {
  Lanes sums[NUMBER][COUNT];
  for (int row = 0; row < NUMBER; row++)
    for (int c = 0; c < COUNT; c++) std::memcpy(&sums[row][c], s.bias + c * LANES, sizeof(Lanes));
  Lanes totals[NUMBER][COUNT] = {};  // sums of whole chunks, of values in several words; not in registers
  const auto total = [&]() ALWAYS_LAMBDA {
    for (int row = 0; row < NUMBER; row++) {
      for (int c = 0; c < COUNT; c++) {
        totals[row][c] += sums[row][c];
        sums[row][c] = Lanes{};
      }
    }
  };
  const char *kernels = s.kernels;
  ptrdiff_t left = CHUNK;
  for (ptrdiff_t i = 0; i < s.count; i++, kernels += WORDS * COUNT * PANEL_BYTES) {
    if (WORDS > 1 && left-- == 0) {
      total();
      left = CHUNK - 1;
    }
    for (int a = 0; a < WORDS; a++)
      for (int b = 0; a + b < WORDS; b++)
        add_pairs(sums, s.x[i * WORDS + a], s.voxel, kernels + b * COUNT * PANEL_BYTES);
  }
  if (WORDS > 1) total();
  const auto &found = WORDS > 1 ? totals : sums;
  for (int row = 0; row < NUMBER; row++)
    for (int c = 0; c < COUNT; c++) std::memcpy(s.out + row * WIDTH + c * LANES, &found[row][c], sizeof(Lanes));
}

template <int COUNT, int WORDS, int NUMBER = ROWS>
ALWAYS void sum_rows(const Sums &s, ptrdiff_t rows) {
  if constexpr (NUMBER > 1) {
    if (rows < NUMBER) return sum_rows<COUNT, WORDS, NUMBER - 1>(s, rows);
  }
  sum_block<NUMBER, COUNT, WORDS>(s);
}

#endif

}  // namespace znnpy
