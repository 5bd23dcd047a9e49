/* Bias and activation, as the last thing a convolution does to a value.
 *
 * The numbers are positions in znnpy.shapes.ACTIVATIONS; softmax runs over the maps of a voxel, so a kernel that offers
 * it must see them all: `activate` leaves it alone.
 *
 * Tested  tests/gpu/test_device_ops.py
 */
#pragma once

#include "device_ops.cuh"

enum Activation { NONE = 0, RELU = 1, TANH = 2, SIGMOID = 3, SOFTMAX = 4 };

/* What `kind` makes of a sum with its bias. NaN stays NaN under relu. */
DEVICE float activate(float value, int kind) {
    switch (kind) {
        case RELU: return value < 0.0f ? 0.0f : value;
        case TANH: return tanhf(value);
        case SIGMOID: return 1.0f / (1.0f + expf(-value));
        default: return value;
    }
}

/* The same, of which the kind is known when the kernel is compiled. */
template <int KIND> DEVICE float activate(float value) { return activate(value, KIND); }

/* softmax of the `maps` values of one voxel, in place. */
DEVICE void softmax(float* values, int maps) {
    float largest = values[0], sum = 0.0f;
    for (int map = 1; map < maps; ++map) largest = fmaxf(largest, values[map]);
    for (int map = 0; map < maps; ++map) sum += values[map] = expf(values[map] - largest);
    for (int map = 0; map < maps; ++map) values[map] /= sum;
}
