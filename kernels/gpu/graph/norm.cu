/* Norms over whole images, and means and maxima of them.
 *
 * Computes   moments    for each block and map: mean and sum of squared deviations of the block's voxels, and their number
 *            terms      shift, factor and offset of each map, from the moments of its group of maps
 *            normalise  out[i, f] = function((x[i, f] - shift[f]) * factor[f] + offset[f])
 *            means      out[f] = the mean of a map; from moments
 *            maxima     for each block and map: the maximum of the block's voxels; largest: of all blocks
 * Shapes     x (z, y, x, f) float or half, any steps between voxels; moments [blocks][2][maps] double, then [blocks] double;
 *            terms [3][maps] float; maxima [blocks][maps] float; out in C order.
 * Launch     moments, maxima  256 threads: `columns` threads side by side have WIDTH maps each, the others more voxels, of
 *                             which `along` are neighbours along x. grid (blocks, slices of columns * WIDTH maps)
 *            terms, means     grid (groups); a power of two of threads
 *            largest          grid (maps / 128)
 *            normalise, softmax  lines.cuh; as in point.cu
 * Bound      memory: x is read twice, out is written once.
 * Exact      Up to PART values are summed in float32 as differences from the first of them, by Welford's updates; means
 *            and squares of such parts are joined in double. A maximum does not round. NaN in, NaN out.
 * Source     Welford 1962; Chan, Golub and LeVeque 1979 (joining parts)
 * Tested     tests/kernels/gpu/graph/test_norm.py
 */
#include "graph/voxelwise.cuh"

constexpr int THREADS = 256;  // of moments and maxima, as in norm.py
constexpr int PART = 256;     // values of a map that a thread sums in float32

/* Calls visit(values) for WIDTH maps from f on of the voxels of this thread. */
template <class T, int WIDTH, class F>
DEVICE void each_voxel(const Input& x, Triple n, int columns, int along, int f, F visit) {
    const int row = threadIdx.x / columns, high = THREADS / columns / along;
    const long long lines = (long long)n.z * n.y;
    for (long long line = blockIdx.x * (long long)high + row / along; line < lines; line += (long long)gridDim.x * high) {
        const int z = (int)quotient(line, n.y);
        const T* const from = voxel_at<T>(x, z, (int)(line - (long long)z * n.y), 0) + f;
#pragma unroll 4
        for (int i = row % along; i < n.x; i += along) {
            float values[WIDTH];
            load<T, WIDTH>(values, from + i * x.step_x);
            visit(values);
        }
    }
}

/* The number of values, their mean, and the sum of their squared deviations from it. */
struct Moments {
    double count, mean, squares;
};
DEVICE Moments joined(Moments a, Moments b) {
    if (a.count == 0.0) return b;
    if (b.count == 0.0) return a;
    const double count = a.count + b.count, away = b.mean - a.mean, part = b.count / count;
    return {count, a.mean + away * part, a.squares + b.squares + away * away * a.count * part};
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 2)
    moments(const __grid_constant__ Input x, const __grid_constant__ Triple n, double* __restrict__ found,
            long long columns_, long long along) {
    SHARED(Moments, shared, [THREADS]);
    const int columns = (int)columns_, column = threadIdx.x % columns;
    const int f = (blockIdx.y * columns + column) * WIDTH;
    double mean[WIDTH], squares[WIDTH], count = 0.0;
    float first[WIDTH], part_mean[WIDTH], part_squares[WIDTH];
    int seen = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) mean[i] = squares[i] = 0.0, first[i] = part_mean[i] = part_squares[i] = 0.0f;
    const auto join = [&] {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const Moments all = joined(Moments{count, mean[i], squares[i]},
                                       Moments{(double)seen, (double)first[i] + part_mean[i], part_squares[i]});
            mean[i] = all.mean, squares[i] = all.squares;
            part_mean[i] = part_squares[i] = 0.0f;
        }
        count += seen;
        seen = 0;
    };
    if (f < x.maps)
        each_voxel<T, WIDTH>(x, n, columns, (int)along, f, [&](const float (&values)[WIDTH]) {
            if (seen == PART) join();
            const float part = 1.0f / (float)++seen;
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) {
                if (seen == 1) first[i] = values[i];
                const float value = values[i] - first[i], away = value - part_mean[i];
                part_mean[i] += away * part;
                part_squares[i] += away * (value - part_mean[i]);
            }
        });
    if (seen > 0) join();
    double* const to = found + (long long)blockIdx.x * 2 * x.maps;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        sync_block();
        shared[threadIdx.x] = {count, mean[i], squares[i]};
        for (int rows = THREADS / columns / 2; rows > 0; rows /= 2) {
            sync_block();
            if (threadIdx.x < rows * columns)
                shared[threadIdx.x] = joined(shared[threadIdx.x], shared[threadIdx.x + rows * columns]);
        }
        sync_block();
        if (threadIdx.x >= columns || f >= x.maps) continue;
        to[f + i] = shared[threadIdx.x].mean, to[x.maps + f + i] = shared[threadIdx.x].squares;
        if (f + i == 0) found[(long long)gridDim.x * 2 * x.maps + blockIdx.x] = shared[threadIdx.x].count;
    }
}

