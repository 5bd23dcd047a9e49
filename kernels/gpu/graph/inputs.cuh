/* The inputs of a layer of a graph as a kernel takes them: by value, as inputs.py lays them out.
 *
 * Tested  tests/kernels/gpu/graph/test_conv.py
 */
#pragma once

#include "device_ops.cuh"

constexpr int MOST_INPUTS = 16;  // as in inputs.py

struct Triple {
    int z, y, x;
};

/* One input: values between neighbouring voxels along each axis; its maps among those of all inputs; how often each of
 * its voxels counts; `wide`: whether four of its maps lie at an address that is a multiple of their bytes.
 */
struct Input {
    const void* data;
    long long step_z, step_y, step_x;
    int first, maps, wide;
    Triple factor;
};

struct Inputs {
    Input parts[MOST_INPUTS];
};

template <class T> DEVICE const T* voxel_at(const Input& part, int z, int y, int x) {
    return static_cast<const T*>(part.data) + z * part.step_z + y * part.step_y + x * part.step_x;
}

/* a / b of numbers that are not negative, in 32 bits where these suffice: several times as fast. */
DEVICE long long quotient(long long a, int b) { return a >> 32 == 0 ? (unsigned)a / (unsigned)b : a / b; }

/* The voxel of a number in C order. */
DEVICE Triple voxel_of(long long number, Triple size) {
    const long long line = quotient(number, size.x), z = quotient(line, size.y);
    return {(int)z, (int)(line - z * size.y), (int)(number - line * size.x)};
}

/* The first `known` of four maps, zeros for the others; `wide` as above. */
template <class T> DEVICE float4 load_up_to_four(const T* from, int known, bool wide) {
    if (wide && known >= 4) return load_activation4(from);
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (known > 0) values.x = load_activation(from);
    if (known > 1) values.y = load_activation(from + 1);
    if (known > 2) values.z = load_activation(from + 2);
    if (known > 3) values.w = load_activation(from + 3);
    return values;
}
template <class T> DEVICE void store_up_to_four(T* to, float4 values, int known, bool wide) {
    if (wide && known >= 4) return store_activation4(to, values);
    if (known > 0) store_activation(to, values.x);
    if (known > 1) store_activation(to + 1, values.y);
    if (known > 2) store_activation(to + 2, values.z);
    if (known > 3) store_activation(to + 3, values.w);
}
