// Upper bound for the speed of convolutions on the unit for bfloat16: only for benchmarks/units.py.
#include "bf16_block.hpp"

using namespace znnpy;

// Multiplies one block of places by two panels `times` times and returns the operations. All that it reads lies in L1:
// `memory` holds 24 KiB of finite values, aligned to cache lines.
EXPORT int64_t znnpy_bf16_peak(char *memory, int64_t times) {
  constexpr ptrdiff_t TAPS = 8;
  alignas(64) float sums[ROWS * WIDTH] = {};
  const float bias[WIDTH] = {};
  unit_begin();
#if defined(__AMX_BF16__) || defined(ZNNPY_TWIN_AMX)
  tile_load<0>(bias, 0);
  tile_load<1>(bias, 0);
  tile_load<2>(bias, 0);
  tile_load<3>(bias, 0);
  for (int64_t i = 0; i < times * TAPS; i++) {
    tile_load<4>(memory, 64);
    tile_load<6>(memory + 2048, 64);
    tile_multiply<0, 4, 6>();
    tile_load<7>(memory + 2048 + PANEL_BYTES, 64);
    tile_multiply<1, 4, 7>();
    tile_load<5>(memory + 1024, 64);
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
  tile_store<0>(sums, 4 * WIDTH);
#else
  const char *taps[TAPS];
  for (const char *&tap : taps) tap = memory;
  const Sums s{taps, TAPS, 1, 64, 0, 0, memory + 2048, bias, sums};
  for (int64_t i = 0; i < times; i++) {
    sum_block<ROWS, PANELS, 1>(s);
    asm volatile("" ::: "memory");  // the compiler may not reuse the sums
  }
#endif
  unit_end();
  store(reinterpret_cast<float *>(memory + 4096), load(sums));  // sums are used, so the compiler keeps them
  return times * TAPS * 2 * STEP * ROWS * WIDTH;
}
