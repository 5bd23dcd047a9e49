/* The functions that graphs apply to values, and the sums of a softmax.
 *
 * Numbers are positions in FUNCTIONS of znnpy/layers.py; `numbers_of` in functions.py returns a function's number and its
 * parameters a and b. Softmax runs over the maps of a voxel: `apply_function` leaves its values, and a kernel that takes
 * it gathers a `Softmax` over all maps first.
 *
 * Exact   Errors are at most 5e-7 of the result; of gelu, gelu_tanh, silu and hardswish, of |value|. NaN stays NaN.
 * Source  PyTorch's definitions, as in kernels/definition.py.
 * Tested  tests/kernels/gpu/graph/test_functions.py
 */
#pragma once

#include "device_ops.cuh"

namespace functions {
enum Number {
    NONE, RELU, LEAKY_RELU, PRELU, ELU, SELU, GELU, GELU_TANH, SILU, SOFTPLUS, SIGMOID, TANH, HARDSWISH, CLIP, SOFTMAX
};
}  // namespace functions

DEVICE float logistic(float value) { return 1.0f / (1.0f + expf(-value)); }

/* A function of one value. a and b: the slope of leaky_relu or prelu, the alpha of elu, the least and most of clip. */
DEVICE float apply_function(float value, int function, float a, float b) {
    switch (function) {
        case functions::RELU: return value < 0.0f ? 0.0f : value;
        case functions::LEAKY_RELU:
        case functions::PRELU: return value < 0.0f ? a * value : value;
        case functions::ELU: return value < 0.0f ? a * expm1f(value) : value;
        case functions::SELU: return 1.0507009873554805f * (value < 0.0f ? 1.6732632423543772f * expm1f(value) : value);
        case functions::GELU: return 0.5f * value * erfcf(-0.70710678118654752f * value);
        case functions::GELU_TANH: {
            const float inner = 0.7978845608028654f * (value + 0.044715f * value * value * value);
            return 0.5f * value * (1.0f + tanhf(inner));
        }
        case functions::SILU: return value * logistic(value);
        case functions::SOFTPLUS: return log1pf(expf(-fabsf(value))) + (value < 0.0f ? 0.0f : value);
        case functions::SIGMOID: return logistic(value);
        case functions::TANH: return tanhf(value);
        case functions::HARDSWISH: {
            const float up = value + 3.0f < 0.0f ? 0.0f : value + 3.0f;
            return value * (up > 6.0f ? 6.0f : up) * (1.0f / 6.0f);
        }
        case functions::CLIP: {
            const float up = value < a ? a : value;
            return up > b ? b : up;
        }
        default: return value;
    }
}

/* The function of each of a thread's values. Those that take many instructions are applied to one value after the other
 * in a loop that turns the registers round, so that their code is there once.
 */
template <int COUNT> DEVICE void apply_functions(float (&values)[COUNT], int function, float a, float b) {
    if (function == functions::NONE || function == functions::SOFTMAX) return;
    if (function == functions::RELU) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = apply_function(values[i], functions::RELU, a, b);
    } else if (function == functions::LEAKY_RELU || function == functions::PRELU) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = apply_function(values[i], functions::LEAKY_RELU, a, b);
    } else {
#pragma unroll 1
        for (int turn = 0; turn < COUNT; ++turn) {
            const float first = values[0];
#pragma unroll
            for (int i = 1; i < COUNT; ++i) values[i - 1] = values[i];
            values[COUNT - 1] = apply_function(first, function, a, b);
        }
    }
}

/* The state of a voxel's softmax so far: the largest map, and the sum of exp(value - largest). */
struct Softmax {
    float largest, sum;
};
DEVICE Softmax no_maps() { return {-INFINITY, 0.0f}; }
DEVICE Softmax joined(Softmax a, Softmax b) {
    const float largest = maximum(a.largest, b.largest);
    if (largest == -INFINITY) return {largest, 0.0f};
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}
/* The state after the first `known` of these maps. */
template <int COUNT> DEVICE Softmax joined(Softmax all, const float (&values)[COUNT], int known) {
    float largest = all.largest;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i < known) largest = maximum(largest, values[i]);
    if (largest == -INFINITY) return {largest, 0.0f};
    float sum = all.sum * expf(all.largest - largest);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i < known) sum += expf(values[i] - largest);
    return {largest, sum};
}
DEVICE float of_all(Softmax all, float value) { return expf(value - all.largest) / all.sum; }
