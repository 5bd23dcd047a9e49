// Products of spectra on the unit for bfloat16; see conv_fft_lanes.py.
//
// With [yr, yi] = [xr, xi] @ [[wr, wi], [-wi, wr]] the right factor would need wr and wi twice. Here it is [wr; wi], and
// the left factor has two rows for each tile, [xr, -xi] and [xi, xr]: real parts of the results, then imaginary ones.
#include "bf16_products.hpp"

#include "bf16_unit.hpp"

namespace znnpy {
namespace {

// Stores the first `count` lanes.
ALWAYS void put(Bf16 *to, Half h, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(to, (__mmask16)((1u << (count < 0 ? 0 : count)) - 1), (__m256i)h);
#else
  for (int i = 0; i < W && i < count; i++) to[i].bits = h[i];
#endif
}

// Divides the input of one frequency for up to GROUP tiles into words: each is what the words before leave, rounded.
template <int WORDS>
void divide(const Products &p, const float *x, int tiles, const float *&ahead) {
  const ptrdiff_t row = row_of(p.fin), word = 2 * GROUP * row, second = LANES * steps_of(p.fin);
  for (int tile = 0; tile < tiles; tile++, x += p.tile) {
    Bf16 *re = p.left + tile * row, *im = re + GROUP * row;
    for (ptrdiff_t block = 0; block < p.in; block++) {
      const int lanes = (int)p.channels[block].lanes;
      for (int line = 0; line < 2 && ahead < p.end; line++, ahead += LANES) __builtin_prefetch(ahead, 0, 2);
      for (int half = 0; half < LANES; half += W) {
        C c = load_complex(x + block * BLOCK + half);
        for (int w = 0; w < WORDS; w++) {
          const Half r = narrow(c.re), i = narrow(c.im);
          put(re + w * word + half, r, lanes - half);
          put(re + w * word + second + half, i ^ 0x8000, lanes - half);
          put(im + w * word + half, i, lanes - half);
          put(im + w * word + second + half, r, lanes - half);
          c.re -= widen(r);
          c.im -= widen(i);
        }
      }
      re += lanes;
      im += lanes;
    }
  }
}

#if defined(__AMX_BF16__) || defined(ZNNPY_TWIN_AMX)

// Adds the product of the operands in tiles 4 and 5 (rows of real and imaginary parts), 6 and 7 (blocks of output maps).
// Of one block there are two sums, which take turns: a sum alone would wait for itself.
template <int COUNT, int TURN>
ALWAYS void multiply_tiles() {
  if constexpr (COUNT > 1) {
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  } else {
    tile_multiply<TURN % 2, 4, 6>();
    tile_multiply<2 + TURN % 2, 5, 6>();
  }
}

struct Factors {
  const char *left, *right;
  ptrdiff_t row, word, block;  // bytes from row to row, word to word of the left factor, block to block of the right one

