/* Norms over whole images, and means and maxima of them.
 *
 * Computes   moments    for each block and map: mean and sum of squared deviations of the block's voxels, and their number
 *            terms      shift, factor and offset of each map, from the moments of its group of maps
 *            normalise  out[i, f] = function((x[i, f] - shift[f]) * factor[f] + offset[f]); out may be x
 *            at_once    all three for an image whose voxels the threads of a block hold, BATCH voxels each
 *            means      out[f] = the mean of a map; from moments
 *            maxima     for each block and map: the maximum of the block's voxels; largest: of all blocks
 * Shapes     x (z, y, x, f) float or half, any steps between voxels; moments [2][maps][blocks] double, then [blocks] double;
 *            terms [3][maps] float; maxima [blocks][maps] float; out in C order.
 * Launch     moments, maxima  256 threads: `columns` threads side by side have WIDTH maps each, the others more voxels.
 *                             grid (blocks, slices of columns * WIDTH maps); shared_doubles
 *            at_once          512 threads, likewise; grid (slices of `slice` maps, whole groups)
 *            terms, means     grid (groups); a power of two of threads
 *            largest          grid (maps / 128)
 *            normalise, softmax  lines.cuh; as in point.cu. normalise begins where moments ended, in what L2 still holds
 * Bound      memory: x is read twice, with at_once once, out is written once. A thread has BATCH or AHEAD loads under way.
 * Exact      BATCH values give mean and squares in float32 in two rounds, float values as differences from the first of up
 *            to PART; batches are joined in float32 as such differences, parts, threads and blocks in double.
 *            A maximum does not round. NaN in, NaN out.
 * Source     Chan, Golub and LeVeque 1979 (joining parts)
 * Tested     tests/kernels/gpu/graph/test_norm.py
 */
#include "graph/voxelwise.cuh"

constexpr int THREADS = 256, MOST_THREADS = 512;  // of moments and maxima, of at_once, as in norm.py
constexpr int BATCH = 8;                          // voxels that a thread loads together, as in norm.py
constexpr int PART = 256;                         // values of a map that a thread sums in float32
constexpr int AHEAD = 4;                          // voxels that a thread of normalise loads together

/* Voxels in C order: every `step`-th from the first on. */
struct Walk {
    Triple n, by, at;

    DEVICE Walk(Triple n, long long first, long long step) : n(n), by(voxel_of(step, n)), at(voxel_of(first, n)) {}
    DEVICE void go() {
        at.x += by.x, at.y += by.y, at.z += by.z;
        if (at.x >= n.x) at.x -= n.x, ++at.y;
        if (at.y >= n.y) at.y -= n.y, ++at.z;
    }
};

/* Loads WIDTH maps from f on of the next `known` voxels, or of BATCH; zeros for the others. */
template <class T, int WIDTH>
DEVICE void load_batch(Maps<T, WIDTH> (&batch)[BATCH], const Input& x, int f, Walk& walk, int known) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        batch[b] = {};
        if (b < known) {
            batch[b] = *reinterpret_cast<const Maps<T, WIDTH>*>(voxel_at<T>(x, walk.at.z, walk.at.y, walk.at.x) + f);
            walk.go();
        }
    }
}

