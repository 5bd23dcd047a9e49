/* cuConv: products of rows of filters with rows of the input, then the sums of these partial results.
 *
 * Computes   products  parts[p, i, g] = sum over the taps d of part p, and over f, of x[s, i + d, f] * kernels[d, f, g]
 *                      if one part has all taps, out[s, i, g] = activation(bias[g] + that sum): a single stage
 *            sum_parts out[s, i, g] = activation(bias[g] + sum over p of parts[p, i, g])
 * Shapes     x (S, n, f), out (S, n - k + 1, f') float or half, images in C order, any number of values apart; kernels
 *            (kz * ky * kx, padded f, padded f') float, padded with zeros to whole fours, for TENSOR rounded to tf32;
 *            bias (padded f') float; parts (parts, voxels of a launch, padded f') float. A row: the f values of one
 *            voxel, or of one tap.
 * Launch     products  A block of 128 threads: SIDE voxels, counted through all images, and SIDE maps, of one part.
 *            Rows are copied to shared memory DEPTH values at a time, with STAGES - 1 copies in flight, in their order
 *            in memory: neighbouring lanes read neighbours, and nothing is transformed beforehand. Small blocks, of
 *            which a small layer has more, have few sums for their threads: slices of the threads take a share of the
 *            DEPTH values each, and their sums are added at the end.
 *                      grid (blocks of maps, fastest, times blocks of voxels; parts).
 *                      LONG: sums are of TOGETHER values at a time, as rounding grows with the length of a sum.
 *            sum_parts A thread: four maps of one voxel, four parts in flight.
 * Bound      products  SIDE = 64: arithmetic, 256 products a lane for 16 reads of shared memory; SIDE = 16: L2, 1 / 8
 *            of a value a product, for layers so small that latency dominates.
 *            sum_parts memory, or L2 if it holds the parts: they are read once.
 * Source     Jorda, Valero-Lara, Pena: cuConv, 2021, 3, with channels last; several taps in one block: ibid., 6; matrix
 *            fragments: PTX ISA, mma.m16n8k8.
 * Tested     tests/kernels/gpu/cuconv/test_primitive.py
 */
#include "activation.cuh"

constexpr int THREADS = 128, STAGES = 4;  // as in partition.py
constexpr int TOGETHER = 1500;            // values added in sequence, if a sum has many more: 7e-7

/* The division of a block: on float32 units a lane sums ROWS voxels, ACROSS apart, by COLUMNS times 4 maps, 4 ALONG
 * apart; TENSOR: a warp sums ROWS fragments of 16 voxels by COLUMNS of 8 maps.
 */
template <int SIDE, bool TENSOR> struct Block {
    static constexpr int DEPTH = 1024 / SIDE;      // values of a row at a time, as in partition.py
    static constexpr int KERNEL_PITCH = SIDE + 8;  // floats between rows of maps: no bank conflicts in a warp
    static constexpr int SUM_PITCH = SIDE + 4;
    static constexpr int ROWS = TENSOR ? (SIDE == 64 ? 2 : 1) : (SIDE == 64 ? 8 : 4);
    static constexpr int COLUMNS = TENSOR ? (SIDE == 16 ? 2 : 4) : (SIDE == 64 ? 2 : 1);
    static constexpr int ACROSS = SIDE / (TENSOR ? 16 * ROWS : ROWS);  // warps, or lanes, for all voxels
    static constexpr int ALONG = SIDE / ((TENSOR ? 8 : 4) * COLUMNS);  // warps, or lanes, for all maps
    static constexpr int UNITS = THREADS / (TENSOR ? WARP : 1);        // warps, or lanes, of the block
    static constexpr int SLICES = UNITS / (ACROSS * ALONG);
    static constexpr int SHARE = DEPTH / SLICES;  // values of a slice, of the DEPTH values
    static constexpr int RESIDENT = SIDE == 64 && !TENSOR ? 3 : 4;  // blocks that the registers suffice for, on any GPU
};

/* The sums of one lane. */
template <int SIDE, bool TENSOR> using Sums = float[Block<SIDE, TENSOR>::ROWS][Block<SIDE, TENSOR>::COLUMNS][4];

