/* Data movement between a GPU session's tensors: raw patches in, carried planes along, fragments out as a dense patch.
 *
 * Computes   load, convert  x[z, y, x, c] = (raw[c, z, y, x] - mean[c]) / std[c], rounded as in znnpy.run.session.
 *            store          out[f, i * period + offset] = fragment(offset)[i, f], in the output's type.
 *            keep           the last planes of every image, for the next step of a column.
 *            clear, peak    zeros; the largest |x|.
 * Shapes     raw (c, z, y, x) and out (f, z, y, x) with any strides; activations (.., z, y, x, f) in C order.
 * Launch     256 threads a block. load and store transpose a tile of about 1024 voxels in shared memory, so that both
 *            sides are accessed along the axis that is contiguous there.
 * Bound      memory: everything is read once and written once.
 * Source     first principles; tiles after Ruetsch, Micikevicius, Optimizing Matrix Transpose in CUDA, 2009.
 * Tested     tests/kernels/gpu/test_load_store.py
 */
#include "device_ops.cuh"

constexpr int CHANNELS = 4;  // channels of a tile of `load` at a time, as in load_store.py
constexpr int MAPS = 8;      // maps of a tile of `store` at a time, as in load_store.py

/* A stored value minus the mean, as float32; wide types subtract in float64. */
template <class Raw> DEVICE float centred(Raw value, double mean) {
    if constexpr (sizeof(Raw) > 2) return (float)((double)value - mean);
    return (float)value - (float)mean;
}
template <> DEVICE float centred(float value, double mean) { return value - (float)mean; }
template <> DEVICE float centred(half value, double mean) { return to_float(value) - (float)mean; }

template <class Raw> DEVICE float plain(Raw value) { return (float)value; }
template <> DEVICE float plain(half value) { return to_float(value); }

template <class Raw> DEVICE float normalised(Raw value, const double* mean, const float* std, long long channel) {
    return mean == nullptr ? plain(value) : centred(value, mean[channel]) / std[channel];
}

template <class Raw> struct alignas(4 * sizeof(Raw)) Quad {
    Raw values[4];
};

/* Converts one channel without reordering: `count` values; raw is aligned to 4 * sizeof(Raw) bytes, x to 4 * sizeof(T).
 */
template <class Raw, class T>
__global__ void convert(const Raw* raw, T* x, long long count, const double* mean, const float* std, float* peak) {
    float largest = 0.0f;
#pragma unroll 2
    for (long long i = 4 * global_thread(); i < count; i += 4 * global_threads()) {
        if (i + 4 <= count) {
            const Quad<Raw> in = *reinterpret_cast<const Quad<Raw>*>(raw + i);
            float out[4];
            for (int j = 0; j < 4; ++j) {
                out[j] = normalised(in.values[j], mean, std, 0);
                largest = larger_magnitude(largest, out[j]);
            }
            store_activation4(x + i, make_float4(out[0], out[1], out[2], out[3]));
        } else {
            for (long long j = i; j < count; ++j) {
                const float out = normalised(raw[j], mean, std, 0);
                largest = larger_magnitude(largest, out);
                store_activation(x + j, out);
            }
        }
    }
    raise_peak_by_warp(peak, largest);
}

/* Handles any strides and channels. The axis `o` is the one of z, y with the smaller stride in `raw`, `r` the other.
 * across: that stride is smaller than the one along x. A block takes a tile of tile_o x tile_x voxels of one r.
 */
template <class Raw, class T>
__global__ void load(const Raw* raw, long long raw_c, long long raw_r, long long raw_o, long long raw_x, T* x,
                     long long x_r, long long x_o, long long channels, long long n_o, long long n_x, long long tile_o,
                     long long tile_x, long long across, const double* mean, const float* std, float* peak) {
    EXTERN_SHARED(float, tile);  // [CHANNELS][tile_o][tile_x + 1]
    const int to = tile_o, tx = tile_x, plane = to * (tx + 1);
    const long long blocks_x = (n_x + tx - 1) / tx, blocks_o = (n_o + to - 1) / to;
    const long long r = blockIdx.x / (blocks_x * blocks_o);
    const long long o0 = blockIdx.x / blocks_x % blocks_o * to, x0 = blockIdx.x % blocks_x * tx;
    const int have_o = min((long long)to, n_o - o0), have_x = min((long long)tx, n_x - x0);
    float largest = 0.0f;
    for (long long c0 = 0; c0 < channels; c0 += CHANNELS) {
        const int group = min((long long)CHANNELS, channels - c0);
#pragma unroll 4
        for (int t = threadIdx.x; t < have_o * have_x; t += blockDim.x) {
            const int o = across ? t % have_o : t / have_x, i = across ? t / have_o : t % have_x;
            const Raw* from = raw + c0 * raw_c + r * raw_r + (o0 + o) * raw_o + (x0 + i) * raw_x;
            for (int c = 0; c < group; ++c) {
                const float value = normalised(from[c * raw_c], mean, std, c0 + c);
                largest = larger_magnitude(largest, value);
                tile[c * plane + o * (tx + 1) + i] = value;
            }
        }
        sync_block();
#pragma unroll 4
        for (int t = threadIdx.x; t < have_o * have_x * group; t += blockDim.x) {
            const int o = t / (have_x * group), c = t % group, i = t / group % have_x;
            T* to_voxel = x + r * x_r + (o0 + o) * x_o + (x0 + i) * channels;
            store_activation(to_voxel + c0 + c, tile[c * plane + o * (tx + 1) + i]);
        }
        sync_block();
    }
    raise_peak_by_warp(peak, largest);
}

