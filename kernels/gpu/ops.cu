/* Array operations of networks besides convolutions: activations, softmax, pooling, layouts.
 *
 * Computes   pointwise           out = activation(x).
 *            softmax_maps        softmax over the maps of each voxel.
 *            softmax_parts, ..   softmax over all values of an image: parts of each image are summed, then out is
 *                                written.
 *            slide               the maximum or the mean over the part of each window inside the image, with strides
 *                                and padding.
 *            reorder             out = x, for any strides of both.
 * Shapes     x, out (S, z, y, x, f) float or half, images in C order, any number of values apart; reorder: five axes,
 *            any strides. V: values that a thread takes at once, 1 or 4: sizes and addresses allow it.
 * Launch     256 threads a block, as many blocks as fill the device; loops do the rest. reorder: a tile of at most 1024
 *            values is transposed in shared memory, so that both sides are accessed along the axis that is contiguous
 *            there.
 * Bound      memory: everything is read once (softmax of an image: twice, wide voxels from L1 the second time), written
 *            once.
 * Exact      arithmetic is in float; sums of an image are added in an order that depends on the sizes only.
 * Source     Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3; tiles after Ruetsch, Micikevicius,
 *            Optimizing Matrix Transpose in CUDA, 2009.
 * Tested     tests/kernels/gpu/test_ops.py
 */
#include "activation.cuh"

constexpr int THREADS = 256;  // as in ops.py

template <int V> struct Values {
    float of[V];
};
template <class T> struct alignas(4 * sizeof(T)) Quad {
    T of[4];
};
template <int V, class T> DEVICE Values<V> load(const T* from) {  // x may be out, so it is not loaded as read-only data
    if constexpr (V == 1) return {{to_float(*from)}};
    else {
        const Quad<T> v = *reinterpret_cast<const Quad<T>*>(from);
        return {{to_float(v.of[0]), to_float(v.of[1]), to_float(v.of[2]), to_float(v.of[3])}};
    }
}
template <int V, class T> DEVICE void store(T* to, const Values<V>& v) {
    if constexpr (V == 1) store_activation(to, v.of[0]);
    else store_activation4(to, make_float4(v.of[0], v.of[1], v.of[2], v.of[3]));
}

/* `count` values an image; out may be x. */
template <class T, int V>
__global__ void pointwise(const T* x, long long x_image, T* out, long long out_image, long long images, long long count,
                          long long activation) {
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
        for (long long i = V * global_thread(); i < count; i += V * global_threads()) {
            Values<V> v = load<V>(x + s * x_image + i);
#pragma unroll
            for (int j = 0; j < V; ++j) v.of[j] = activate(v.of[j], (int)activation);
            store<V>(out + s * out_image + i, v);
        }
    }
}

/* `lanes` neighbouring lanes, a power of 2 up to a warp, share one voxel. */
template <class T>
__global__ void softmax_maps(const T* x, long long x_image, T* out, long long out_image, long long images,
                             long long voxels, long long maps, long long lanes) {
    const int lane = threadIdx.x % (int)lanes, at_once = WARP / (int)lanes;  // voxels of a warp at a time
    const long long all = images * voxels, step = global_threads() / WARP * at_once;
    for (long long first = global_thread() / WARP * at_once; first < all; first += step) {  // per warp: its lanes agree
        const long long voxel = first + threadIdx.x % WARP / (int)lanes;
        const long long known = voxel < all ? maps : 0, s = voxel / voxels, i = voxel % voxels;
        const T* const from = x + s * x_image + i * maps;
        T* const to = out + s * out_image + i * maps;
        float largest = -INFINITY, sum = 0.0f;
        for (long long f = lane; f < known; f += lanes) largest = maximum(largest, to_float(from[f]));
        for (int mask = (int)lanes / 2; mask > 0; mask /= 2) largest = maximum(largest, shuffle_xor(largest, mask));
        for (long long f = lane; f < known; f += lanes) sum += expf(to_float(from[f]) - largest);
        for (int mask = (int)lanes / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        for (long long f = lane; f < known; f += lanes)
            store_activation(to + f, expf(to_float(from[f]) - largest) / sum);
    }
}

/* The running state of a softmax: the largest value, and the sum of exp(value - largest). */
struct Summed {
    float largest, sum;
};
DEVICE Summed joined(Summed a, Summed b) {
    const float largest = maximum(a.largest, b.largest);
    if (largest == -INFINITY) return {largest, 0.0f};  // no values yet
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}
DEVICE Summed joined_by_warp(Summed mine) {
    for (int mask = WARP / 2; mask > 0; mask /= 2)
        mine = joined(mine, {shuffle_xor(mine.largest, mask), shuffle_xor(mine.sum, mask)});
    return mine;
}

/* parts [images][gridDim.x]: the state of each block's part of an image of `count` values. */
template <class T, int V>
__global__ void softmax_parts(const T* x, long long x_image, Summed* parts, long long images, long long count) {
    SHARED(Summed, found, [THREADS / WARP]);
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
        Summed mine = {-INFINITY, 0.0f};
        for (long long i = V * global_thread(); i < count; i += V * global_threads()) {
            const Values<V> v = load<V>(x + s * x_image + i);
            Summed next = {v.of[0], 0.0f};
#pragma unroll
            for (int j = 1; j < V; ++j) next.largest = maximum(next.largest, v.of[j]);
#pragma unroll
            for (int j = 0; j < V; ++j) next.sum += next.largest == -INFINITY ? 0.0f : expf(v.of[j] - next.largest);
            mine = joined(mine, next);
        }
        mine = joined_by_warp(mine);
        if (threadIdx.x % WARP == 0) found[threadIdx.x / WARP] = mine;
        sync_block();
        if (threadIdx.x == 0) {
            for (int warp = 1; warp < THREADS / WARP; ++warp) mine = joined(mine, found[warp]);
            parts[s * gridDim.x + blockIdx.x] = mine;
        }
        sync_block();
    }
}