/* Values from one voxel's row to the next in shared memory: 16 bytes of padding, for the banks. */
template <class T, int SIDE> constexpr int INPUT_PITCH = 1024 / SIDE + 16 / (int)sizeof(T);

/* The position of a warp or a lane in its block. */
struct Place {
    int across, along, slice;
};
template <int SIDE, bool TENSOR> DEVICE Place place() {
    using B = Block<SIDE, TENSOR>;
    const int unit = TENSOR ? threadIdx.x / WARP : threadIdx.x, inner = unit % (B::ACROSS * B::ALONG);
    return {inner / B::ALONG, inner % B::ALONG, unit / (B::ACROSS * B::ALONG)};
}

struct Sizes {
    long long ny, nx, fin;
    int ky, kx;
};

/* The position of a thread in the rows of a part: the value it copies next, for every voxel. */
struct Column {
    int f, tap, dx, dy;
    long long offset;  // offset of the tap's row from that of the window's first tap
};
DEVICE void advance(Column& c, int by, int padded, const Sizes& n) {
    for (c.f += by; c.f >= padded; c.f -= padded) {
        ++c.tap, ++c.dx, c.offset += n.fin;
        if (c.dx < n.kx) continue;
        c.dx = 0, ++c.dy, c.offset += (n.nx - n.kx) * n.fin;
        if (c.dy < n.ky) continue;
        c.dy = 0, c.offset += (n.ny - n.ky) * n.nx * n.fin;
    }
}

template <int WIDE, class T> DEVICE void copy_values(T* to, const T* from, bool valid) {
    if constexpr (WIDE * sizeof(T) >= 4)
        cp_async<WIDE * sizeof(T)>(to, from, valid);
    else
        *to = valid ? *from : to_half(0.0f);  // 2 bytes cannot be copied asynchronously
}

/* Copies DEPTH values of the rows of all voxels, WIDE neighbours at once. */
template <int SIDE, int WIDE, class T>
DEVICE void copy_inputs(T* to, const T* const* windows, int known, const Column& c, int end, long long fin) {
    constexpr int LANES = 1024 / SIDE / WIDE;
    const bool there = c.tap < end && c.f < fin;
    const long long at = there ? c.offset + c.f : 0;
#pragma unroll
    for (int i = 0; i < SIDE * LANES / THREADS; ++i) {
        const int v = threadIdx.x / LANES + i * (THREADS / LANES);
        T* const row = to + v * INPUT_PITCH<T, SIDE>;
        copy_values<WIDE>(row + threadIdx.x % LANES * WIDE, windows[v] + at, there && v < known);
    }
}

/* Copies DEPTH rows of SIDE maps, as far as there are `rows` and `maps`. */
template <int SIDE>
DEVICE void copy_kernels(float* to, const float* from, long long rows, long long maps, long long pitch) {
    constexpr int LANES = SIDE / 4;
    const int map = threadIdx.x % LANES * 4;
#pragma unroll
    for (int i = 0; i < 1024 / SIDE * LANES / THREADS; ++i) {
        const int row = threadIdx.x / LANES + i * (THREADS / LANES);
        const bool valid = row < rows && map < maps;
        cp_async<16>(to + row * Block<SIDE, false>::KERNEL_PITCH + map, valid ? from + row * pitch + map : from, valid);
    }
}

DEVICE float4 four(const float* from) { return *reinterpret_cast<const float4*>(from); }

