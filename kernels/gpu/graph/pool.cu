/* Max- and average pooling with any stride and padding.
 *
 * Computes   out[i, f] = max over the window at i * stride - before of the x[., f] within the image, or their sum divided
 *            by the number of the window's voxels within the image, or with `counts_padding` before n + counted.
 * Shapes     x (z, y, x, f) float or half, any steps between voxels, out in C order; a thread has WIDTH maps of a voxel.
 * Launch     lines.cuh. SIDE: windows of so many voxels along each axis, all within the image; 0: any.
 * Bound      memory: what windows share comes from L1 and L2.
 * Exact      A maximum does not round; NaN in, NaN out. Sums are in float32.
 * Source     definition
 * Tested     tests/kernels/gpu/graph/test_lines.py
 */
#include "graph/lines.cuh"

struct Windows {  // as in pool.py
    Triple n, m, window, stride, before, counted;
    int counts_padding;
};

template <class T, int WIDTH, bool AVERAGE> DEVICE void take(float (&found)[WIDTH], const T* from) {
    float in[WIDTH];
    load<T, WIDTH>(in, from);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) found[i] = AVERAGE ? found[i] + in[i] : maximum(found[i], in[i]);
}

template <class T, int WIDTH, bool AVERAGE, int SIDE>
__global__ void __launch_bounds__(256, 4)
    pool(const __grid_constant__ Input x, const __grid_constant__ Windows p, T* __restrict__ out, float* peak) {
    const int vectors = x.maps / WIDTH;
    const Line line = Line::of_thread(p.m.x * vectors, p.m.y);
    const int ix = line.e / vectors, f = line.e % vectors * WIDTH;
    const int y0 = line.y * p.stride.y - p.before.y, x0 = ix * p.stride.x - p.before.x;
    const int first_y = max(0, y0), end_y = min(y0 + p.window.y, p.n.y);
    const int first_x = max(0, x0), end_x = min(x0 + p.window.x, p.n.x);
    float largest = 0.0f;
    for (int iz = blockIdx.z; iz < p.m.z && line.exists; iz += gridDim.z) {
        const int z0 = iz * p.stride.z - p.before.z;
        const int first_z = max(0, z0), end_z = min(z0 + p.window.z, p.n.z);
        float found[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) found[i] = AVERAGE ? 0.0f : -INFINITY;
        if constexpr (SIDE > 0) {
            const T* const from = voxel_at<T>(x, z0, y0, x0) + f;
#pragma unroll
            for (int dz = 0; dz < SIDE; ++dz)
#pragma unroll
                for (int dy = 0; dy < SIDE; ++dy)
#pragma unroll
                    for (int dx = 0; dx < SIDE; ++dx)
                        take<T, WIDTH, AVERAGE>(found, from + dz * x.step_z + dy * x.step_y + dx * x.step_x);
        } else {
            for (int z = first_z; z < end_z; ++z)
                for (int y = first_y; y < end_y; ++y) {
                    const T* const from = voxel_at<T>(x, z, y, 0) + f;
#pragma unroll 4
                    for (int at = first_x; at < end_x; ++at) take<T, WIDTH, AVERAGE>(found, from + at * x.step_x);
                }
        }
        if constexpr (AVERAGE) {
            int count = (end_z - first_z) * (end_y - first_y) * (end_x - first_x);
            if (p.counts_padding)
                count = (min(z0 + p.window.z, p.n.z + p.counted.z) - z0) *
                        (min(y0 + p.window.y, p.n.y + p.counted.y) - y0) *
                        (min(x0 + p.window.x, p.n.x + p.counted.x) - x0);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) found[i] /= (float)count;
            largest = larger_of(largest, found);
        }
        store<T, WIDTH>(out + (((long long)iz * p.m.y + line.y) * p.m.x + ix) * x.maps + f, found);
    }
    if constexpr (AVERAGE) raise_peak_by_warp(peak, largest);
}