/* There are `count_parts` parts an image. out may be x. */
template <class T, int V>
__global__ void softmax_image(const T* x, long long x_image, T* out, long long out_image, const Summed* parts,
                              long long count_parts, long long images, long long count) {
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
        Summed all = {-INFINITY, 0.0f};
        for (long long part = threadIdx.x % WARP; part < count_parts; part += WARP)
            all = joined(all, parts[s * count_parts + part]);
        all = joined_by_warp(all);
        for (long long i = V * global_thread(); i < count; i += V * global_threads()) {
            Values<V> v = load<V>(x + s * x_image + i);
#pragma unroll
            for (int j = 0; j < V; ++j) v.of[j] = expf(v.of[j] - all.largest) / all.sum;
            store<V>(out + s * out_image + i, v);
        }
    }
}

/* maps: a multiple of V. whole: a mean counts the padding in the window too. */
template <class T, int V, bool MAX>
__global__ void slide(const T* __restrict__ x, long long x_image, T* __restrict__ out, long long out_image,
                      long long images, long long nz, long long ny, long long nx, long long maps, long long mz,
                      long long my, long long mx, long long kz, long long ky, long long kx, long long step_z,
                      long long step_y, long long step_x, long long pad_z, long long pad_y, long long pad_x,
                      long long whole) {
    const long long vectors = maps / V, all = images * mz * my * mx * vectors;
    for (long long i = global_thread(); i < all; i += global_threads()) {
        const long long voxel = i / vectors, f = i % vectors * V;
        const long long s = voxel / (mz * my * mx), at = voxel % (mz * my * mx);
        const long long z0 = at / (my * mx) * step_z - pad_z, y0 = at / mx % my * step_y - pad_y;
        const long long x0 = at % mx * step_x - pad_x;
        const long long z_end = min(z0 + kz, nz), y_end = min(y0 + ky, ny), x_end = min(x0 + kx, nx);
        const long long z1 = max(0LL, z0), y1 = max(0LL, y0), x1 = max(0LL, x0);
        Values<V> result;
#pragma unroll
        for (int j = 0; j < V; ++j) result.of[j] = MAX ? -INFINITY : 0.0f;
        for (long long z = z1; z < z_end; ++z)
            for (long long y = y1; y < y_end; ++y) {
                const T* from = x + s * x_image + ((z * ny + y) * nx + x1) * maps + f;
                for (long long column = x1; column < x_end; ++column, from += maps) {
                    const Values<V> v = load<V>(from);
#pragma unroll
                    for (int j = 0; j < V; ++j)
                        result.of[j] = MAX ? maximum(result.of[j], v.of[j]) : result.of[j] + v.of[j];
                }
            }
        if constexpr (!MAX) {
            const float values = whole ? kz * ky * kx : (z_end - z1) * (y_end - y1) * (x_end - x1);
#pragma unroll
            for (int j = 0; j < V; ++j) result.of[j] /= values;
        }
        store<V>(out + s * out_image + at * maps + f, result);
    }
}

/* Sizes n and strides of both are in values. A tile is tile_3 x tile_4 values along axes 3 and 4. x has its smallest
 * stride along axis 4; out along axis 3 if `across`, else along axis 4 too.
 */
template <class In, class Out>
__global__ void reorder(const In* x, Out* out, long long n0, long long n1, long long n2, long long n3, long long n4,
                        long long x0, long long x1, long long x2, long long x3, long long x4, long long o0,
                        long long o1, long long o2, long long o3, long long o4, long long tile_3, long long tile_4,
                        long long across) {
    EXTERN_SHARED(float, tile);  // [tile_3][tile_4 + 1]
    const long long tiles_3 = (n3 + tile_3 - 1) / tile_3, tiles_4 = (n4 + tile_4 - 1) / tile_4;
    const long long all = n0 * n1 * n2 * tiles_3 * tiles_4;
    for (long long block = blockIdx.x; block < all; block += gridDim.x) {
        const long long first_4 = block % tiles_4 * tile_4, first_3 = block / tiles_4 % tiles_3 * tile_3;
        const long long rest = block / (tiles_4 * tiles_3), i2 = rest % n2, i1 = rest / n2 % n1, i0 = rest / (n2 * n1);
        const In* const from = x + i0 * x0 + i1 * x1 + i2 * x2 + first_3 * x3 + first_4 * x4;
        Out* const to = out + i0 * o0 + i1 * o1 + i2 * o2 + first_3 * o3 + first_4 * o4;
        const int have_3 = min(tile_3, n3 - first_3), have_4 = min(tile_4, n4 - first_4);
#pragma unroll 4
        for (int t = threadIdx.x; t < have_3 * have_4; t += THREADS) {
            const int i3 = t / have_4, i4 = t % have_4;
            tile[i3 * ((int)tile_4 + 1) + i4] = load_activation(from + i3 * x3 + i4 * x4);
        }
        sync_block();
#pragma unroll 4
        for (int t = threadIdx.x; t < have_3 * have_4; t += THREADS) {
            const int i3 = across ? t % have_3 : t / have_4, i4 = across ? t / have_3 : t % have_4;
            store_activation(to + i3 * o3 + i4 * o4, tile[i3 * ((int)tile_4 + 1) + i4]);
        }
        sync_block();
    }
}