/* Calls visit(batch, known) for WIDTH maps from f on of the voxels of this thread. */
template <class T, int WIDTH, class F>
DEVICE void each_batch(const Input& x, Triple n, int columns, int f, F visit) {
    const int row = threadIdx.x / columns, rows = blockDim.x / columns;
    const long long first = blockIdx.x * (long long)rows + row, step = (long long)gridDim.x * rows;
    long long left = ((long long)n.z * n.y * n.x - first + step - 1) / step;
    Walk walk(n, first, step);
    Maps<T, WIDTH> batch[BATCH];
#pragma unroll 1
    for (; left >= BATCH; left -= BATCH) {
        load_batch<T, WIDTH>(batch, x, f, walk, BATCH);
        visit(batch, BATCH);
    }
    if (left <= 0) return;
    load_batch<T, WIDTH>(batch, x, f, walk, (int)left);
    visit(batch, (int)left);
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

/* The launch's shared memory; where moments are found, 2 * WIDTH + 3 doubles a thread: of its maps, its count, two sums. */
DEVICE double* shared_doubles() {
    EXTERN_SHARED(double, doubles);
    return doubles;
}

/* The moments of a thread: of a part in registers, of parts before it in shared memory. */
template <class T, int WIDTH> struct Part {
    static constexpr bool EXACT = sizeof(T) == 2;  // a batch of halves that are close to each other has an exact sum

    double* shared;  // [2 * WIDTH][threads], then counts
    float first[WIDTH], mean[WIDTH], squares[WIDTH];
    int seen;

    DEVICE explicit Part(double* shared) : shared(shared), seen(0) {
        shared[2 * WIDTH * blockDim.x + threadIdx.x] = 0.0;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) first[i] = mean[i] = squares[i] = 0.0f;
    }

    DEVICE void add(const Maps<T, WIDTH> (&batch)[BATCH], int known) {
        if (seen + known > PART) flush();
        const int before = seen;
        seen += known;
        const float share = known == BATCH ? 1.0f / BATCH : 1.0f / (float)known, part = (float)known / (float)seen;
        const float both = (float)before * part;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            if (before == 0) first[i] = to_float(batch[0].values[i]);
            float values[BATCH], sum = 0.0f, of_batch = 0.0f;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                values[b] = to_float(batch[b].values[i]) - (EXACT ? 0.0f : first[i]);
                if (b < known) sum += values[b];
            }
            const float middle = sum * share;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const float away = values[b] - middle;
                if (b < known) of_batch += away * away;
            }
            const float away = middle - (EXACT ? first[i] : 0.0f) - mean[i];
            mean[i] += away * part;
            squares[i] += of_batch + away * away * both;
        }
    }

    DEVICE void flush() {
        double& count = shared[2 * WIDTH * blockDim.x + threadIdx.x];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            double &to_mean = shared[i * blockDim.x + threadIdx.x],
                   &to_squares = shared[(WIDTH + i) * blockDim.x + threadIdx.x];
            const Moments all = joined(Moments{count, to_mean, to_squares},
                                       Moments{(double)seen, (double)first[i] + mean[i], squares[i]});
            to_mean = all.mean, to_squares = all.squares;
            mean[i] = squares[i] = 0.0f;
        }
        count += seen;
        seen = 0;
    }
};

/* Sums of parts: of counts, of means from a reference on, and of squares about it. Their differences are in double. */
struct Sums {
    double count = 0.0, sum = 0.0, squares = 0.0;

    DEVICE void add(double known, double away, double deviations) {
        count += known, sum += known * away, squares += deviations + known * away * away;
    }
    DEVICE void add(const Sums& more) { count += more.count, sum += more.sum, squares += more.squares; }
    /* Adds up those of so many neighbouring lanes, a power of two. */
    DEVICE void across(int lanes) {
        for (int mask = 1; mask < lanes; mask *= 2)
            add({shuffle_xor(count, mask), shuffle_xor(sum, mask), shuffle_xor(squares, mask)});
    }
    DEVICE Moments moments(double reference) const {
        const double away = count == 0.0 ? 0.0 : sum / count;
        return {count, reference + away, squares - sum * away};
    }
};

/* The moments of all voxels of a block, from those of its threads: of map threadIdx.x / parts, where a map has as many
 * parts as there are threads for each.
 */
template <int WIDTH> DEVICE Moments of_block(double* shared, int columns) {
    const int threads = blockDim.x, parts = threads / (columns * WIDTH);
    const int map = threadIdx.x / parts, part = threadIdx.x % parts;
    const double* const means = shared + map % WIDTH * threads + map / WIDTH;
    const double* const squares = means + WIDTH * threads;
    const double* const counts = shared + 2 * WIDTH * threads + map / WIDTH;
    sync_block();
    const double reference = counts[0] > 0.0 ? means[0] : 0.0;
    Sums all;
    for (int i = 0; i < WIDTH; ++i) {
        const int at = (part + i * parts) * columns;
        if (counts[at] > 0.0) all.add(counts[at], means[at] - reference, squares[at]);
    }
    all.across(min(parts, WARP));
    if (parts <= WARP) return all.moments(reference);
    Sums* const of_warps = reinterpret_cast<Sums*>(shared + (2 * WIDTH + 1) * threads);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = all;
    sync_block();
    all = {};
    for (int i = 0; i < parts / WARP; ++i) all.add(of_warps[map * (parts / WARP) + i]);
    return all.moments(reference);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 2)
    moments(const __grid_constant__ Input x, const __grid_constant__ Triple n, double* __restrict__ found,
            long long columns_) {
    double* const shared = shared_doubles();
    const int columns = (int)columns_, f = (blockIdx.y * columns + threadIdx.x % columns) * WIDTH;
    Part<T, WIDTH> all(shared);
    if (f < x.maps)
        each_batch<T, WIDTH>(x, n, columns, f,
                             [&](const Maps<T, WIDTH>(&batch)[BATCH], int known) { all.add(batch, known); });
    if (all.seen > 0) all.flush();
    const Moments these = of_block<WIDTH>(shared, columns);
    const int parts = blockDim.x / (columns * WIDTH), map = blockIdx.y * columns * WIDTH + threadIdx.x / parts;
    if (threadIdx.x % parts > 0 || map >= x.maps) return;
    double* const to = found + (long long)map * gridDim.x + blockIdx.x;
    to[0] = these.mean, to[(long long)x.maps * gridDim.x] = these.squares;
    if (map == 0) found[2LL * x.maps * gridDim.x + blockIdx.x] = these.count;
}

