/* Convolutions of one voxel with few maps out, such as the last layer of a network.
 *
 * Computes   out[i, g] = function(bias[g] + sum over f of x[i, f] * weight[f, g] + addend[i, g])
 * Shapes     inputs (z, y, x, f) float or half, any steps between voxels; weight (f, OUT) and bias (OUT,) float, with
 *            zeros for maps that are not there; out in C order.
 * Launch     lines.cuh: a thread for a voxel. Shared memory holds the weights.
 * Bound      memory: the inputs are read once, WIDTH maps at a time, and the output is written once.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_few_maps.py
 */
#include "graph/lines.cuh"

struct Few {  // as in few_maps.py
    Triple n;
    int inputs, maps, out, function, softmax;
    float a, b;
};

template <class T, int WIDTH, int OUT>
__global__ void __launch_bounds__(256, 3)
    few_maps(const __grid_constant__ Inputs inputs, const __grid_constant__ Few p, const float* __restrict__ weight,
             const float* __restrict__ bias, const __grid_constant__ Input addend, T* __restrict__ out, float* peak) {
    EXTERN_SHARED(float, factors);  // [maps][OUT]
    const int threads = blockDim.x * blockDim.y;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < p.maps * OUT; i += threads) factors[i] = weight[i];
    sync_block();
    const Line line = Line::of_thread(p.n.x, p.n.y);
    float largest = 0.0f;
    for (int z = blockIdx.z; z < p.n.z && line.exists; z += gridDim.z) {
        float sums[OUT];
#pragma unroll
        for (int g = 0; g < OUT; ++g) sums[g] = bias[g];
        for (int part = 0; part < p.inputs; ++part) {
            const Input& input = inputs.parts[part];
            const T* const from = voxel_at<T>(input, z, line.y, line.e);
            const float* row = factors + input.first * OUT;
#pragma unroll 4
            for (int f = 0; f < input.maps; f += WIDTH) {
                float values[WIDTH];
                load<T, WIDTH>(values, from + f);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i, row += OUT)
#pragma unroll
                    for (int g = 0; g < OUT; ++g) sums[g] = fmaf(values[i], row[g], sums[g]);
            }
        }
        if (addend.data != nullptr) {
            const T* const more = voxel_at<T>(addend, z, line.y, line.e);
#pragma unroll
            for (int g = 0; g < OUT; ++g)
                if (g < p.out) sums[g] += load_activation(more + g);
        }
        if (p.softmax) {
            const Softmax all = joined(no_maps(), sums, p.out);
#pragma unroll
            for (int g = 0; g < OUT; ++g) sums[g] = of_all(all, sums[g]);
        } else {
            apply_functions(sums, p.function, p.a, p.b);
        }
        T* const to = out + (((long long)z * p.n.y + line.y) * p.n.x + line.e) * p.out;
#pragma unroll
        for (int g = 0; g < OUT; ++g) {
            if (g >= p.out) break;
            largest = larger_magnitude(largest, sums[g]);
            store_activation(to + g, sums[g]);
        }
    }
    raise_peak_by_warp(peak, largest);
}
