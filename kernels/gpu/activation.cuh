/* Bias and activation, the epilogue of a convolution.
 *
 * The numbers are positions in znnpy.shapes.ACTIVATIONS; softmax runs over the maps of a voxel, so a kernel that offers
 * it must see them all (conv_direct.cu): `activate` ignores it.
 *
 * Tested  tests/kernels/gpu/test_device_ops.py
 */
#pragma once

#include "device_ops.cuh"

enum Activation { NONE = 0, RELU = 1, TANH = 2, SIGMOID = 3, SOFTMAX = 4 };

/* The activation `kind` of a sum that includes its bias. NaN stays NaN under relu. */
DEVICE float activate(float value, int kind) {
    switch (kind) {
        case RELU: return value < 0.0f ? 0.0f : value;
        case TANH: return tanhf(value);
        case SIGMOID: return 1.0f / (1.0f + expf(-value));
        default: return value;
    }
}

/* The activation of a kind known at compile time. */
template <int KIND> DEVICE float activate(float value) { return activate(value, KIND); }