/* Multiplies this lane's share of DEPTH values, on float32 units, 4 values of a row at a time. */
template <int SIDE>
DEVICE void multiply(Sums<SIDE, false>& sums, const float* in, const float* kernels) {
    using B = Block<SIDE, false>;
    const auto mine = place<SIDE, false>();
    const float* row = in + mine.across * INPUT_PITCH<float, SIDE> + mine.slice * B::SHARE;
    const float* column = kernels + mine.slice * B::SHARE * B::KERNEL_PITCH + mine.along * 4;
#pragma unroll
    for (int k = 0; k < B::SHARE; k += 4) {
        float a[B::ROWS][4];
#pragma unroll
        for (int v = 0; v < B::ROWS; ++v) {
            const float4 values = four(row + v * B::ACROSS * INPUT_PITCH<float, SIDE> + k);
            a[v][0] = values.x, a[v][1] = values.y, a[v][2] = values.z, a[v][3] = values.w;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < B::COLUMNS; ++c) {
                const float4 w = four(column + (k + j) * B::KERNEL_PITCH + c * B::ALONG * 4);
#pragma unroll
                for (int v = 0; v < B::ROWS; ++v) {
                    sums[v][c][0] += a[v][j] * w.x;
                    sums[v][c][1] += a[v][j] * w.y;
                    sums[v][c][2] += a[v][j] * w.z;
                    sums[v][c][3] += a[v][j] * w.w;
                }
            }
    }
}

/* Multiplies this warp's share in matrix products of 16 voxels, 8 values and 8 maps. */
template <int SIDE, class T>
DEVICE void multiply(Sums<SIDE, true>& sums, const T* in, const float* kernels) {
    using B = Block<SIDE, true>;
    constexpr int PITCH = INPUT_PITCH<T, SIDE>;
    const auto mine = place<SIDE, true>();
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const T* row = in + (mine.across * B::ROWS * 16 + g) * PITCH + mine.slice * B::SHARE + t;
    const float* column = kernels + (mine.slice * B::SHARE + t) * B::KERNEL_PITCH + mine.along * B::COLUMNS * 8 + g;
#pragma unroll
    for (int k = 0; k < B::SHARE; k += 8) {
        unsigned b[B::COLUMNS][2];
#pragma unroll
        for (int c = 0; c < B::COLUMNS; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i) b[c][i] = bits_of(column[(k + 4 * i) * B::KERNEL_PITCH + 8 * c]);
#pragma unroll
        for (int r = 0; r < B::ROWS; ++r) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = to_tf32(to_float(row[(16 * r + i % 2 * 8) * PITCH + k + i / 2 * 4]));
#pragma unroll
            for (int c = 0; c < B::COLUMNS; ++c) mma_tf32(sums[r][c], a, b[c]);
        }
    }
}

