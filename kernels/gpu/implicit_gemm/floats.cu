/* Convolution as a product of the lowered matrix with the kernels, on float32 units: any shape, stride and padding.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, stride i - padding + d, f] * kernels[(d, f), g])
 * Shapes     x (S, n, f), out (S, m, f') float or half, images in C order, any number of values apart; kernels (kz * ky
 *            * kx * f, padded f') float, bias (padded f') float: f' rounded up to whole groups of GROUP maps.
 * Launch     A block: VOXELS output voxels, counted through all images, and blockDim.x / 32 groups of maps, one a warp;
 *            a lane sums LANE_VOXELS voxels x GROUP maps in registers. The next STEP columns of the lowered matrix
 *            [voxels x (d, f)] are built in shared memory, a thread always the same column; kernels are read by all
 *            lanes at once. grid (blocks of voxels, blocks of maps). softmax: a block takes all maps, once to compute
 *            the softmax's sum and once more to write them. PADDED: windows reach beyond the image.
 * Bound      arithmetic: GROUP * LANE_VOXELS products for GROUP / 4 + LANE_VOXELS reads of shared memory and L1.
 * Source     Chetlur et al., cuDNN, 2014: the lowering that exists only in shared memory, without tensor cores.
 * Tested     tests/kernels/gpu/implicit_gemm/test_primitive.py
 */
#include "activation.cuh"

constexpr int STEP = 16;                           // taps at a time, as in floats.py
constexpr int AT_ONCE = 4;                         // inputs of a thread in flight
constexpr int LANE_VOXELS = 4;                     // voxels of a thread
constexpr int VOXELS = WARP * LANE_VOXELS;         // voxels of a block, as in floats.py
constexpr int ROW = VOXELS + 2;                    // shared memory row: no bank conflicts for lanes that write 16 taps

struct Sizes {
    long long carried, nz, ny, nx, fin, my, mx, voxels;  // voxels: of one image's output
    long long taps, ky, kx;                              // taps: including f
    long long sz, sy, sx, pz, py, px;                    // strides, zeros around the image
};

/* The start of a voxel's window, for planes of `before` and of `x`. */
template <class T> struct Window {
    const T *before, *x;  // both as if all planes were there
    long long z;
    int y, x0;  // position of the first voxel, which may be outside
};

template <class T>
DEVICE Window<T> window_of(const T* before, long long before_image, const T* x, long long x_image, long long voxel,
                           const Sizes& n) {
    const long long s = voxel / n.voxels, i = voxel % n.voxels;
    const long long z = i / (n.my * n.mx) * n.sz - n.pz, y = i / n.mx % n.my * n.sy - n.py, column = i % n.mx * n.sx - n.px;
    const long long at = (z * n.ny + y) * n.nx + column;
    return {before + s * before_image + at * n.fin, x + s * x_image + (at - n.carried * n.ny * n.nx) * n.fin, z,
            (int)y, (int)column};
}

