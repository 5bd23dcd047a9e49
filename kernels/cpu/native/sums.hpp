// Sums of direct convolutions: a block of neighbouring outputs times a panel of LANES channels in registers. Per tap the
// kernels of the panel are loaded, and the input of each output is broadcast to a vector.
#pragma once
#include "ending.hpp"
#include "rows.hpp"

namespace znnpy {

constexpr int VECTORS = LANES / W;
constexpr int OUTPUTS = W == LANES ? 14 : 6;  // outputs that are summed at once, limited by the number of registers
constexpr ptrdiff_t CHUNK = 256;  // products: longer sums would round more than those of other methods

template <class E>
struct Run {  // neighbouring inputs of an output, and the kernels that they are multiplied by
  const E *x;               // for output 0
  const float *kernel;      // for panel 0
  ptrdiff_t length, next;   // next: values from an output's inputs to those of the next
};

// Sums outputs [first, first + NUMBER) over all runs; `panel` is the distance of their kernels from those of panel 0.
template <int NUMBER, class E>
ALWAYS void sum(const Run<E> *runs, ptrdiff_t count, ptrdiff_t first, ptrdiff_t panel, const float *bias, float *out,
                ptrdiff_t width) {
  V sums[NUMBER][VECTORS];
  V totals[NUMBER][VECTORS] = {};  // sums of whole chunks; not in registers
  for (int v = 0; v < VECTORS; v++)
    for (int i = 0; i < NUMBER; i++) sums[i][v] = load(bias + v * W);
  ptrdiff_t products = 0;
  bool chunks = false;
  for (const Run<E> *run = runs; run < runs + count; run++) {
    const ptrdiff_t next = run->next;
    const E *x = run->x + first * next, *const end = x + run->length;
    const float *w = run->kernel + panel;
    for (; x < end; x++, w += LANES) {
      V kernel[VECTORS];
      for (int v = 0; v < VECTORS; v++) kernel[v] = load(w + v * W);
      for (int i = 0; i < NUMBER; i++) {
        const V value = broadcast_at(x + i * next);
        for (int v = 0; v < VECTORS; v++) sums[i][v] += value * kernel[v];
      }
    }
    products += run->length;
    if (products < CHUNK || run + 1 == runs + count) continue;
    products = 0;
    chunks = true;
    for (int i = 0; i < NUMBER; i++)
      for (int v = 0; v < VECTORS; v++) {
        totals[i][v] += sums[i][v];
        sums[i][v] = V{};
      }
  }
  for (int i = 0; i < NUMBER; i++)
    for (int v = 0; v < VECTORS; v++) store(out + i * width + v * W, chunks ? sums[i][v] + totals[i][v] : sums[i][v]);
}

template <int NUMBER, class E>
void some_sums(const Run<E> *runs, ptrdiff_t count, ptrdiff_t first, ptrdiff_t panel, const float *bias, float *out,
               ptrdiff_t width, ptrdiff_t number) {
  if constexpr (NUMBER > 1) {
    if (number < NUMBER) return some_sums<NUMBER - 1>(runs, count, first, panel, bias, out, width, number);
  }
  sum<NUMBER>(runs, count, first, panel, bias, out, width);
}

struct Panels {  // the channels of all outputs
  ptrdiff_t count, floats;  // floats: of the kernels of one panel
  const float *bias;        // padded to whole panels

  ptrdiff_t voxel() const { return count * LANES; }
};

// Computes outputs [begin, end), all channels, `width` floats from one to the next; `out` is output 0.
template <class E>
void all_sums(const Panels &panels, const Run<E> *runs, ptrdiff_t count, ptrdiff_t begin, ptrdiff_t end, float *out,
              ptrdiff_t width) {
  const ptrdiff_t parts = (end - begin + OUTPUTS - 1) / OUTPUTS;
  for (ptrdiff_t panel = 0; panel < panels.count; panel++) {
    for (ptrdiff_t part = 0; part < parts; part++) {  // near-equal, because few sums would wait for each other
      const ptrdiff_t lo = begin + (end - begin) * part / parts, hi = begin + (end - begin) * (part + 1) / parts;
      some_sums<OUTPUTS>(runs, count, lo, panel * panels.floats, panels.bias + panel * LANES,
                         out + lo * width + panel * LANES, width, hi - lo);
    }
  }
}

}  // namespace znnpy