/* Writes this thread's sums to [slice][voxel][map]. */
template <int SIDE, bool TENSOR>
DEVICE void put_sums(float* to, const Sums<SIDE, TENSOR>& sums) {
    using B = Block<SIDE, TENSOR>;
    const auto mine = place<SIDE, TENSOR>();
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    to += mine.slice * SIDE * B::SUM_PITCH;
#pragma unroll
    for (int r = 0; r < B::ROWS; ++r)
#pragma unroll
        for (int c = 0; c < B::COLUMNS; ++c) {
            const float(&sum)[4] = sums[r][c];
            if constexpr (TENSOR) {
                float* const at = to + ((mine.across * B::ROWS + r) * 16 + g) * B::SUM_PITCH +
                                  (mine.along * B::COLUMNS + c) * 8 + 2 * t;
                *reinterpret_cast<float2*>(at) = make_float2(sum[0], sum[1]);
                *reinterpret_cast<float2*>(at + 8 * B::SUM_PITCH) = make_float2(sum[2], sum[3]);
            } else {
                float* const at = to + (mine.across + r * B::ACROSS) * B::SUM_PITCH + (mine.along + c * B::ALONG) * 4;
                *reinterpret_cast<float4*>(at) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        }
}

/* LONG sums restart after every TOGETHER values of a thread's rows. The previous sums are in local memory, as they are
 * not needed for many steps.
 */
template <int SIDE, bool TENSOR, bool LONG> struct Before {
    DEVICE void after_step(Sums<SIDE, TENSOR>&) {}
    DEVICE void join(Sums<SIDE, TENSOR>&) const {}
};
template <int SIDE, bool TENSOR> struct Before<SIDE, TENSOR, true> {
    using B = Block<SIDE, TENSOR>;
    volatile float before[B::ROWS][B::COLUMNS][4] = {};
    int left = TOGETHER / B::SHARE;  // steps
    DEVICE void join(Sums<SIDE, TENSOR>& sums) const {
#pragma unroll
        for (int r = 0; r < B::ROWS; ++r)
#pragma unroll
            for (int c = 0; c < B::COLUMNS; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[r][c][i] += before[r][c][i];
    }
    DEVICE void after_step(Sums<SIDE, TENSOR>& sums) {
        if (--left > 0) return;
        left = TOGETHER / B::SHARE;
        join(sums);
#pragma unroll
        for (int r = 0; r < B::ROWS; ++r)
#pragma unroll
            for (int c = 0; c < B::COLUMNS; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) before[r][c][i] = sums[r][c][i], sums[r][c][i] = 0.0f;
    }
};

DEVICE void add(float4& sum, float4 more) { sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w; }

/* Writes four neighbouring maps, of which `known` exist; returns the largest magnitude so far. */
template <class T>
DEVICE float finish(T* to, float4 sum, const float* bias, long long known, int activation, bool vectors,
                    float largest) {
    const float4 start = load_activation4(bias);
    float value[4] = {sum.x + start.x, sum.y + start.y, sum.z + start.z, sum.w + start.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        value[j] = activate(value[j], activation);
        if (j >= known) continue;
        largest = larger_magnitude(largest, value[j]);
        if (!vectors) store_activation(to + j, value[j]);
    }
    if (vectors) store_activation4(to, make_float4(value[0], value[1], value[2], value[3]));
    return largest;
}

/* The destination of sums: the kernel's arguments for it. */
template <class T> struct Result {
    T* out;
    long long out_image;
    float* parts;
    const float* bias;
    long long first, count, voxels, maps;
    int activation;
    bool vectors;
};

/* Writes the sums of a block's slices from shared memory, for `known` voxels from `base` on and maps from g0 on.
 * Returns the largest magnitude of final results.
 */
template <int SIDE, bool TENSOR, class T>
DEVICE float write_sums(const Result<T>& to, const float* staged, long long base, int known, long long g0) {
    using B = Block<SIDE, TENSOR>;
    const long long padded = (to.maps + 3) / 4 * 4;
    float largest = 0.0f;
    for (int i = threadIdx.x; i < SIDE * SIDE / 4; i += THREADS) {
        const int v = i / (SIDE / 4), j = i % (SIDE / 4) * 4;
        const long long g = g0 + j, voxel = to.first + base + v;
        if (v >= known || g >= to.maps) continue;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int slice = 0; slice < B::SLICES; ++slice) add(sum, four(staged + (slice * SIDE + v) * B::SUM_PITCH + j));
        if (to.parts != nullptr) {
            *reinterpret_cast<float4*>(to.parts + (blockIdx.y * to.count + base + v) * padded + g) = sum;
            continue;
        }
        T* const there = to.out + voxel / to.voxels * to.out_image + voxel % to.voxels * to.maps + g;
        largest = finish(there, sum, to.bias + g, to.maps - g, to.activation, to.vectors, largest);
    }
    return largest;
}

/* `parts` null: one part has all taps. `first`, `count`: the voxels of this launch. VECTORS: inputs are copied four at
 * a time, `vectors`: outputs are written so: numbers of maps and all addresses allow it.
 */
template <class T, int SIDE, bool TENSOR, bool VECTORS, bool LONG>
__global__ void __launch_bounds__(THREADS, Block<SIDE, TENSOR>::RESIDENT)
    products(const T* x, long long x_image, T* out, long long out_image, float* parts, const float* kernels,
             const float* bias, long long first, long long count, long long ny, long long nx, long long fin,
             long long my, long long mx, long long voxels, long long all_taps, long long taps, long long ky,
             long long kx, long long maps, long long activation, long long vectors, float* peak) {
    using B = Block<SIDE, TENSOR>;
    constexpr int WIDE = VECTORS ? 4 : 1, INPUTS = SIDE * INPUT_PITCH<T, SIDE> * (int)sizeof(T) / 4;
    constexpr int STAGE = INPUTS + B::DEPTH * B::KERNEL_PITCH;
    static_assert(B::SLICES * SIDE * B::SUM_PITCH <= STAGES * STAGE, "sums go where rows were");
    SHARED(const T*, windows, [SIDE]);
    SHARED(float, staged, [STAGES * STAGE]);
    const Sizes n = {ny, nx, fin, (int)ky, (int)kx};
    const long long padded_in = (fin + 3) / 4 * 4, padded = (maps + 3) / 4 * 4, map_blocks = (maps + SIDE - 1) / SIDE;
    const long long g0 = blockIdx.x % map_blocks * SIDE, base = blockIdx.x / map_blocks * SIDE;
    const int begin = blockIdx.y * (int)taps, end = min(begin + taps, all_taps);
    const int known = min((long long)SIDE, count - base);
    for (int v = threadIdx.x; v < SIDE; v += THREADS) {
        const long long s = (first + base + v) / voxels, i = (first + base + v) % voxels;
        windows[v] = x;
        if (v < known) windows[v] += s * x_image + ((i / (my * mx) * ny + i / mx % my) * nx + i % mx) * fin;
    }
    Column column = {0, begin, begin % n.kx, begin / n.kx % n.ky, 0};
    column.offset = ((begin / (n.ky * n.kx) * ny + column.dy) * nx + column.dx) * fin;
    advance(column, threadIdx.x % (B::DEPTH / WIDE) * WIDE, padded_in, n);
    sync_block();

    const long long rows = (end - begin) * padded_in, steps = (rows + B::DEPTH - 1) / B::DEPTH;
    const auto stage = [&](long long step) {
        if (step < steps) {
            float* const to = staged + step % STAGES * STAGE;
            const long long row = step * B::DEPTH;
            copy_inputs<SIDE, WIDE>(reinterpret_cast<T*>(to), windows, known, column, end, fin);
            const float* const from = kernels + (begin * padded_in + row) * padded + g0;
            copy_kernels<SIDE>(to + INPUTS, from, rows - row, padded - g0, padded);
            advance(column, B::DEPTH, padded_in, n);
        }
        cp_async_commit();
    };
    for (int step = 0; step < STAGES - 1; ++step) stage(step);
    Sums<SIDE, TENSOR> sums = {};
    Before<SIDE, TENSOR, LONG> before;
#pragma unroll 1
    for (long long step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        sync_block();
        stage(step + STAGES - 1);
        const float* const from = staged + step % STAGES * STAGE;
        if constexpr (TENSOR)
            multiply<SIDE>(sums, reinterpret_cast<const T*>(from), from + INPUTS);
        else
            multiply<SIDE>(sums, from, from + INPUTS);
        before.after_step(sums);
    }
    before.join(sums);
    sync_block();
    put_sums<SIDE, TENSOR>(staged, sums);
    sync_block();

    const Result<T> to = {out, out_image, parts, bias, first, count, voxels, maps, (int)activation, vectors != 0};
    const float largest = write_sums<SIDE, TENSOR>(to, staged, base, known, g0);
    raise_peak_by_warp(peak, largest);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    sum_parts(const float* parts, long long all_parts, T* out, long long out_image, const float* bias, long long first,
         long long count, long long voxels, long long maps, long long activation, long long vectors, float* peak) {
    const long long fours = (maps + 3) / 4, place = global_thread(), part = count * fours * 4;
    float largest = 0.0f;
    if (place < count * fours) {
        const float* from = parts + place * 4;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (long long p = 0; p < all_parts;) {
            float4 few = load_activation4(from + p * part);
            const long long end = min(p + TOGETHER, all_parts);
#pragma unroll 4
            for (++p; p < end; ++p) add(few, load_activation4(from + p * part));
            add(sum, few);
        }
        const long long voxel = first + place / fours, g = place % fours * 4;
        largest = finish(out + voxel / voxels * out_image + voxel % voxels * maps + g, sum, bias + g, maps - g,
                         (int)activation, vectors != 0, largest);
    }
    raise_peak_by_warp(peak, largest);
}
