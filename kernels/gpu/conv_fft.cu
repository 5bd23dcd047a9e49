/* Whole-image FFT convolution: the operations between the one-dimensional transforms of cuFFT.
 *
 * Computes   gather    maps of an image, channels last, as padded planar lines along x, for in-place R2C transforms
 *            pad       lines of kernels, padded the same way
 *            transpose matrices, so that the axis transformed next is innermost, padded or cropped
 *            expand    the spectra of lines with `count` nonzero values, by Horner's rule in exp(-2 pi i z / n)
 *            multiply  sums[s][g] += sum over maps i of spectra[s][i] * conj(kernels[g][i]), at every frequency
 *            scatter   planar lines along x back to channels last: scaled, bias, activation, largest |value|
 * Shapes     T is float or half; complex numbers are float2; a spectrum of `image` complex numbers is stored as
 *            [x][y][z].
 * Launch     blocks of 32 x 8 threads on tiles of 32 x 32 values (gather, transpose, scatter: 4 to 8 KiB of shared
 *            memory) or 32 columns (expand); blocks of 256 (pad, multiply). One grid axis, so that no size exceeds a limit of
 *            65535.
 * Bound      memory.
 * Source     Zlateski, Lee, Seung, ZNNi (SC16), III-C and algorithm 3.
 * Tested     tests/kernels/gpu/test_conv_fft.py
 */
#include "device_ops.cuh"
#include "activation.cuh"

constexpr int TILE = 32;
constexpr int ROWS = 8;

/* The position of this block's tile: 32 columns of 32 maps, of one line. */
struct Tile {
    long long column, map, y, z;
};
DEVICE Tile tile_of(long long columns, long long maps, long long lines) {
    const long long across = (columns + TILE - 1) / TILE, groups = (maps + TILE - 1) / TILE;
    const long long column = blockIdx.x % across, rest = blockIdx.x / across;
    return {column * TILE, rest % groups * TILE, rest / groups % lines, rest / groups / lines};
}

/* Images whose first planes may be stored elsewhere (carried), with their strides. */
template <class T> struct Planes {
    const T *before, *x;
    long long carried, before_step, x_step;
    DEVICE const T* plane(long long s, long long z, long long values) const {
        return z < carried ? before + s * before_step + z * values : x + s * x_step + (z - carried) * values;
    }
};

/* Computes target[map][z][y][column], `pitch` columns, zero from nx on; maps are `maps` from `first` on of all images'
 * (S, f).
 */
template <class T>
__global__ void gather(const T* before, const T* x, float* target, long long carried, long long before_step,
                       long long x_step, long long fin, long long first, long long maps, long long nz, long long ny,
                       long long nx, long long pitch) {
    SHARED(float, tile, [TILE][TILE + 1]);
    const auto [column, map, y, z] = tile_of(pitch, maps, ny);
    const Planes<T> planes{before, x, carried, before_step, x_step};
    const int lane = threadIdx.x;
    const long long s = (first + map + lane) / fin, i = (first + map + lane) % fin;
    const bool wanted = map + lane < maps;
    const T* line = wanted ? planes.plane(s, z, ny * nx * fin) + y * nx * fin + i : nullptr;
    for (int row = threadIdx.y; row < TILE; row += ROWS)
        tile[row][lane] = wanted && column + row < nx ? load_activation(line + (column + row) * fin) : 0.0f;
    sync_block();
    for (int row = threadIdx.y; row < TILE; row += ROWS)
        if (map + row < maps && column + lane < pitch)
            target[(((map + row) * nz + z) * ny + y) * pitch + column + lane] = tile[lane][row];
}

/* Computes target[line][column], `pitch` columns, zero from `size` on. */
extern "C" __global__ void pad(const float* source, float* target, long long lines, long long size,
                               long long pitch) {
    const long long values = lines * pitch;
    for (long long i = global_thread(); i < values; i += global_threads()) {
        const long long line = i / pitch, column = i % pitch;
        target[i] = column < size ? source[line * size + column] : 0.0f;
    }
}

/* Computes target[b][c][r] = source[b][r][c], zero for r >= rows, for c < wide <= columns and r < deep. */
extern "C" __global__ void transpose(const float2* source, float2* target, long long rows, long long columns,
                                     long long wide, long long deep) {
    SHARED(float2, tile, [TILE][TILE + 1]);
    const long long tiles_c = (wide + TILE - 1) / TILE, tiles_r = (deep + TILE - 1) / TILE;
    long long unit = blockIdx.x;
    const long long c = unit % tiles_c * TILE;
    unit /= tiles_c;
    const long long r = unit % tiles_r * TILE, b = unit / tiles_r;
    const int lane = threadIdx.x;
    for (int row = threadIdx.y; row < TILE; row += ROWS) {
        const bool inside = r + row < rows && c + lane < wide;
        tile[row][lane] = inside ? source[(b * rows + r + row) * columns + c + lane] : make_float2(0.0f, 0.0f);
    }
    sync_block();
    for (int row = threadIdx.y; row < TILE; row += ROWS)
        if (c + row < wide && r + lane < deep) target[(b * wide + c + row) * deep + r + lane] = tile[lane][row];
}

