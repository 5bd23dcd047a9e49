/* Functions of all maps of each voxel, for kernels that compute values voxel by voxel.
 *
 * Tested  tests/kernels/gpu/graph/test_lines.py
 */
#pragma once

#include "graph/lines.cuh"

/* Writes softmax over the maps of one voxel, which `lanes` neighbouring lanes share: a power of two. values_of(f, values)
 * gives WIDTH maps from f on, and the same in a second round. All lanes of the warp must call; `exists`: there is such
 * a voxel. Returns the largest |value|, or `largest`.
 */
template <class T, int WIDTH, class F>
DEVICE float write_softmax(T* to, int maps, int lane, int lanes, bool exists, float largest, F values_of) {
    float values[WIDTH];
    Softmax all = no_maps();
    for (int f = lane * WIDTH; f < maps && exists; f += lanes * WIDTH) {
        values_of(f, values);
        all = joined(all, values, WIDTH);
    }
    for (int mask = 1; mask < lanes; mask *= 2)
        all = joined(all, {shuffle_xor(all.largest, mask), shuffle_xor(all.sum, mask)});
    for (int f = lane * WIDTH; f < maps && exists; f += lanes * WIDTH) {
        values_of(f, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = of_all(all, values[i]);
        store<T, WIDTH>(to + f, values);
        largest = larger_of(largest, values);
    }
    return largest;
}