/* The moments of `each` maps from f0 on, from those of all blocks; `shared`: for each warp. */
DEVICE Moments of_group(const double* found, int blocks, int maps, int f0, int each, Sums* shared) {
    const double* const counts = found + 2LL * maps * blocks;
    const double *const means = found + (long long)f0 * blocks, *const deviations = means + (long long)maps * blocks;
    const double reference = means[0];
    Sums all;
    for (int i = threadIdx.x; i < blocks * each; i += blockDim.x)
        all.add(counts[i % blocks], means[i] - reference, deviations[i]);
    all.across(WARP);
    const int lane = threadIdx.x % WARP;
    if (lane == 0) shared[threadIdx.x / WARP] = all;
    sync_block();
    all = lane < blockDim.x / WARP ? shared[lane] : Sums{};
    all.across(WARP);
    return all.moments(reference);
}

/* Shift, factor and offset of a map from the moments of its group, `apart` values apart. */
DEVICE void write_terms(float* to, int apart, Moments all, float epsilon, const float* weight, const float* bias, int f) {
    const double scale = 1.0 / sqrt(all.squares / all.count + (double)epsilon);
    const float shift = (float)all.mean;
    const double factor = weight == nullptr ? scale : scale * weight[f];
    to[0] = shift;
    to[apart] = (float)factor;
    to[2 * apart] = (float)((bias == nullptr ? 0.0 : bias[f]) - (all.mean - shift) * factor);
}

extern "C" __global__ void terms(const double* __restrict__ found, long long blocks, long long maps, long long each,
                                 float epsilon, const float* __restrict__ weight, const float* __restrict__ bias,
                                 float* __restrict__ to) {
    Sums* const shared = reinterpret_cast<Sums*>(shared_doubles());  // [threads / WARP]
    const int f0 = blockIdx.x * (int)each;
    const Moments all = of_group(found, (int)blocks, (int)maps, f0, (int)each, shared);
    for (int f = f0 + threadIdx.x; f < f0 + each; f += blockDim.x)
        write_terms(to + f, (int)maps, all, epsilon, weight, bias, f);
}

/* `half_values`: whether out is of halves. */
extern "C" __global__ void means(const double* __restrict__ found, long long blocks, long long maps, void* out,
                                 long long half_values, float* peak) {
    Sums* const shared = reinterpret_cast<Sums*>(shared_doubles());  // [threads / WARP]
    const float mean = (float)of_group(found, (int)blocks, (int)maps, blockIdx.x, 1, shared).mean;
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

/* Shift, factor and offset of neighbouring maps. */
template <int WIDTH> struct Terms {
    float shift[WIDTH], factor[WIDTH], offset[WIDTH];

    DEVICE void read(const float* from, int apart) {
        load<float, WIDTH>(shift, from);
        load<float, WIDTH>(factor, from + apart);
        load<float, WIDTH>(offset, from + 2 * apart);
    }
    template <class T> DEVICE void apply(float (&to)[WIDTH], const Maps<T, WIDTH>& from, const Normal& p) const {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) to[i] = (to_float(from.values[i]) - shift[i]) * factor[i] + offset[i];
        apply_functions(to, p.function, p.a, p.b);
    }
};

