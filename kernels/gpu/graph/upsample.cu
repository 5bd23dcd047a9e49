/* Upsampling by whole factors.
 *
 * Computes   nearest  out[j] = in[(j + first) / factor]
 *            linear   out[j] is in at (j + first + 0.5) / factor - 0.5, between its voxels, clamped at its ends
 * Shapes     in (z, y, x, f) float or half, any steps between voxels, out in C order; a thread has WIDTH maps of a voxel.
 * Launch     lines.cuh
 * Bound      memory: the output is written once, voxels that are read again come from L1 and L2.
 * Exact      nearest copies; the position between two voxels is a fraction of integers.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_lines.py
 */
#include "graph/lines.cuh"

struct Between {  // two neighbours along an axis, and the part of the second
    int low, high;
    float part;

    DEVICE static Between of(int j, int factor, int n) {
        const int twice = max(2 * j + 1 - factor, 0), low = min(twice / (2 * factor), n - 1);
        return {low, min(low + 1, n - 1), low == n - 1 ? 0.0f : (float)(twice % (2 * factor)) / (float)(2 * factor)};
    }
};

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    nearest(const __grid_constant__ Input in, const __grid_constant__ Triple first, const __grid_constant__ Triple m,
            T* __restrict__ out) {
    const int vectors = in.maps / WIDTH;
    const Line line = Line::of_thread(m.x * vectors, m.y);
    const int jx = line.e / vectors, f = line.e % vectors * WIDTH;
    for (int jz = blockIdx.z; jz < m.z && line.exists; jz += gridDim.z) {
        float values[WIDTH];
        load<T, WIDTH>(values, voxel_at<T>(in, (jz + first.z) / in.factor.z, (line.y + first.y) / in.factor.y,
                                           (jx + first.x) / in.factor.x) + f);
        store<T, WIDTH>(out + (((long long)jz * m.y + line.y) * m.x + jx) * in.maps + f, values);
    }
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 3)
    linear(const __grid_constant__ Input in, const __grid_constant__ Triple first, const __grid_constant__ Triple m,
           T* __restrict__ out, const __grid_constant__ Triple n, float* peak) {
    const int vectors = in.maps / WIDTH;
    const Line line = Line::of_thread(m.x * vectors, m.y);
    const int jx = line.e / vectors, f = line.e % vectors * WIDTH;
    const Between y = Between::of(line.y + first.y, in.factor.y, n.y), x = Between::of(jx + first.x, in.factor.x, n.x);
    float largest = 0.0f;
    for (int jz = blockIdx.z; jz < m.z && line.exists; jz += gridDim.z) {
        const Between z = Between::of(jz + first.z, in.factor.z, n.z);
        float corners[8][WIDTH];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            load<T, WIDTH>(corners[i], voxel_at<T>(in, i / 4 ? z.high : z.low, i / 2 % 2 ? y.high : y.low,
                                                   i % 2 ? x.high : x.low) + f);
        float values[WIDTH];
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            float along_y[4], along_x[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) along_y[i] = corners[i][w] * (1.0f - z.part) + corners[i + 4][w] * z.part;
#pragma unroll
            for (int i = 0; i < 2; ++i) along_x[i] = along_y[i] * (1.0f - y.part) + along_y[i + 2] * y.part;
            values[w] = along_x[0] * (1.0f - x.part) + along_x[1] * x.part;
        }
        store<T, WIDTH>(out + (((long long)jz * m.y + line.y) * m.x + jx) * in.maps + f, values);
        largest = larger_of(largest, values);
    }
    raise_peak_by_warp(peak, largest);
}
