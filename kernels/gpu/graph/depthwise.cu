/* Convolution of which each output map reads one input map, line by line.
 *
 * Computes   out[i, g] = function(bias[g] + sum over d of x[i * stride + d * dilation - before, g / fout] * weights[d, g]
 *            + addend[i, g]); outside of an image x is 0.
 * Shapes     x (z, y, x, f) float or half, any steps between voxels; weights (taps, pitch) float, bias (pitch) float;
 *            out (z, y, x, f * fout) in C order.
 * Launch     128 threads; a thread sums WIDTH neighbouring maps of LINE neighbours along x. KX: the kernel's size along
 *            x, for steps and dilations of 1 there: each voxel is read once for all taps; 0: any. With WIDTH 4 there is
 *            one output map for each input map.
 * Bound      memory: what windows share comes from L1 and L2.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_conv.py
 */
#include "graph/functions.cuh"
#include "graph/inputs.cuh"
#include "graph/problem.cuh"

constexpr int THREADS = 128, LINE = 4;  // as in conv.py

template <class T, int WIDTH> DEVICE void load(float (&to)[WIDTH], const T* from) {
    if constexpr (WIDTH == 4) {
        const float4 four = load_activation4(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
        to[0] = load_activation(from);
    }
}

template <class T, int WIDTH, int KX>
__global__ void __launch_bounds__(THREADS, 3)
    lines(const __grid_constant__ Input x, const __grid_constant__ Problem p, const float* __restrict__ weights,
          const float* __restrict__ bias, const __grid_constant__ Input addend, T* __restrict__ out, float* peak) {
    const int maps = p.groups * p.fout, vectors = maps / WIDTH, pieces = (p.m.x + LINE - 1) / LINE;
    const long long thread = global_thread(), place = quotient(thread, vectors);
    const int g = (int)(thread - place * vectors) * WIDTH;
    const Triple piece = voxel_of(place, {p.m.z, p.m.y, pieces});
    const bool any = piece.z < p.m.z;
    const int i0 = piece.x * LINE, z0 = piece.z * p.stride.z - p.before.z, y0 = piece.y * p.stride.y - p.before.y;
    const int x0 = i0 * p.stride.x - p.before.x;
    float largest = 0.0f;
    if (any) {
        float sums[LINE][WIDTH];
#pragma unroll
        for (int i = 0; i < LINE; ++i) load<float, WIDTH>(sums[i], bias + g);
#pragma unroll 1
        for (int dz = 0; dz < p.k.z; ++dz) {
            const int z = z0 + dz * p.dilation.z;
            if (z < 0 || z >= p.n.z) continue;
#pragma unroll 1
            for (int dy = 0; dy < p.k.y; ++dy) {
                const int y = y0 + dy * p.dilation.y;
                if (y < 0 || y >= p.n.y) continue;
                const T* const line = voxel_at<T>(x, z, y, 0) + g / p.fout;
                const float* taps = weights + (long long)(dz * p.k.y + dy) * p.k.x * p.pitch + g;
                if constexpr (KX > 0) {
                    float in[LINE + KX - 1][WIDTH];
#pragma unroll
                    for (int j = 0; j < LINE + KX - 1; ++j) {
                        if (x0 + j >= 0 && x0 + j < p.n.x)
                            load<T, WIDTH>(in[j], line + (x0 + j) * x.step_x);
                        else
#pragma unroll
                            for (int w = 0; w < WIDTH; ++w) in[j][w] = 0.0f;
                    }
#pragma unroll
                    for (int dx = 0; dx < KX; ++dx, taps += p.pitch) {
                        float tap[WIDTH];
                        load<float, WIDTH>(tap, taps);
#pragma unroll
                        for (int i = 0; i < LINE; ++i)
#pragma unroll
                            for (int w = 0; w < WIDTH; ++w) sums[i][w] += in[i + dx][w] * tap[w];
                    }
                } else {
#pragma unroll 1
                    for (int dx = 0; dx < p.k.x; ++dx, taps += p.pitch) {
                        float tap[WIDTH];
                        load<float, WIDTH>(tap, taps);
#pragma unroll
                        for (int i = 0; i < LINE; ++i) {
                            const int at = x0 + i * p.stride.x + dx * p.dilation.x;
                            if (at < 0 || at >= p.n.x) continue;
                            float in[WIDTH];
                            load<T, WIDTH>(in, line + at * x.step_x);
#pragma unroll
                            for (int w = 0; w < WIDTH; ++w) sums[i][w] += in[w] * tap[w];
                        }
                    }
                }
            }
        }
#pragma unroll 1
        for (int i = 0; i < LINE && i0 + i < p.m.x; ++i) {
            float values[WIDTH];
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) {
                values[w] = sums[0][w];
#pragma unroll
                for (int other = 1; other < LINE; ++other) sums[other - 1][w] = sums[other][w];
            }
            if (addend.data != nullptr) {
                float more[WIDTH];
                load<T, WIDTH>(more, voxel_at<T>(addend, piece.z, piece.y, i0 + i) + g);
#pragma unroll
                for (int w = 0; w < WIDTH; ++w) values[w] += more[w];
            }
            apply_functions(values, p.function, p.a, p.b);
            T* const to = out + (((long long)piece.z * p.m.y + piece.y) * p.m.x + i0 + i) * maps + g;
            if constexpr (WIDTH == 4)
                store_activation4(to, make_float4(values[0], values[1], values[2], values[3]));
            else
                store_activation(to, values[0]);
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) largest = larger_magnitude(largest, values[w]);
        }
    }
    raise_peak_by_warp(peak, largest);
}