DEVICE void put(float* out, float value) { *out = value; }
DEVICE void put(half* out, float value) { *out = to_half(value); }
DEVICE void put(unsigned char* out, float value) {
    *out = (unsigned char)rintf(fminf(fmaxf(value, 0.0f), 1.0f) * 255.0f);  // rintf: half to even
}

/* A block takes a tile of tile_o x tile_x voxels of the dense patch, at one r; axes as for `load`, in `out`; x0 and
 * tile_x are multiples of period_x. fragment_of[r' * of_r + o' * of_o + x'] is the fragment, counted from all, that has
 * the voxels at this offset within the period; fragments outside of first .. first + count are skipped.
 */
template <class T, class Out>
__global__ void store(const T* fragments, long long image, long long line_r, long long line_o, const int* fragment_of,
                      long long of_r, long long of_o, long long first, long long count, Out* out, long long out_f, long long out_r, long long out_o,
                      long long out_x, long long maps, long long n_o, long long n_x, long long period_r,
                      long long period_o, long long period_x, long long tile_o, long long tile_x, long long across,
                      float* peak) {
    EXTERN_SHARED(float, tile);  // [MAPS][tile_o][tile_x + 1]
    const int to = tile_o, tx = tile_x, px = period_x, plane = to * (tx + 1);
    const long long blocks_x = (n_x + tx - 1) / tx, blocks_o = (n_o + to - 1) / to;
    const long long r = blockIdx.x / (blocks_x * blocks_o);
    const long long o0 = blockIdx.x / blocks_x % blocks_o * to, x0 = blockIdx.x % blocks_x * tx;
    const int have_o = min((long long)to, n_o - o0), have_x = min((long long)tx, n_x - x0), run = have_x / px;
    const int* const of_x = fragment_of + r % period_r * of_r;
    float largest = 0.0f;
    for (long long f0 = 0; f0 < maps; f0 += MAPS) {
        const int group = min((long long)MAPS, maps - f0);
#pragma unroll 4
        for (int t = threadIdx.x; t < have_o * have_x * group; t += blockDim.x) {
            const int f = t % group, i = t / group % run, ox = t / (group * run) % px, o = t / (group * have_x);
            const long long fragment = of_x[(o0 + o) % period_o * of_o + ox] - first;
            if (fragment < 0 || fragment >= count) continue;
            const long long voxel = r / period_r * line_r + (o0 + o) / period_o * line_o + (x0 / px + i) * maps;
            const float value = load_activation(fragments + fragment * image + voxel + f0 + f);
            largest = larger_magnitude(largest, value);
            tile[f * plane + o * (tx + 1) + i * px + ox] = value;
        }
        sync_block();
#pragma unroll 4
        for (int t = threadIdx.x; t < have_o * have_x; t += blockDim.x) {
            const int o = across ? t % have_o : t / have_x, i = across ? t / have_o : t % have_x;
            const long long fragment = of_x[(o0 + o) % period_o * of_o + i % px] - first;
            if (fragment < 0 || fragment >= count) continue;
            Out* to_voxel = out + f0 * out_f + r * out_r + (o0 + o) * out_o + (x0 + i) * out_x;
            for (int f = 0; f < group; ++f) put(to_voxel + f * out_f, tile[f * plane + o * (tx + 1) + i]);
        }
        sync_block();
    }
    raise_peak_by_warp(peak, largest);
}

constexpr int AT_ONCE = 4;  // planes in flight per thread, so that loads overlap

/* Copies old[p] = from[p], p ascending; `from` may overlap the end of `old`: planes are read before later ones are
 * written.
 */
template <class V> DEVICE void shift(V* old, const V* from, long long planes, long long plane) {
    for (long long p = 0; p < planes; p += AT_ONCE) {
        V values[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (p + j < planes) values[j] = from[(p + j) * plane];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (p + j < planes) old[(p + j) * plane] = values[j];
    }
}

/* Sizes are in units of V. x has `planes` planes an image; join: the first `carried` of them are filled from `kept`. A
 * thread owns one position of a plane, so no synchronisation is needed.
 */
template <class V>
__global__ void keep(V* kept, long long kept_image, V* x, long long x_image, long long images, long long carried,
                     long long planes, long long plane, long long join) {
    const long long stay = max(carried - planes, 0LL);  // planes in `kept` that stay there
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
        for (long long i = global_thread(); i < plane; i += global_threads()) {
            V* const old = kept + s * kept_image + i;
            V* const fresh = x + s * x_image + i;
            if (join) {
                shift(fresh, old, carried, plane);
                shift(old, fresh + (planes - carried) * plane, carried, plane);
            } else {
                shift(old, old + planes * plane, stay, plane);
                shift(old + stay * plane, fresh + (stay + planes - carried) * plane, carried - stay, plane);
            }
        }
    }
}

template <class V> __global__ void clear(V* x, long long image, long long images, long long count) {
    for (long long s = blockIdx.y; s < images; s += gridDim.y)
        for (long long i = global_thread(); i < count; i += global_threads()) x[s * image + i] = V{};
}

/* V: values that a thread reads at once, 1 or 4; `image` and `count` are multiples of it, in values. */
template <class T, int V>
__global__ void peak_of(const T* x, long long image, long long images, long long count, float* peak) {
    float largest = 0.0f;
    for (long long s = blockIdx.y; s < images; s += gridDim.y) {
#pragma unroll 4
        for (long long i = V * global_thread(); i < count; i += V * global_threads()) {
            const T* const at = x + s * image + i;
            if constexpr (V == 4) {
                const float4 v = load_activation4(at);
                const float low = larger_magnitude(larger_magnitude(largest, v.x), v.y);
                largest = larger_magnitude(larger_magnitude(low, v.z), v.w);
            } else {
                largest = larger_magnitude(largest, load_activation(at));
            }
        }
    }
    raise_peak_by_warp(peak, largest);
}
