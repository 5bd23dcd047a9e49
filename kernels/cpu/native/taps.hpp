// The taps of a kernel that lie in the image, away from its padding.
#pragma once
#include "rows.hpp"

namespace znnpy {

struct Taps {
  ptrdiff_t first, last;

  // `of` describes a convolution along three axes: n, k, stride, dilation, before.
  template <class CONV>
  Taps(const CONV &of, int axis, ptrdiff_t out) {
    const ptrdiff_t at = out * of.stride[axis] - of.before[axis], step = of.dilation[axis];
    first = at < 0 ? least(of.k[axis], (-at + step - 1) / step) : 0;
    last = at < of.n[axis] ? least(of.k[axis], (of.n[axis] - at + step - 1) / step) : 0;
    last = most(first, last);
  }
};

// Returns whether outputs [first, first + count) along x have all their taps in the image.
template <class CONV>
ALWAYS bool have_all_taps(const CONV &of, ptrdiff_t first, ptrdiff_t count) {
  const ptrdiff_t begin = first * of.stride[2] - of.before[2];
  const ptrdiff_t end = (first + count - 1) * of.stride[2] - of.before[2] + (of.k[2] - 1) * of.dilation[2];
  return begin >= 0 && end < of.n[2];
}

}  // namespace znnpy
