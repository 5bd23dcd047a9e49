/* The rest of convolutions in graphs that other kernels computed: bias, addend, function and peak, in place.
 *
 * Computes   with `writes`: out[i, g] = function(out[i, g] + bias[g] + addend[i, g]); `biased`: the bias is in it already;
 *            `adds`: there is an addend. The largest |out| raises the peak. The largest finite value that was in out counts
 *            as infinite, since some kernels of cuDNN give it instead.
 * Shapes     out (z, y, x, f) float or half in C order; addend the same, any steps between voxels; bias (f) float. A
 *            thread has WIDTH maps of a voxel.
 * Launch     lines.cuh
 * Bound      memory: reads every value once, and writes it once with `writes`.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_cudnn.py
 */
#include "graph/lines.cuh"

struct Finish {  // as in finish.py
    Triple n;
    int maps, writes, biased, adds, function;
    float a, b;
};

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    finish(T* out, const float* __restrict__ bias, const __grid_constant__ Input addend,
           const __grid_constant__ Finish p, float* peak) {
    const int vectors = p.maps / WIDTH;
    const Line line = Line::of_thread(p.n.x * vectors, p.n.y);
    const int x = line.e / vectors, f = line.e % vectors * WIDTH;
    float largest = 0.0f, offsets[WIDTH] = {};
    if (line.exists && !p.biased) load<float, WIDTH>(offsets, bias + f);
    for (int z = blockIdx.z; z < p.n.z && line.exists; z += gridDim.z) {
        T* const here = out + (((long long)z * p.n.y + line.y) * p.n.x + x) * p.maps + f;
        float values[WIDTH];
        load<T, WIDTH>(values, here);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] = not_clamped<T>(values[i]);
        if (p.writes) {
            float more[WIDTH] = {};
            if (p.adds) load<T, WIDTH>(more, voxel_at<T>(addend, z, line.y, x) + f);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] += offsets[i] + more[i];
            apply_functions(values, p.function, p.a, p.b);
            store<T, WIDTH>(here, values);
        }
        largest = larger_of(largest, values);
    }
    raise_peak_by_warp(peak, largest);
}
