/* Padding, and crops: a copy with another origin.
 *
 * Computes   out[j] = in[j + first], or beyond low .. high - 1 zero, the mirrored voxel, or the nearest voxel. Voxel i of
 *            an upsampled input is (i + shift) / factor in memory. The largest |in| that was read raises the peak.
 * Shapes     in (z, y, x, f) float or half, any steps between voxels; out in C order, `pitch` values from voxel to voxel; a
 *            thread has WIDTH maps of a voxel.
 * Launch     lines.cuh
 * Bound      memory: the input is read once, the output written once.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_lines.py, test_copied.py
 */
#include "graph/lines.cuh"

enum How { ZEROS, REFLECT, REPLICATE };  // as in PAD_MODES of znnpy/layers.py

/* The voxel that stands at `i` along an axis; -1: none. */
DEVICE int standing(int i, int low, int high, int how) {
    if (i >= low && i < high) return i;
    if (how == ZEROS) return -1;
    if (how == REPLICATE) return i < low ? low : high - 1;
    return i < low ? 2 * low - i : 2 * (high - 1) - i;
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    pad(const __grid_constant__ Input in, const __grid_constant__ Triple first, const __grid_constant__ Triple low,
        const __grid_constant__ Triple high, const __grid_constant__ Triple m, const __grid_constant__ Triple shift,
        long long how, T* __restrict__ out, long long pitch, float* peak) {
    const int vectors = in.maps / WIDTH;
    const Line line = Line::of_thread(m.x * vectors, m.y);
    const int jx = line.e / vectors, f = line.e % vectors * WIDTH;
    const int y = standing(line.y + first.y, low.y, high.y, (int)how), x = standing(jx + first.x, low.x, high.x, (int)how);
    const int iy = (y + shift.y) / in.factor.y, ix = (x + shift.x) / in.factor.x;
    float largest = 0.0f;
    for (int jz = blockIdx.z; jz < m.z && line.exists; jz += gridDim.z) {
        const int z = standing(jz + first.z, low.z, high.z, (int)how);
        Maps<T, WIDTH> maps = {};
        if (z >= 0 && y >= 0 && x >= 0) {
            maps = *reinterpret_cast<const Maps<T, WIDTH>*>(voxel_at<T>(in, (z + shift.z) / in.factor.z, iy, ix) + f);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) largest = larger_magnitude(largest, to_float(maps.values[i]));
        }
        *reinterpret_cast<Maps<T, WIDTH>*>(out + (((long long)jz * m.y + line.y) * m.x + jx) * pitch + f) = maps;
    }
    raise_peak_by_warp(peak, largest);
}
