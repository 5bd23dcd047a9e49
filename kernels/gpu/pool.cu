/* Maxima over windows: max-pooling, max-pooling fragments of all offsets in one pass, max-filter; maxout.
 *
 * Computes   slide   out[split(i), f] = max over the p-window of x[i * step + d, f], 0 <= d < p. step 1 and split p:
 *            fragments, position i of image s is voxel i / p of image s * P + the offset i % p; step p: pooling; step 1
 *            and split 1: max-filter.
 *            groups  out[g] = max over j of x[g * of + j].
 * Shapes     x (S, z, y, x, f) as vectors of N elements E of neighbouring maps (E: float, half, or half2 for two maps);
 *            `maps` counts such vectors. Images in C order, any number of vectors apart.
 * Launch     A thread advances along z at one (y, x, f): with a window known at compile time it keeps the maxima over y
 *            and x of the last PZ - 1 planes in registers. A block covers blockDim.x neighbouring vectors of blockDim.y
 *            lines, so that data shared by its windows come from L1.
 *            grid (lines and pieces of lines, pieces of z, images).
 * Bound      memory: x is read once, data shared by blocks from L2; out is written once, in whole sectors.
 * Exact      a maximum does not round. NaN in, NaN out.
 * Source     Zlateski, Lee, Seung, ZNNi (SC16), V; Giusti et al. 2013; Masci et al. 2013.
 * Tested     tests/kernels/gpu/test_pool.py
 */
#include "device_ops.cuh"

constexpr int THREADS = 512;  // threads of a block of `slide`, as in pool.py

template <class E, int N> struct alignas(N * sizeof(E)) Maps {
    E values[N];
};

template <class E, int N> DEVICE void raise(Maps<E, N>& a, const Maps<E, N>& b) {
#pragma unroll
    for (int i = 0; i < N; ++i) a.values[i] = maximum(a.values[i], b.values[i]);
}

/* The maximum over py x px vectors of one plane, `line` and `maps` vectors apart. */
template <int PY, int PX, class V>
DEVICE V over_plane(const V* __restrict__ at, int py, int px, long long line, long long maps) {
    V largest = *at;
#pragma unroll
    for (int dy = 0; dy < (PY ? PY : py); ++dy)
#pragma unroll
        for (int dx = 0; dx < (PX ? PX : px); ++dx)
            if (dy + dx > 0) raise(largest, at[dy * line + dx * maps]);
    return largest;
}

/* `carried` planes of an image are in `before`, the rest in x. A block takes positions chunk * blockIdx.y, .. along z.
 * PZ, PY, PX: the window, step 1; or all 0: any window, any step.
 */
template <class E, int N, int PZ, int PY, int PX>
__global__ void __launch_bounds__(THREADS, 2)
    slide(const Maps<E, N>* __restrict__ before, long long before_image, const Maps<E, N>* __restrict__ x,
          long long x_image, Maps<E, N>* __restrict__ out, long long out_image, long long images, long long carried,
          long long ny, long long nx, long long maps, long long positions_z, long long positions_y,
          long long positions_x, long long pz, long long py, long long px, long long step_z, long long step_y,
          long long step_x, long long split_z, long long split_y, long long split_x, long long chunk) {
    using V = Maps<E, N>;
    const long long run = positions_x * maps, blocks = (run + blockDim.x - 1) / blockDim.x;
    const unsigned e = blockIdx.x % (unsigned)blocks * blockDim.x + threadIdx.x;
    const unsigned y = blockIdx.x / (unsigned)blocks * blockDim.y + threadIdx.y;
    if (e >= run || y >= positions_y) return;
    const unsigned i = e / (unsigned)maps, f = e % (unsigned)maps;
    const long long line = nx * maps, plane = ny * line, at = y * step_y * line + i * step_x * maps + f;
    const long long offset = y % split_y * split_x + i % split_x;  // offset of the fragment, for split_z 0
    const long long out_line = positions_x / split_x * maps, out_plane = positions_y / split_y * out_line;
    const long long to = y / split_y * out_line + i / split_x * maps + f;
    const long long begin = blockIdx.y * chunk, end = min(begin + chunk, positions_z);
    for (long long s = blockIdx.z; s < images; s += gridDim.z) {
        const V* const old = before + s * before_image + at;
        const V* const fresh = x + s * x_image - carried * plane + at;
        V* const target = out + (s * split_z * split_y * split_x + offset) * out_image + to;
        const auto write = [&](long long z, const V& largest) {
            const int part = (unsigned)z % (unsigned)split_z, row = (unsigned)z / (unsigned)split_z;
            target[part * split_y * split_x * out_image + row * out_plane] = largest;
        };
        const auto of_plane = [&](long long z) {
            return over_plane<PY, PX>((z < carried ? old : fresh) + z * plane, (int)py, (int)px, line, maps);
        };
        if constexpr (PZ > 0) {
            V last[PZ];  // maxima of planes z - 1, z - 2, ..
#pragma unroll
            for (int d = PZ - 1; d > 0; --d) last[d - 1] = of_plane(begin + PZ - 1 - d);
#pragma unroll 1
            for (long long z = begin; z < end; ++z) {
                const V newest = of_plane(z + PZ - 1);
                V largest = newest;
#pragma unroll
                for (int d = 0; d < PZ - 1; ++d) raise(largest, last[d]);
                write(z, largest);
#pragma unroll
                for (int d = PZ - 2; d > 0; --d) last[d] = last[d - 1];
                last[0] = newest;
            }
        } else {
            for (long long z = begin; z < end; ++z) {
                V largest = of_plane(z * step_z);
                for (long long d = 1; d < pz; ++d) raise(largest, of_plane(z * step_z + d));
                write(z, largest);
            }
        }
    }
}

/* E: float or half; `count` results an image. */
template <class E>
__global__ void groups(const E* __restrict__ x, long long x_image, E* __restrict__ out, long long out_image,
                       long long images, long long count, long long of) {
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
        for (long long i = global_thread(); i < count; i += global_threads()) {
            const E* const member = x + s * x_image + i * of;
            E largest = member[0];
            for (int j = 1; j < of; ++j) largest = maximum(largest, member[j]);
            out[s * out_image + i] = largest;
        }
    }
}