/* The sum of a value of all threads of the block, a power of two. */
DEVICE double sum_of_block(double value, double* shared) {
    sync_block();
    shared[threadIdx.x] = value;
    for (int half_way = blockDim.x / 2; half_way > 0; half_way /= 2) {
        sync_block();
        if (threadIdx.x < half_way) shared[threadIdx.x] += shared[threadIdx.x + half_way];
    }
    sync_block();
    return shared[0];
}

/* The moments of `each` maps from f0 on, from those of all blocks. Without a division for each, as a sum of means and one
 * of deviations.
 */
DEVICE Moments of_group(const double* found, long long blocks, int maps, int f0, int each, double* shared) {
    const double* const counts = found + blocks * 2 * maps;
    double count = 0.0, sum = 0.0, squares = 0.0;
    for (long long i = threadIdx.x; i < blocks * each; i += blockDim.x) {
        const long long block = quotient(i, each);
        count += counts[block];
        sum += counts[block] * found[block * 2 * maps + f0 + i - block * each];
    }
    count = sum_of_block(count, shared);
    const double mean = sum_of_block(sum, shared) / count;
    for (long long i = threadIdx.x; i < blocks * each; i += blockDim.x) {
        const long long block = quotient(i, each), at = block * 2 * maps + f0 + i - block * each;
        const double away = found[at] - mean;
        squares += found[at + maps] + counts[block] * away * away;
    }
    return {count, mean, sum_of_block(squares, shared)};
}

extern "C" __global__ void terms(const double* __restrict__ found, long long blocks, long long maps, long long each,
                                 float epsilon, const float* __restrict__ weight, const float* __restrict__ bias,
                                 float* __restrict__ to) {
    EXTERN_SHARED(double, shared);  // [threads]
    const int f0 = blockIdx.x * (int)each;
    const Moments all = of_group(found, blocks, (int)maps, f0, (int)each, shared);
    const double scale = 1.0 / sqrt(all.squares / all.count + (double)epsilon);
    const float shift = (float)all.mean;
    for (int f = f0 + threadIdx.x; f < f0 + each; f += blockDim.x) {
        const double factor = weight == nullptr ? scale : scale * weight[f];
        to[f] = shift;
        to[maps + f] = (float)factor;
        to[2 * maps + f] = (float)((bias == nullptr ? 0.0 : bias[f]) - (all.mean - shift) * factor);
    }
}

/* `half_values`: whether out is of halves. */
extern "C" __global__ void means(const double* __restrict__ found, long long blocks, long long maps, void* out,
                                 long long half_values, float* peak) {
    EXTERN_SHARED(double, shared);  // [threads]
    const float mean = (float)of_group(found, blocks, (int)maps, blockIdx.x, 1, shared).mean;
    if (threadIdx.x > 0) return;
    if (half_values)
        store_activation(static_cast<half*>(out) + blockIdx.x, mean);
    else
        store_activation(static_cast<float*>(out) + blockIdx.x, mean);
    raise_peak(peak, mean);
}

