// Arguments that tiled.cpp passes to the products of spectra on the unit for bfloat16.
#pragma once
#include "tiled.hpp"

// Frequencies of one column for a chunk of tiles: y = x @ w, with complex numbers, each the sum of `words` words of
// bfloat16. Of three words six products are summed, of two words three: those that float32 or half of it can hold.
struct Products {
  float *x;  // (frequency; tile, block, re/im, lane): the input, overwritten by the results, with whole groups of tiles
  int64_t pitch, tile;  // floats from frequency to frequency, tile to tile
  int64_t frequencies, tiles, words;
  int64_t in, out, fin;  // blocks of channels, and maps of the input
  const Channels *channels;
  const znnpy::Bf16 *w;  // (frequency, block, step, word, pair, lane, 2): real parts of all maps, then imaginary parts
  znnpy::Bf16 *left;     // (word, re/im, tile of a group, value): room for the words of x of one frequency
  const float *ahead, *end;  // what is read afterwards, which is prefetched into L2
};

namespace znnpy {

constexpr ptrdiff_t GROUP = 16;  // most tiles of a group: rows of the unit's tiles

// Returns how many steps of 32 products a sum takes: the maps are padded to whole blocks.
inline ptrdiff_t steps_of(int64_t fin) { return blocks_of(fin); }
// Returns the values from row to row of the left factor: a cache line more than needed, so that rows spread over sets.
inline ptrdiff_t row_of(int64_t fin) { return 32 * (steps_of(fin) + 1); }
// Returns the values of the words of a frequency of the kernels.
inline ptrdiff_t frequency_of(int64_t fin, int64_t out, int64_t words) { return steps_of(fin) * out * words * 32 * LANES; }

}  // namespace znnpy
