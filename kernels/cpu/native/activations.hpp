// Functions of vectors of values, and the code of each function as activations.py passes it.
#pragma once
#include "bf16.hpp"

namespace znnpy {

// The order of FUNCTIONS in znnpy/layers.py.
enum Function {
  NONE, RELU, LEAKY_RELU, PRELU, ELU, SELU, GELU, GELU_TANH, SILU, SOFTPLUS, SIGMOID, TANH, HARDSWISH, CLIP, SOFTMAX
};

ALWAYS V absolute(V x) { return (V)((Mask)x & 0x7fffffff); }
ALWAYS V signed_as(V x, V sign) { return (V)((Mask)x | ((Mask)sign & (int32_t)0x80000000)); }

struct Reduced {  // exp(x) = power * (1 + minus_one)
  V power, minus_one;
};

// Divides exp(x) into a power of two and exp of the rest, which is within half of log 2. Values beyond those that
// float32 holds are clamped; NaN stays.
ALWAYS Reduced reduced_exp(V x) {
  const V most = broadcast(88.0f), least = broadcast(-87.3f);
  x = x > most ? most : x;
  x = x < least ? least : x;
  const V shift = broadcast(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to an integer
  const V sum = x * broadcast(1.44269504f) + shift, whole = sum - shift;
  const V r = (x - whole * broadcast(0.693145752f)) - whole * broadcast(1.42860677e-6f);
  V p = broadcast(1.0f / 5040);
  p = p * r + broadcast(1.0f / 720);
  p = p * r + broadcast(1.0f / 120);
  p = p * r + broadcast(1.0f / 24);
  p = p * r + broadcast(1.0f / 6);
  p = p * r + broadcast(0.5f);
  return {(V)(((Mask)sum << 23) + 0x3f800000), p * (r * r) + r};
}

ALWAYS V exponential(V x) {
  const Reduced e = reduced_exp(x);
  return e.power * e.minus_one + e.power;
}

ALWAYS V exponential_minus_one(V x) {
  const Reduced e = reduced_exp(x);
  return e.power * e.minus_one + (e.power - 1.0f);
}

ALWAYS V hyperbolic_tangent(V x) {
  const V e = exponential_minus_one(absolute(x) * -2.0f);
  return signed_as(-e / (e + 2.0f), x);
}

ALWAYS V logistic(V x) { return 1.0f / (exponential(-x) + 1.0f); }

// Returns log(1 + e) for 0 <= e <= 1: twice the area tangent of e / (2 + e).
ALWAYS V log_of_one_and(V e) {
  const V s = e / (e + 2.0f), q = s * s;
  V p = broadcast(1.0f / 15);
  p = p * q + broadcast(1.0f / 13);
  p = p * q + broadcast(1.0f / 11);
  p = p * q + broadcast(1.0f / 9);
  p = p * q + broadcast(1.0f / 7);
  p = p * q + broadcast(1.0f / 5);
  p = p * q + broadcast(1.0f / 3);
  const V twice = s + s;
  return p * q * twice + twice;
}

// Returns the upper tail of the normal distribution at x >= 0; see TAIL in activations.py.
ALWAYS V normal_tail(V x) {
  const V t = 1.0f / (x * broadcast(0.35f) + 1.0f);
  V p = broadcast(-0.029144419357180595f);
  p = p * t + broadcast(0.14396481215953827f);
  p = p * t + broadcast(-0.255700945854187f);
  p = p * t + broadcast(0.15915991365909576f);
  p = p * t + broadcast(-0.02310061827301979f);
  p = p * t + broadcast(0.10550432652235031f);
  p = p * t + broadcast(0.11983375251293182f);
  p = p * t + broadcast(0.13986174762248993f);
  p = p * t + broadcast(0.13962140679359436f);
  return p * t * exponential(x * x * -0.5f);
}

// Applies a function to one vector; `a` and `b` are its parameters.
template <int FUNCTION>
ALWAYS V apply(V x, V a, V b) {
  const V zero{};
  switch (FUNCTION) {
    case RELU: return x < zero ? zero : x;  // NaN stays
    case LEAKY_RELU: return x < zero ? x * a : x;
    case ELU: return x < zero ? exponential_minus_one(x) * a : x;
    case SELU: return (x < zero ? exponential_minus_one(x) * 1.6732632423543772f : x) * 1.0507009873554805f;
    case GELU: {
      const V beyond = x * normal_tail(absolute(x));
      return x > zero ? x - beyond : beyond;
    }
    case GELU_TANH: {
      const V inner = (x * x * 0.044715f + 1.0f) * x * 0.7978845608028654f;
      return x * ((hyperbolic_tangent(inner) + 1.0f) * 0.5f);
    }
    case SILU: return x * logistic(x);
    case SOFTPLUS: return log_of_one_and(exponential(-absolute(x))) + (x < zero ? zero : x);
    case SIGMOID: return logistic(x);
    case TANH: return hyperbolic_tangent(x);
    case HARDSWISH: {
      const V six = broadcast(6.0f), y = x + 3.0f, up = y < zero ? zero : y;
      return x * (up > six ? six : up) * (1.0f / 6);
    }
    case CLIP: {
      const V up = x < a ? a : x;
      return up > b ? b : up;
    }
    default: return x;
  }
}

// Applies a function to `count` values; not softmax, and not prelu. `x` and `to` may be one array. `past`: whether `to`
// is written past the caches. Types: float and float, float and Bf16, Bf16 and Bf16.
template <class S, class T>
void activate(int64_t function, float a, float b, const S *x, T *to, ptrdiff_t count, bool past = false);

// Applies softmax over the maps of each voxel, in place. E: float or Bf16.
template <class E>
void softmax(E *x, ptrdiff_t voxels, ptrdiff_t maps);

}  // namespace znnpy