template <class T, int GROUP, bool PADDED>
DEVICE void accumulate(float (&sums)[LANE_VOXELS][GROUP], float* tile, const Window<T>* windows, int known,
                       const float* kernels, long long pitch, bool sums_maps, const Sizes& n) {
    const int lane = threadIdx.x % WARP, k = threadIdx.x % STEP;
    for (long long first = 0; first < n.taps; first += STEP) {
        const long long tap = first + k, d = tap / n.fin, dz = d / (n.ky * n.kx);
        const int dy = d / n.kx % n.ky, dx = d % n.kx;
        const long long off = ((dz * n.ny + dy) * n.nx + dx) * n.fin + tap % n.fin;
        const int spacing = blockDim.x / STEP;
#pragma unroll 1
        for (int voxel = threadIdx.x / STEP; voxel < VOXELS; voxel += spacing * AT_ONCE) {
            float values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {  // all are in flight before the first is waited for
                values[i] = 0.0f;
                if (tap >= n.taps || voxel + i * spacing >= known) continue;
                const Window<T>& w = windows[voxel + i * spacing];
                if (PADDED && (w.z + dz < 0 || w.z + dz >= n.nz || w.y + dy < 0 || w.y + dy >= n.ny || w.x0 + dx < 0 ||
                               w.x0 + dx >= n.nx))
                    continue;
                values[i] = load_activation((w.z + dz < n.carried ? w.before : w.x) + off);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (voxel + i * spacing < VOXELS) tile[k * ROW + voxel + i * spacing] = values[i];
        }
        sync_block();
        const int count = min((long long)STEP, n.taps - first);
        for (int j = 0; j < count && sums_maps; ++j) {
            float in[LANE_VOXELS];
#pragma unroll
            for (int v = 0; v < LANE_VOXELS; ++v) in[v] = tile[j * ROW + v * WARP + lane];
#pragma unroll
            for (int g = 0; g < GROUP; g += 4) {
                const float4 w = load_activation4(kernels + (first + j) * pitch + g);
#pragma unroll
                for (int v = 0; v < LANE_VOXELS; ++v) {
                    sums[v][g] += in[v] * w.x;
                    sums[v][g + 1] += in[v] * w.y;
                    sums[v][g + 2] += in[v] * w.z;
                    sums[v][g + 3] += in[v] * w.w;
                }
            }
        }
        sync_block();
    }
}

/* The running state of a voxel's softmax: the largest map, and the sum of exp(value - largest). */
struct Summed {
    float largest, sum;
};
DEVICE Summed joined(Summed a, Summed b) {
    const float largest = maximum(a.largest, b.largest);
    if (largest == -INFINITY) return {largest, 0.0f};  // no maps yet
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

template <class T, int GROUP, bool PADDED>
__global__ void __launch_bounds__(128)
    lowered(const T* before, long long before_image, const T* x, long long x_image, T* out, long long out_image,
            const float* kernels, const float* bias, long long images, long long carried, long long nz, long long ny,
            long long nx, long long fin, long long my, long long mx, long long voxels, long long taps, long long ky,
            long long kx, long long sz, long long sy, long long sx, long long pz, long long py, long long px, long long maps,
            long long activation, float* peak) {
    EXTERN_SHARED(Window<T>, windows);  // [VOXELS], then tile [STEP][ROW], then softmax's [warps][VOXELS]
    float* const tile = reinterpret_cast<float*>(windows + VOXELS);
    Summed* const summed = reinterpret_cast<Summed*>(tile + STEP * ROW);
    const Sizes n = {carried, nz, ny, nx, fin, my, mx, voxels, taps, ky, kx, sz, sy, sx, pz, py, px};
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const long long base = (long long)blockIdx.x * VOXELS;
    const int known = min((long long)VOXELS, images * voxels - base);
    for (int voxel = threadIdx.x; voxel < known; voxel += blockDim.x)
        windows[voxel] = window_of(before, before_image, x, x_image, base + voxel, n);
    sync_block();

    const long long pitch = (maps + GROUP - 1) / GROUP * GROUP;  // distance of kernels, in maps
    const bool soft = activation == SOFTMAX;
    const long long block_maps = warps * GROUP, blocks = soft ? (maps + block_maps - 1) / block_maps : 1;
    Summed mine[LANE_VOXELS];
#pragma unroll
    for (int v = 0; v < LANE_VOXELS; ++v) mine[v] = {-INFINITY, 0.0f};
    float largest = 0.0f;
    for (int round = soft ? 0 : 1; round < 2; ++round) {
        for (long long block = 0; block < blocks; ++block) {
            const long long g0 = ((long long)blockIdx.y + block) * block_maps + warp * GROUP;
            const bool sums_maps = g0 < maps;
            float sums[LANE_VOXELS][GROUP];
#pragma unroll
            for (int v = 0; v < LANE_VOXELS; ++v)
#pragma unroll
                for (int g = 0; g < GROUP; ++g) sums[v][g] = 0.0f;
            accumulate<T, GROUP, PADDED>(sums, tile, windows, known, kernels + g0, pitch, sums_maps, n);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {  // the bias comes last: small terms added to it would be rounded more
                const float added = sums_maps ? bias[g0 + g] : 0.0f;
#pragma unroll
                for (int v = 0; v < LANE_VOXELS; ++v) sums[v][g] += added;
            }
#pragma unroll
            for (int v = 0; v < LANE_VOXELS; ++v) {
                const int voxel = v * WARP + lane;
                if (voxel >= known) continue;
                const long long s = (base + voxel) / voxels, i = (base + voxel) % voxels;
                T* const to = out + s * out_image + i * maps + g0;
#pragma unroll
                for (int g = 0; g < GROUP; ++g) {
                    if (g0 + g >= maps) continue;
                    if (round == 0) {
                        mine[v] = joined(mine[v], {sums[v][g], 1.0f});
                        continue;
                    }
                    const float value = soft ? expf(sums[v][g] - mine[v].largest) / mine[v].sum
                                             : activate(sums[v][g], (int)activation);
                    largest = larger_magnitude(largest, value);
                    store_activation(to + g, value);
                }
            }
        }
        if (round == 1) break;
#pragma unroll
        for (int v = 0; v < LANE_VOXELS; ++v) summed[warp * VOXELS + v * WARP + lane] = mine[v];
        sync_block();
#pragma unroll
        for (int v = 0; v < LANE_VOXELS; ++v) {
            mine[v] = {-INFINITY, 0.0f};
            for (int other = 0; other < warps; ++other) mine[v] = joined(mine[v], summed[other * VOXELS + v * WARP + lane]);
        }
    }
    raise_peak_by_warp(peak, largest);
}