template <class T, int WIDTH>
__global__ void __launch_bounds__(256, 4)
    normalise(const __grid_constant__ Input x, const __grid_constant__ Normal p, const float* __restrict__ from, T* out,
              float* peak) {
    const int vectors = p.maps / WIDTH;
    const Line line = Line::of_thread(p.n.x * vectors, p.n.y);
    const int i = line.e / vectors, f = line.e % vectors * WIDTH;
    float largest = 0.0f;
    if (line.exists) {
        Terms<WIDTH> terms;
        terms.read(from + f, p.maps);
#pragma unroll 1
        for (int first = p.n.z - 1 - (int)blockIdx.z; first >= 0; first -= AHEAD * (int)gridDim.z) {
            Maps<T, WIDTH> ahead[AHEAD];
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) {
                const int z = first - turn * (int)gridDim.z;
                if (z >= 0) ahead[turn] = *reinterpret_cast<const Maps<T, WIDTH>*>(voxel_at<T>(x, z, line.y, i) + f);
            }
#pragma unroll 1
            for (int z = first; z > first - AHEAD * (int)gridDim.z && z >= 0; z -= gridDim.z) {
                float values[WIDTH];
                terms.apply(values, ahead[0], p);
#pragma unroll
                for (int turn = 1; turn < AHEAD; ++turn) ahead[turn - 1] = ahead[turn];
                store<T, WIDTH>(out + (((long long)z * p.n.y + line.y) * p.n.x + i) * p.maps + f, values);
                largest = larger_of(largest, values);
            }
        }
    }
    raise_peak_by_warp(peak, largest);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    at_once(const __grid_constant__ Input x, const __grid_constant__ Normal p, T* __restrict__ out, float* peak,
            long long slice_, long long columns_, long long each_, float epsilon, const float* __restrict__ weight,
            const float* __restrict__ bias) {
    double* const shared = shared_doubles();
    const int slice = (int)slice_, columns = (int)columns_, each = (int)each_, column = threadIdx.x % columns;
    const int row = threadIdx.x / columns, rows = blockDim.x / columns, f = blockIdx.x * slice + column * WIDTH;
    const int voxels = p.n.z * p.n.y * p.n.x, known = column * WIDTH < slice ? (voxels - row + rows - 1) / rows : 0;
    Maps<T, WIDTH> batch[BATCH];
    Walk walk(p.n, row, rows);
    load_batch<T, WIDTH>(batch, x, f, walk, known);
    Part<T, WIDTH> all(shared);
    if (known > 0) {
        all.add(batch, known);
        all.flush();
    }
    const Moments of_map = of_block<WIDTH>(shared, columns);
    const int maps = columns * WIDTH, map = threadIdx.x, parts = blockDim.x / maps;
    float* const written = reinterpret_cast<float*>(shared + 2 * maps);  // [3][maps]
    sync_block();
    if (map % parts == 0) shared[map / parts] = of_map.mean, shared[maps + map / parts] = of_map.squares;
    sync_block();
    if (map < slice) {
        const double* const group = shared + map / each * each;
        double mean = 0.0, squares = 0.0;
        for (int i = 0; i < each; ++i) mean += group[i];
        mean /= each;
        for (int i = 0; i < each; ++i) {
            const double away = group[i] - mean;
            squares += group[maps + i] + voxels * away * away;
        }
        const Moments these = {(double)voxels * each, mean, squares};
        write_terms(written + map, maps, these, epsilon, weight, bias, blockIdx.x * slice + map);
    }
    sync_block();
    float largest = 0.0f;
    if (known > 0) {
        Terms<WIDTH> terms;
        terms.read(written + column * WIDTH, maps);
#pragma unroll 1
        for (int b = 0; b < known; ++b) {
            float values[WIDTH];
            terms.apply(values, batch[0], p);
#pragma unroll
            for (int turn = 1; turn < BATCH; ++turn) batch[turn - 1] = batch[turn];
            store<T, WIDTH>(out + (long long)(row + b * rows) * p.maps + f, values);
            largest = larger_of(largest, values);
        }
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
                Terms<WIDTH> of_maps;
                of_maps.read(terms + f, p.maps);
                of_maps.apply(values, *reinterpret_cast<const Maps<T, WIDTH>*>(voxel_at<T>(x, z, line.y, i) + f), p);
            });
    raise_peak_by_warp(peak, largest);
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 4)
    maxima(const __grid_constant__ Input x, const __grid_constant__ Triple n, float* __restrict__ found,
           long long columns_) {
    SHARED(float, shared, [THREADS]);
    const int columns = (int)columns_;
    const int f = (blockIdx.y * columns + threadIdx.x % columns) * WIDTH;
    float most[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) most[i] = -INFINITY;
    if (f < x.maps)
        each_batch<T, WIDTH>(x, n, columns, f, [&](const Maps<T, WIDTH>(&batch)[BATCH], int known) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
                    if (b < known) most[i] = maximum(most[i], to_float(batch[b].values[i]));
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
