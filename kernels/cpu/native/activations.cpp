// Functions of values, in place; see activations.py.
#include "activations.hpp"

#include "rows.hpp"

namespace znnpy {
namespace {

template <int FUNCTION, class S, class T>
void all(V a, V b, const S *x, T *to, ptrdiff_t count, bool past) {
  const auto cached = [&](ptrdiff_t i, ptrdiff_t end) {
    for (; i + 2 * W <= end; i += 2 * W) {
      const V one = apply<FUNCTION>(load(x + i), a, b), other = apply<FUNCTION>(load(x + i + W), a, b);
      store(to + i, one);
      store(to + i + W, other);
    }
    for (; i < end; i += W) {
      const int left = (int)(end - i);
      store_part(to + i, apply<FUNCTION>(load_part(x + i, left), a, b), left);
    }
  };
  if (!past) return cached(0, count);
  constexpr ptrdiff_t line = 64 / sizeof(T);
  const ptrdiff_t before = before_line(to, count), end = before + (count - before) / line * line;
  cached(0, before);
  for (ptrdiff_t i = before; i < end; i += W) stream(to + i, apply<FUNCTION>(load(x + i), a, b));
  cached(end, count);
}

ALWAYS float largest_lane(V v) {
  float most = v[0];
  for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// Sums pairs, because one sum after the other would round once a lane.
ALWAYS float sum_of_lanes(V v) {
  float sums[W];
  store(sums, v);
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
}

constexpr ptrdiff_t FEW = 2 * W;  // maps

// Applies softmax to up to W voxels of few maps: map by map, a voxel in each lane.
template <class E>
void softmax_of_few(E *x, ptrdiff_t voxels, ptrdiff_t maps) {
  float turned[FEW][W];
  for (ptrdiff_t map = 0; map < maps; map++)
    for (ptrdiff_t voxel = 0; voxel < W; voxel++)
      turned[map][voxel] = voxel < voxels ? widen(x[voxel * maps + map]) : 0.0f;
  V most = load(turned[0]), sum{};
  for (ptrdiff_t map = 1; map < maps; map++) most = larger(load(turned[map]), most);
  for (ptrdiff_t map = 0; map < maps; map++) {
    const V e = exponential(load(turned[map]) - most);
    sum += e;
    store(turned[map], e);
  }
  const V factor = 1.0f / sum;
  for (ptrdiff_t map = 0; map < maps; map++) store(turned[map], load(turned[map]) * factor);
  for (ptrdiff_t map = 0; map < maps; map++)
    for (ptrdiff_t voxel = 0; voxel < least(voxels, W); voxel++) put(x + voxel * maps + map, turned[map][voxel]);
}

}  // namespace

template <class S, class T>
void activate(int64_t function, float a, float b, const S *x, T *to, ptrdiff_t count, bool past) {
  const V va = broadcast(a), vb = broadcast(b);
  switch (function) {
    case RELU: return all<RELU>(va, vb, x, to, count, past);
    case LEAKY_RELU: return all<LEAKY_RELU>(va, vb, x, to, count, past);
    case ELU: return all<ELU>(va, vb, x, to, count, past);
    case SELU: return all<SELU>(va, vb, x, to, count, past);
    case GELU: return all<GELU>(va, vb, x, to, count, past);
    case GELU_TANH: return all<GELU_TANH>(va, vb, x, to, count, past);
    case SILU: return all<SILU>(va, vb, x, to, count, past);
    case SOFTPLUS: return all<SOFTPLUS>(va, vb, x, to, count, past);
    case SIGMOID: return all<SIGMOID>(va, vb, x, to, count, past);
    case TANH: return all<TANH>(va, vb, x, to, count, past);
    case HARDSWISH: return all<HARDSWISH>(va, vb, x, to, count, past);
    case CLIP: return all<CLIP>(va, vb, x, to, count, past);
    default: return all<NONE>(va, vb, x, to, count, past);
  }
}

template <class E>
void softmax(E *x, ptrdiff_t voxels, ptrdiff_t maps) {
  if (maps <= FEW) {
    for (ptrdiff_t voxel = 0; voxel < voxels; voxel += W) softmax_of_few(x + voxel * maps, voxels - voxel, maps);
    return;
  }
  constexpr bool keep = std::is_same<E, float>::value;  // else powers would be rounded before they are divided
  for (ptrdiff_t voxel = 0; voxel < voxels; voxel++, x += maps) {
    V most = broadcast(-__builtin_inff());
    ptrdiff_t i = 0;
    for (; i + W <= maps; i += W) most = larger(load(x + i), most);
    float top = largest_lane(most);
    for (; i < maps; i++) top = widen(x[i]) > top ? widen(x[i]) : top;
    const V shift = broadcast(top);
    V sums{};
    for (i = 0; i + W <= maps; i += W) {
      const V e = exponential(load(x + i) - shift);
      sums += e;
      if (keep) store(x + i, e);
    }
    const int left = (int)(maps - i);
    if (left > 0) {
      V e = exponential(load_part(x + i, left) - shift);
      if (keep) store_part(x + i, e, left);
      for (int lane = left; lane < W; lane++) e[lane] = 0;
      sums += e;
    }
    const float factor = 1.0f / sum_of_lanes(sums);
    const auto power = [&](V v) ALWAYS_LAMBDA { return keep ? v : exponential(v - shift); };
    for (i = 0; i + W <= maps; i += W) store(x + i, power(load(x + i)) * factor);
    if (left > 0) store_part(x + i, power(load_part(x + i, left)) * factor, left);
  }
}

template void activate(int64_t, float, float, const float *, float *, ptrdiff_t, bool);
template void activate(int64_t, float, float, const float *, Bf16 *, ptrdiff_t, bool);
template void activate(int64_t, float, float, const Bf16 *, Bf16 *, ptrdiff_t, bool);
template void softmax(float *, ptrdiff_t, ptrdiff_t);
template void softmax(Bf16 *, ptrdiff_t, ptrdiff_t);

}  // namespace znnpy

using namespace znnpy;

// Applies a function with parameters `a` and `b` to `count` voxels of `maps` values, in place; `bf16`: whether these
// are bfloat16, else floats.
EXPORT void znnpy_activate(int64_t function, double a, double b, void *x, int64_t count, int64_t maps, int64_t bf16) {
  with_type(bf16, [&](auto type) {
    using E = decltype(type);
    E *const values = static_cast<E *>(x);
    if (function == SOFTMAX) softmax(values, count, maps);
    else activate<E, E>(function, (float)a, (float)b, values, values, count * maps);
  });
}