struct Normal {  // as in norm.py
    Triple n;
    int maps, function;
    float a, b;
};

template <class T, int WIDTH>
DEVICE void read_normal(float (&values)[WIDTH], const T* from, const Normal& p, const float* terms, int f) {
    float shift[WIDTH], factor[WIDTH], offset[WIDTH];
    load<T, WIDTH>(values, from + f);
    load<float, WIDTH>(shift, terms + f);
    load<float, WIDTH>(factor, terms + p.maps + f);
    load<float, WIDTH>(offset, terms + 2 * p.maps + f);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = (values[i] - shift[i]) * factor[i] + offset[i];
    apply_functions(values, p.function, p.a, p.b);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    normalise(const __grid_constant__ Input x, const __grid_constant__ Normal p, const float* __restrict__ terms,
              T* __restrict__ out, float* peak) {
    const int vectors = p.maps / WIDTH;
    const Line line = Line::of_thread(p.n.x * vectors, p.n.y);
    const int i = line.e / vectors, f = line.e % vectors * WIDTH;
    float largest = 0.0f;
    for (int z = blockIdx.z; z < p.n.z && line.exists; z += gridDim.z) {
        float values[WIDTH];
        read_normal<T, WIDTH>(values, voxel_at<T>(x, z, line.y, i), p, terms, f);
        store<T, WIDTH>(out + (((long long)z * p.n.y + line.y) * p.n.x + i) * p.maps + f, values);
        largest = larger_of(largest, values);
    }
    raise_peak_by_warp(peak, largest);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    softmax(const __grid_constant__ Input x, const __grid_constant__ Normal p, const float* __restrict__ terms,
            T* __restrict__ out, float* peak, long long lanes) {
    const Line line = Line::of_thread(p.n.x * (int)lanes, p.n.y);
    const int i = line.e / (int)lanes, lane = line.e % (int)lanes;
    float largest = 0.0f;
    for (int z = blockIdx.z; z < p.n.z; z += gridDim.z)
        largest = write_softmax<T, WIDTH>(
            out + (((long long)z * p.n.y + line.y) * p.n.x + i) * p.maps, p.maps, lane, (int)lanes, line.exists, largest,
            [&](int f, float (&values)[WIDTH]) {
                read_normal<T, WIDTH>(values, voxel_at<T>(x, z, line.y, i), p, terms, f);
            });
    raise_peak_by_warp(peak, largest);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 4)
    maxima(const __grid_constant__ Input x, const __grid_constant__ Triple n, float* __restrict__ found,
           long long columns_, long long along) {
    SHARED(float, shared, [THREADS]);
    const int columns = (int)columns_;
    const int f = (blockIdx.y * columns + threadIdx.x % columns) * WIDTH;
    float most[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) most[i] = -INFINITY;
    if (f < x.maps)
        each_voxel<T, WIDTH>(x, n, columns, (int)along, f, [&](const float (&values)[WIDTH]) {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) most[i] = maximum(most[i], values[i]);
        });
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        sync_block();
        shared[threadIdx.x] = most[i];
        for (int rows = THREADS / columns / 2; rows > 0; rows /= 2) {
            sync_block();
            if (threadIdx.x < rows * columns)
                shared[threadIdx.x] = maximum(shared[threadIdx.x], shared[threadIdx.x + rows * columns]);
        }
        sync_block();
        if (threadIdx.x < columns && f < x.maps) found[(long long)blockIdx.x * x.maps + f + i] = shared[threadIdx.x];
    }
}

extern "C" __global__ void largest(const float* __restrict__ found, long long blocks, long long maps, void* out,
                                   long long half_values) {
    const long long f = global_thread();
    if (f >= maps) return;
    float most = found[f];
    for (long long block = 1; block < blocks; ++block) most = maximum(most, found[block * maps + f]);
    if (half_values)
        store_activation(static_cast<half*>(out) + f, most);
    else
        store_activation(static_cast<float*>(out) + f, most);
}
