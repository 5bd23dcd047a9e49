/* Layers that take their inputs voxel by voxel, and the functions that follow.
 *
 * Computes   JOIN    out[i, f] = function(the sum or product of all inputs); one of one map counts for all maps, one of
 *                    one voxel for all voxels
 *            CONCAT  out[i] = function(the maps of all inputs one after the other)
 *            SCALE   out[i, f] = function(x[i, f] * weight[f] + bias[f])
 *            ALONE   out[i, f] = function(x[i, f]); a prelu's slopes are weight[f], or weight[0] for all maps
 * Shapes     inputs (z, y, x, f) float or half, any steps between voxels; an input of one voxel has steps of 0. out in C
 *            order; a thread has WIDTH maps of a voxel.
 * Launch     lines.cuh. values: a thread for WIDTH maps. softmax: `lanes` threads for a voxel.
 * Bound      memory: the inputs are read once, the output is written once.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_lines.py
 */
#include "graph/voxelwise.cuh"

enum How { ADD, MULTIPLY, CONCAT, SCALE, ALONE };  // as in point.py

struct Point {  // as in point.py
    Triple n;
    int inputs, maps, how, function, slopes;
    float a, b;
};

template <class T, int WIDTH>
DEVICE void read_input(float (&to)[WIDTH], const Input& part, int z, int y, int x, int f) {
    const T* const from = voxel_at<T>(part, z, y, x);
    if (part.factor.x == 0) {  // of one map, which counts for all
        const float value = load_activation(from);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) to[i] = value;
    } else {
        load<T, WIDTH>(to, from + f);
    }
}

/* WIDTH maps of a voxel before softmax, and after every other function. */
template <class T, int WIDTH>
DEVICE void compute(float (&values)[WIDTH], const Inputs& inputs, const Point& p, const float* weight, const float* bias,
                    int z, int y, int x, int f) {
    if (p.how == CONCAT) {
        int part = 0;
        while (part + 1 < p.inputs && f >= inputs.parts[part + 1].first) ++part;
        read_input<T, WIDTH>(values, inputs.parts[part], z, y, x, f - inputs.parts[part].first);
    } else {
        read_input<T, WIDTH>(values, inputs.parts[0], z, y, x, f);
        for (int part = 1; part < p.inputs; ++part) {
            float more[WIDTH];
            read_input<T, WIDTH>(more, inputs.parts[part], z, y, x, f);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = p.how == ADD ? values[i] + more[i] : values[i] * more[i];
        }
        if (p.how == SCALE) {
            float factors[WIDTH], offsets[WIDTH];
            load<float, WIDTH>(factors, weight + f);
            load<float, WIDTH>(offsets, bias + f);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[i] = values[i] * factors[i] + offsets[i];
        }
    }
    if (p.function == functions::PRELU) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            values[i] = apply_function(values[i], functions::PRELU, weight[p.slopes > 1 ? f + i : 0], 0.0f);
        return;
    }
    apply_functions(values, p.function, p.a, p.b);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    values(const __grid_constant__ Inputs inputs, const __grid_constant__ Point p, const float* __restrict__ weight,
           const float* __restrict__ bias, T* __restrict__ out, float* peak) {
    const int vectors = p.maps / WIDTH;
    const Line line = Line::of_thread(p.n.x * vectors, p.n.y);
    const int x = line.e / vectors, f = line.e % vectors * WIDTH;
    float largest = 0.0f;
    for (int z = blockIdx.z; z < p.n.z && line.exists; z += gridDim.z) {
        float found[WIDTH];
        compute<T, WIDTH>(found, inputs, p, weight, bias, z, line.y, x, f);
        store<T, WIDTH>(out + (((long long)z * p.n.y + line.y) * p.n.x + x) * p.maps + f, found);
        largest = larger_of(largest, found);
    }
    raise_peak_by_warp(peak, largest);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    softmax(const __grid_constant__ Inputs inputs, const __grid_constant__ Point p, const float* __restrict__ weight,
            const float* __restrict__ bias, T* __restrict__ out, float* peak, long long lanes) {
    const Line line = Line::of_thread(p.n.x * (int)lanes, p.n.y);
    const int x = line.e / (int)lanes, lane = line.e % (int)lanes;
    float largest = 0.0f;
    for (int z = blockIdx.z; z < p.n.z; z += gridDim.z)
        largest = write_softmax<T, WIDTH>(
            out + (((long long)z * p.n.y + line.y) * p.n.x + x) * p.maps, p.maps, lane, (int)lanes, line.exists, largest,
            [&](int f, float (&found)[WIDTH]) {
                compute<T, WIDTH>(found, inputs, p, weight, bias, z, line.y, x, f);
            });
    raise_peak_by_warp(peak, largest);
}