  template <int WORD>
  ALWAYS void load_left() const {
    tile_load<4>(left + WORD * word, row);
    tile_load<5>(left + WORD * word + GROUP * row, row);
  }
  template <int WORD, int COUNT>
  ALWAYS void load_right() const {
    tile_load<6>(right + WORD * 2 * PANEL, 64);
    if constexpr (COUNT > 1) tile_load<7>(right + WORD * 2 * PANEL + block, 64);
  }
};

// Adds the products of one step, in an order that loads few tiles.
template <int WORDS, int COUNT, int TURN>
ALWAYS void add_step(const Factors &f) {
  f.load_left<0>();
  unroll<WORDS>([&](auto i) ALWAYS_LAMBDA {
    f.template load_right<WORDS - 1 - decltype(i)::value, COUNT>();
    multiply_tiles<COUNT, TURN + decltype(i)::value>();
  });
  if constexpr (WORDS == 2) {
    f.load_left<1>();
    multiply_tiles<COUNT, TURN>();
  } else if constexpr (WORDS == 3) {
    f.load_left<2>();
    multiply_tiles<COUNT, TURN + 1>();
    f.load_left<1>();
    multiply_tiles<COUNT, TURN>();
    f.load_right<1, COUNT>();
    multiply_tiles<COUNT, TURN + 1>();
  }
}

template <int WORDS, int COUNT>
ALWAYS void multiply_blocks(const Products &p, const Bf16 *w, float *y, int tiles) {
  const ptrdiff_t steps = steps_of(p.fin), row = 2 * row_of(p.fin), step = WORDS * 2 * PANEL;
  Factors f{(const char *)p.left, (const char *)w, row, 2 * GROUP * row, steps * step};
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (ptrdiff_t i = 0; i < steps; i += 2) {
    add_step<WORDS, COUNT, 0>(f);
    f.left += 2 * STEP, f.right += step;
    if (i + 1 == steps) break;
    add_step<WORDS, COUNT, 1>(f);
    f.left += 2 * STEP, f.right += step;
  }
  const ptrdiff_t pitch = p.tile * sizeof(float);
  if constexpr (COUNT > 1) {
    tile_store<0>(y, pitch);
    tile_store<1>(y + BLOCK, pitch);
    tile_store<2>(y + LANES, pitch);
    tile_store<3>(y + BLOCK + LANES, pitch);
  } else {
    alignas(64) float more[2][GROUP][LANES];
    tile_store<0>(y, pitch);
    tile_store<2>(y + LANES, pitch);
    tile_store<1>(more[0], sizeof more[0][0]);
    tile_store<3>(more[1], sizeof more[1][0]);
    for (int tile = 0; tile < tiles; tile++, y += p.tile)
      for (int lane = 0; lane < LANES; lane += W)
        for (int part = 0; part < 2; part++)
          store(y + part * LANES + lane, load(y + part * LANES + lane) + load(more[part][tile] + lane));
  }
}

#else

// Returns p, but hides from the compiler that it does, which would keep the distance of each row in a register.
ALWAYS const char *moved(const char *p) {
  asm("" : "+r"(p));
  return p;
}
constexpr int NEAR_ROWS = 3;  // rows read from one pointer before it moves on

// Computes both parts of the results of TILES tiles.
template <int WORDS, int COUNT, int TILES>
ALWAYS void multiply_rows(const Products &p, ptrdiff_t first, const Bf16 *w, float *y) {
  const ptrdiff_t steps = steps_of(p.fin), row = 2 * row_of(p.fin), word = 2 * GROUP * row;
  const ptrdiff_t step = WORDS * 2 * PANEL, block = steps * step;
  const char *left = (const char *)p.left + first * row, *right = (const char *)w;
  Lanes sums[2][TILES][COUNT] = {};
  for (ptrdiff_t i = 0; i < steps; i++, right += step) {
    for (int pair = 0; pair < STEP / 2; pair++, left += 4) {
      Pairs b[WORDS][COUNT];
      for (int w = 0; w < WORDS; w++)
        for (int c = 0; c < COUNT; c++)
          b[w][c] = *(const UnalignedPairs *)(right + c * block + w * 2 * PANEL + pair * 4 * LANES);
      unroll<WORDS>([&](auto a) ALWAYS_LAMBDA {
        const char *at = left + (WORDS - 1 - a) * word;
        unroll<2>([&](auto part) ALWAYS_LAMBDA {
          unroll<TILES>([&](auto tile) ALWAYS_LAMBDA {
            if (tile > 0 && tile % NEAR_ROWS == 0) at = moved(at + NEAR_ROWS * row);
            uint32_t value;
            std::memcpy(&value, at + tile % NEAR_ROWS * row, sizeof value);
            const Pairs one = value - Pairs{};
            for (int w = a; w >= 0; w--)
              for (int c = 0; c < COUNT; c++) sums[part][tile][c] = multiply_pairs(sums[part][tile][c], one, b[w][c]);
          });
          if (part == 0) at = moved(at + (GROUP - (TILES - 1) / NEAR_ROWS * NEAR_ROWS) * row);
        });
      });
    }
  }
  y += first * p.tile;
  for (int tile = 0; tile < TILES; tile++, y += p.tile)
    for (int c = 0; c < COUNT; c++)
      for (int part = 0; part < 2; part++)
        std::memcpy(y + c * BLOCK + part * LANES, &sums[part][tile][c], sizeof(Lanes));
}

template <int WORDS, int COUNT, int TILES = ROWS / 2>
ALWAYS void multiply_left(const Products &p, ptrdiff_t first, const Bf16 *w, float *y, int tiles) {
  for (; tiles >= TILES; tiles -= TILES, first += TILES) multiply_rows<WORDS, COUNT, TILES>(p, first, w, y);
  if constexpr (TILES > 1) {
    if (tiles > 0) multiply_left<WORDS, COUNT, TILES == 6 ? 4 : TILES - 1>(p, first, w, y, tiles);
  }
}

template <int WORDS, int COUNT>
ALWAYS void multiply_blocks(const Products &p, const Bf16 *w, float *y, int tiles) {
  multiply_left<WORDS, COUNT>(p, 0, w, y, tiles);
}

#endif

template <int WORDS>
void products(const Products &p, ptrdiff_t rows) {
  std::memset(p.left, 0, WORDS * 2 * GROUP * row_of(p.fin) * sizeof(Bf16));  // what no map fills stays zero
  const ptrdiff_t block = steps_of(p.fin) * WORDS * PANEL;
  const float *ahead = p.ahead;
  for (ptrdiff_t frequency = 0; frequency < p.frequencies; frequency++) {
    const Bf16 *const w = p.w + frequency * frequency_of(p.fin, p.out, WORDS);
    for (ptrdiff_t first = 0; first < p.tiles; first += rows) {
      float *const x = p.x + frequency * p.pitch + first * p.tile;
      const int tiles = (int)least(rows, p.tiles - first);
      divide<WORDS>(p, x, tiles, ahead);
      ptrdiff_t b = 0;
      for (; b + 2 <= p.out; b += 2) multiply_blocks<WORDS, 2>(p, w + b * block, x + b * BLOCK, tiles);
      if (b < p.out) multiply_blocks<WORDS, 1>(p, w + b * block, x + b * BLOCK, tiles);
    }
  }
}

}  // namespace
}  // namespace znnpy

using namespace znnpy;

EXPORT void znnpy_spectral_products(const Products *p) {
  const ptrdiff_t groups = (p->tiles + GROUP - 1) / GROUP, rows = (p->tiles + groups - 1) / groups;  // equal groups
  unit_begin((int)rows);
  if (p->words == 1) products<1>(*p, rows);
  else if (p->words == 2) products<2>(*p, rows);
  else products<3>(*p, rows);
  unit_end();
}
