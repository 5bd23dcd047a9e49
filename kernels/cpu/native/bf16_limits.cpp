// Upper bounds for the speed of convolutions on the unit for bfloat16: only for benchmarks/units.py.
#include "bf16_block.hpp"

using namespace znnpy;

namespace {

// Hides from the compiler what a vector holds: it would merge sums that it knows to be equal.
template <class X>
ALWAYS void hide(X &x) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

}  // namespace

// Multiplies a block of places by two panels `times` times, in registers alone, and returns the operations. `memory`
// holds 64 bytes of finite values, aligned to cache lines, and is overwritten.
EXPORT int64_t znnpy_bf16_peak(char *memory, int64_t times) {
  unit_begin();
#if defined(__AMX_BF16__) || defined(ZNNPY_TWIN_AMX)
  unroll<8>([&](auto tile) ALWAYS_LAMBDA { tile_load<tile>(memory, 0); });
  for (int64_t i = 0; i < times; i++) {
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 4, 7>();
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
  alignas(64) char sums[16 * 64];
  tile_store<0>(sums, 64);
  std::memcpy(memory, sums, 64);
#else
  Lanes sums[ROWS * PANELS] = {};
  for (Lanes &sum : sums) hide(sum);
  Pairs left, right;
  std::memcpy(&left, memory, sizeof left);
  right = left;
  for (int64_t i = 0; i < times; i++) {
    for (int pair = 0; pair < STEP / 2; pair++) {
      unroll<ROWS * PANELS>([&](auto c) ALWAYS_LAMBDA { sums[c] = multiply_pairs(sums[c], left, right); });
      hide(left);
      hide(right);
    }
  }
  Lanes total{};
  for (const Lanes &sum : sums) total += sum;
  std::memcpy(memory, &total, sizeof total);
#endif
  unit_end();
  return times * 2 * STEP * ROWS * WIDTH;
}

// Does the same with factors that are read from L1: `memory` holds 40 KiB.
EXPORT int64_t znnpy_bf16_products(char *memory, int64_t times) {
  constexpr ptrdiff_t TAPS = 16;
  alignas(64) float sums[ROWS * WIDTH];
  const float bias[WIDTH] = {};
  const char *taps[TAPS];
  for (const char *&tap : taps) tap = memory;
  const Sums s{taps, TAPS, 64, memory + 2048, bias, sums};
  unit_begin();
  for (int64_t i = 0; i < times; i += TAPS) {
    sum_rows<PANELS, 1>(s, ROWS);
    asm volatile("" ::: "memory");  // the compiler may not reuse the sums
  }
  unit_end();
  return (times + TAPS - 1) / TAPS * TAPS * 2 * STEP * ROWS * WIDTH;
}