/* Computes target[b][c][z] = sum over d < count of source[b][d][c] * twiddles[z]^d: transposition, padding and
 * transform in one pass that reads very little. Shared memory: count x 32 complex numbers.
 */
extern "C" __global__ void expand(const float2* source, float2* target, const float2* twiddles, long long count,
                                  long long columns, long long deep) {
    EXTERN_SHARED(float2, values);
    const long long tiles = (columns + TILE - 1) / TILE;
    const long long first = blockIdx.x % tiles * TILE, b = blockIdx.x / tiles;
    const int lane = threadIdx.x, wide = columns - first < TILE ? (int)(columns - first) : TILE;
    for (int d = threadIdx.y; d < count; d += ROWS)
        if (lane < wide) values[d * TILE + lane] = source[(b * count + d) * columns + first + lane];
    sync_block();
    for (int z = lane; z < deep; z += TILE) {
        const float2 twiddle = twiddles[z];
        for (int c = threadIdx.y; c < wide; c += ROWS) {
            float2 sum = values[(count - 1) * TILE + c];
            for (int d = (int)count - 2; d >= 0; --d) {
                const float2 value = values[d * TILE + c];
                sum = make_float2(value.x + sum.x * twiddle.x - sum.y * twiddle.y,
                                  value.y + sum.x * twiddle.y + sum.y * twiddle.x);
            }
            target[(b * columns + first + c) * deep + z] = sum;
        }
    }
}

/* A thread takes OUTPUTS kernels times IMAGES images, and the grid has groups of both; groups of the same frequencies
 * run concurrently, so that they share their reads in the L2 cache. `spectra` and `sums` point to the first image,
 * `kernels` to the first kernel; `count` maps are summed, added to `sums` if `add`.
 */
template <int OUTPUTS, int IMAGES>
__global__ void multiply(const float2* spectra, const float2* kernels, float2* sums, long long image, long long count,
                         long long kernel_stride, long long spectra_stride, long long sums_stride, long long add,
                         long long output_groups, long long image_groups) {
    const long long groups = output_groups * image_groups, group = blockIdx.x % groups;
    const long long at = blockIdx.x / groups * blockDim.x + threadIdx.x;
    if (at >= image) return;
    const long long g0 = group % output_groups * OUTPUTS, s0 = group / output_groups * IMAGES;
    spectra += s0 * spectra_stride + at;
    kernels += g0 * kernel_stride + at;
    sums += s0 * sums_stride + g0 * image + at;
    float2 sum[OUTPUTS][IMAGES];
    for (int g = 0; g < OUTPUTS; ++g)
        for (int s = 0; s < IMAGES; ++s)
            sum[g][s] = add ? sums[s * sums_stride + g * image] : make_float2(0.0f, 0.0f);
    for (long long i = 0; i < count; ++i) {
        float2 value[IMAGES];
        for (int s = 0; s < IMAGES; ++s) value[s] = spectra[s * spectra_stride + i * image];
        for (int g = 0; g < OUTPUTS; ++g) {
            const float2 w = kernels[g * kernel_stride + i * image];
            for (int s = 0; s < IMAGES; ++s) {
                sum[g][s].x += value[s].x * w.x + value[s].y * w.y;
                sum[g][s].y += value[s].y * w.x - value[s].x * w.y;
            }
        }
    }
    for (int g = 0; g < OUTPUTS; ++g)
        for (int s = 0; s < IMAGES; ++s) sums[s * sums_stride + g * image] = sum[g][s];
}

/* Computes out[s][z][y][column][g] = activation(bias[g] + scale * lines[map][z][y][column]), first + map = s f' + g. */
template <class T>
__global__ void scatter(const float* lines, T* out, const float* bias, float* peak, float scale, long long activation,
                        long long out_step, long long fout, long long first, long long maps, long long mz, long long my, long long mx,
                        long long pitch) {
    SHARED(float, tile, [TILE][TILE + 1]);
    const auto [column, map, y, z] = tile_of(mx, maps, my);
    const int lane = threadIdx.x;
    const long long s = (first + map + lane) / fout, g = (first + map + lane) % fout;
    for (int row = threadIdx.y; row < TILE; row += ROWS)
        if (map + row < maps && column + lane < mx)
            tile[row][lane] = lines[(((map + row) * mz + z) * my + y) * pitch + column + lane];
    sync_block();
    float largest = 0.0f;
    for (int row = threadIdx.y; row < TILE; row += ROWS)
        if (column + row < mx && map + lane < maps) {
            const float value = activate(tile[lane][row] * scale + bias[g], (int)activation);
            largest = larger_magnitude(largest, value);
            store_activation(out + s * out_step + ((z * my + y) * mx + column + row) * fout + g, value);
        }
    raise_peak_by_warp(peak, largest);
}
