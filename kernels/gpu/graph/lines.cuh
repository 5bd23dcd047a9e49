/* Neighbouring maps of a voxel, and the voxels of an image line by line: what kernels share that memory binds.
 *
 * Launch  blockDim (values along a line, lines), a whole number of warps; grid (pieces of lines, pieces of y, z), and
 *         kernels loop over the rest of z. lines.py chooses them.
 * Tested  tests/kernels/gpu/graph/test_lines.py
 */
#pragma once

#include "graph/functions.cuh"
#include "graph/inputs.cuh"

/* WIDTH neighbouring maps, read and written at once: addresses are multiples of their bytes. */
template <class T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Maps {
    T values[WIDTH];
};
template <class T, int WIDTH> DEVICE void load(float (&to)[WIDTH], const T* from) {
    const Maps<T, WIDTH> maps = *reinterpret_cast<const Maps<T, WIDTH>*>(from);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) to[i] = to_float(maps.values[i]);
}
DEVICE void round_to(float& to, float value) { to = value; }
DEVICE void round_to(half& to, float value) { to = to_half(value); }
template <class T, int WIDTH> DEVICE void store(T* to, const float (&values)[WIDTH]) {
    Maps<T, WIDTH> maps;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) round_to(maps.values[i], values[i]);
    *reinterpret_cast<Maps<T, WIDTH>*>(to) = maps;
}

/* This thread's place in a line, and its line along y; `along`: threads that a line needs. */
struct Line {
    int e, y;
    bool exists;

    DEVICE static Line of_thread(int along, int my) {
        const int e = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
        return {e, y, e < along && y < my};
    }
};

template <int WIDTH> DEVICE float larger_of(float largest, const float (&values)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) largest = larger_magnitude(largest, values[i]);
    return largest;
}
