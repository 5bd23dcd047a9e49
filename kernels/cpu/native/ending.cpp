// Adds an addend to results, applies a function and writes them to the output.
#include "ending.hpp"

#include "activations.hpp"
#include "rows.hpp"

namespace znnpy {
namespace {

template <class E>
ALWAYS void add_maps(const E *x, float *to, ptrdiff_t floats) {
  ptrdiff_t i = 0;
  for (; i + W <= floats; i += W) store(to + i, load(to + i) + load(x + i));
  for (; i < floats; i++) to[i] += widen(x[i]);
}

// Ends lanes of each voxel in registers.
template <int FUNCTION, class E>
int64_t end_vectors(const Ending &e, const Results &r, ptrdiff_t f, ptrdiff_t lanes) {
  const V a = broadcast((float)e.a), b = broadcast((float)e.b);
  const ptrdiff_t whole = lanes / W * W;
  const int left = (int)(lanes - whole);
  const E *const addend = static_cast<const E *>(r.addend);
  V finite{}, finite_left{};  // stay zero while all values are finite
  for (ptrdiff_t i = 0; i < r.voxels; i++) {
    const float *const sums = r.sums + i * r.width;
    const E *const more = addend ? addend + i * e.addend.voxel : nullptr;
    E *const out = static_cast<E *>(r.out) + i * f;
    for (ptrdiff_t lane = 0; lane < whole; lane += W) {
      V x = load(sums + lane);
      if (more) x += load(more + lane);
      finite += x * 0.0f;
      x = apply<FUNCTION>(x, a, b);
      if (e.past) stream(out + lane, x);
      else store(out + lane, x);
    }
    if (left) {
      V x = load(sums + whole);
      if (more) x += load_part(more + whole, left);
      finite_left += x * 0.0f;
      store_part(out + whole, apply<FUNCTION>(x, a, b), left);
    }
  }
  bool all = true;
  for (int lane = 0; lane < W; lane++) all = all && finite[lane] == 0.0f && (lane >= left || finite_left[lane] == 0.0f);
  int64_t bad = 0;
  for (ptrdiff_t i = 0; !all && i < r.voxels; i++)
    for (ptrdiff_t lane = 0; lane < lanes; lane++)
      bad += (r.sums[i * r.width + lane] + (addend ? widen(addend[i * e.addend.voxel + lane]) : 0.0f)) * 0.0f != 0.0f;
  return bad;
}

template <class E>
int64_t end_values(const Ending &e, const Results &r, ptrdiff_t f) {
  const ptrdiff_t floats = r.voxels * f;
  const E *const addend = static_cast<const E *>(r.addend);
  for (ptrdiff_t i = 1; r.width > f && i < r.voxels; i++) {
    float *const from = r.sums + i * r.width, *const to = r.sums + i * f;
    if (f >= W) std::memmove(to, from, f * sizeof(float));
    else for (ptrdiff_t map = 0; map < f; map++) to[map] = from[map];  // a call would take longer
  }
  if (addend && e.addend.voxel == f) add_maps(addend, r.sums, floats);
  else if (addend)
    for (ptrdiff_t i = 0; i < r.voxels; i++) add_maps(addend + i * e.addend.voxel, r.sums + i * f, f);
  const int64_t bad = not_finite(r.sums, floats);
  E *const out = static_cast<E *>(r.out);
  if (e.function == SOFTMAX) softmax(r.sums, r.voxels, f);
  if (e.function == NONE || e.function == SOFTMAX) copy_out(r.sums, out, floats, e.past);
  else activate<float, E>(e.function, (float)e.a, (float)e.b, r.sums, out, floats, e.past);
  return bad;
}

template <class E>
int64_t end_some(const Ending &e, const Results &r, ptrdiff_t f, ptrdiff_t lanes) {
  switch (e.function) {
    case RELU: return end_vectors<RELU, E>(e, r, f, lanes);
    case LEAKY_RELU: return end_vectors<LEAKY_RELU, E>(e, r, f, lanes);
    case ELU: return end_vectors<ELU, E>(e, r, f, lanes);
    case SELU: return end_vectors<SELU, E>(e, r, f, lanes);
    case GELU: return end_vectors<GELU, E>(e, r, f, lanes);
    case GELU_TANH: return end_vectors<GELU_TANH, E>(e, r, f, lanes);
    case SILU: return end_vectors<SILU, E>(e, r, f, lanes);
    case SOFTPLUS: return end_vectors<SOFTPLUS, E>(e, r, f, lanes);
    case SIGMOID: return end_vectors<SIGMOID, E>(e, r, f, lanes);
    case TANH: return end_vectors<TANH, E>(e, r, f, lanes);
    case HARDSWISH: return end_vectors<HARDSWISH, E>(e, r, f, lanes);
    case CLIP: return end_vectors<CLIP, E>(e, r, f, lanes);
    default: return end_vectors<NONE, E>(e, r, f, lanes);
  }
}

}  // namespace

int64_t end_line(const Ending &e, const Results &r, ptrdiff_t f) {
  return e.bf16 ? end_values<Bf16>(e, r, f) : end_values<float>(e, r, f);
}

int64_t end_lanes(const Ending &e, const Results &r, ptrdiff_t f, ptrdiff_t lanes) {
  if (e.function == SOFTMAX || (lanes == f && lanes % W != 0)) return end_line(e, r, f);  // full vectors of few maps
  return e.bf16 ? end_some<Bf16>(e, r, f, lanes) : end_some<float>(e, r, f, lanes);
}

}  // namespace znnpy
