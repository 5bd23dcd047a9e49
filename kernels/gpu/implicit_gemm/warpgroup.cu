/* Convolution as a product of the lowered matrix with the kernels, both read by the tensor cores of sm_90a from shared
 * memory; padding.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, i - padding + d, f] * kernels[g, f, d])
 * Shapes     x (S, n, f), out (S, m, f') float or half, images in C order, any number of values apart. kernels [slice
 *            of maps][stage][tap][word][2][N][8] half times a power of two, zero-padded in maps; bias (slices * N)
 *            float.
 * Method     A block computes a tile: 64 voxels of out per matrix, 8 rows of 8 along x, times N maps. The tile's input
 *            for a stage's maps, its region, is stored in shared memory in pieces of 8 maps of a voxel, voxel after
 *            voxel: any 8 consecutive voxels are a core of a factor (wgmma.cuh), so a tap is an offset and the lowered
 *            matrix is never built. A stage is some chunks of 16 maps and all dz, or one; its taps (chunk, dz, dy, dx)
 *            are processed in groups. While one is multiplied, the next group's kernels and pieces of the next stage's
 *            region are loaded (region.cuh), also for the next tile. A block takes every gridDim.x-th tile. Results go
 *            through shared memory, one row of 8 voxels after the other, from where the hardware copies them while the
 *            next tile starts.
 * Folded     few maps in: a piece is a map's 8 voxels from x on, two lines are the 16 values of a chunk, a stage has
 *            one map. Kernels are zero-padded in ky and kx: a NaN in the input at these zeros reaches the sums.
 * Words      1: values as one float16, summed by tensor cores, which truncate: thousands of products of one sign may
 *            lose 1e-3. 2: as two, h + l, and l H + h L + h H omits less than 2^-21 of a product; no more than a group
 *            of taps is summed there, and few groups in sequence (partial_sums.cuh). float values are scaled by a power of two
 *            so that the largest one, *x_peak, stays below 2^14.
 * Bound      tensor cores: 64 N 16 products take N / 2 of their cycles, and 16 + N / 4 of shared memory's.
 * Source     Chetlur et al., cuDNN, 2014, 3; the region in place of the lowered matrix is ours.
 * Tested     tests/kernels/gpu/implicit_gemm/test_primitive.py, test_warpgroup.py
 */
#include "activation.cuh"
#include "partial_sums.cuh"
#include "region.cuh"

constexpr int MOST_TERMS = 32;  // groups of taps added before their sums are flushed

/* A function call, since inlined code for every sum would take registers from all of them. */
CALLED float smooth(float value, int activation) {
    return activation == TANH ? activate<TANH>(value) : activate<SIGMOID>(value);
}

/* The epilogue of a sum: scale, bias, and values below `floor` raised to it. */
struct End {
    const float* bias;  // bias of the block's first map
    float before, back, floor;
    int activation, maps;  // existing maps of the block
};

template <class T, int WORDS, int N, bool FOLDED> struct Product : Region<T, WORDS, N, FOLDED> {
    using Base = Region<T, WORDS, N, FOLDED>;
    using Base::bring, Base::bring_taps, Base::copy, Base::firsts, Base::loops, Base::n, Base::offsets, Base::planes_in;
    using Base::put, Base::region, Base::stage_of, Base::TAP, Base::taps;
    static constexpr int MATRICES = WORDS == 1 && N <= 80 ? 2 : 1;  // matrices of a warpgroup, as in warpgroup.py
    static constexpr int SUMS = N / 2;
    static constexpr int ROWS = 2 * MATRICES;  // rows of 8 voxels of a warp
    static constexpr int PITCH = N + (N * sizeof(T) % 128 ? 0 : 16 / (int)sizeof(T));  // from voxel to voxel, staged

    DEVICE T* staged() const {  // staging memory of this warp
        return Base::template at<T>(n.results) + threadIdx.x / WARP * n.staged * 8 * PITCH;
    }

    /* Loads the first region and the first kernels. */
    DEVICE void begin(const half* kernels, Tile& tile) const {
        const int last = n.pieces * n.rows;
        if (loops.straight) copy(threadIdx.x, last, 0, {0, 0}, tile);
        for (int index = threadIdx.x; !loops.straight && index < last; index += AT_ONCE * THREADS) {
            Piece<T, FOLDED> some[AT_ONCE];
            bring(some, index, last, {0, 0}, tile);
            put(some, index, last, 0);
        }
        bring_taps(0, kernels, min(loops.group, loops.taps));
        cp_async_commit();
    }

    DEVICE void multiply(float (&sums)[MATRICES][SUMS], const unsigned long long (&rows)[MATRICES], const half* kernels,
                         int stage, int first, int count) const {
        const unsigned long long factor = wgmma_factor(kernels, N, PIECE);
        const int low = n.pieces * n.rows, begin = (stage & 1) * WORDS * low;
        sync_warp();
        wgmma_begin(sums);
        if (WORDS == 2) {  // the small terms first: less is truncated
            unsigned long long at = factor;
#pragma unroll 1
            for (int tap = first; tap < first + count; ++tap, at += TAP / PIECE) {
                const int offset = begin + offsets()[tap];
#pragma unroll
                for (int i = 0; i < MATRICES; ++i) {
                    wgmma_half<N>(sums[i], rows[i] + offset + low, at, tap > first);
                    wgmma_half<N>(sums[i], rows[i] + offset, at + 2 * N, true);
                }
            }
        }
        unsigned long long at = factor;
#pragma unroll 1
        for (int tap = first; tap < first + count; ++tap, at += TAP / PIECE) {
            const int offset = begin + offsets()[tap];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) wgmma_half<N>(sums[i], rows[i] + offset, at, true);
        }
        wgmma_end();
    }

    /* Computes the sums of a tile, whose first region and kernels are loaded or in flight. `stage` and `round` continue
     * from tile to tile; `next`: the next tile, if `follows`; `meanwhile` is called once, while the first products run.
     */
    template <class Meanwhile>
    DEVICE void run(float (&sums)[MATRICES][SUMS], const half* kernels, int& stage, int& round, Tile& tile, Tile& next,
                    bool follows, const Meanwhile& meanwhile) const {
        unsigned long long rows[MATRICES];
        const int along_rows = (n.row_z * n.lines + n.row_y) * n.columns + n.row_x;
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            const int3 at = firsts()[shuffle((int)threadIdx.x / WARPGROUP, 0) * MATRICES + i];
            rows[i] = wgmma_factor(region(0) + ((at.x * n.lines + at.y) * n.columns + at.z) * PIECE,
                                   FOLDED ? n.columns : n.rows, along_rows);
        }
        const int last = n.pieces * n.rows;
        const int share = (last + loops.groups - 1) / loops.groups;  // part of the region per group of taps
        const half* coming = kernels;
        float parts[MATRICES][SUMS];
        PartialSums<MATRICES * SUMS> partial;
        int terms = 0;  // terms of every sum so far
#pragma unroll 1
        for (int done = 0; done < loops.stages; ++done, ++stage) {
            const bool ends = done + 1 == loops.stages, more = !ends || follows;
            Tile& behind = ends ? next : tile;
            const Stage following = stage_of(ends ? 0 : done + 1);
#pragma unroll 1
            for (int first = 0, begin = 0; first < loops.taps; first += loops.group, begin += share, ++round) {
                const int count = min(loops.group, loops.taps - first), left = loops.taps - first - count;
                cp_async_wait<0>();
                wgmma_publish();
                sync_block();
                coming = left == 0 && ends ? kernels : coming + count * TAP;
                if (left > 0 || more) {
                    const int wanted = min(loops.group, left > 0 ? left : loops.taps);
                    bring_taps(round + 1, coming, wanted);
                }
                const int end = more ? min(begin + share, last) : 0;
                Piece<T, FOLDED> some[AT_ONCE];
                int index = begin + threadIdx.x;
                if (loops.straight)
                    copy(index, end, stage + 1, following, behind);
                else
                    bring(some, index, end, following, behind);
                cp_async_commit();
                arrival_wait(n.arrivals + (round & 1), round / 2 & 1);
                multiply(WORDS == 2 ? parts : sums, rows, taps(round), stage, first, count);
                if (!loops.straight) {
#pragma unroll 1
                    while (true) {
                        put(some, index, end, stage + 1);
                        index += AT_ONCE * THREADS;
                        if (index >= end) break;
                        bring(some, index, end, following, behind);
                    }
                }
                if (done == 0 && first == 0) meanwhile();
                finish(sums, parts);
                if (WORDS == 2 && ++terms % MOST_TERMS == 0) partial.flush(sums[0], terms == MOST_TERMS);
            }
        }
        if (terms >= MOST_TERMS) partial.add_to(sums[0]);
    }

    /* Waits for the products of a group of taps. */
    DEVICE void finish(float (&sums)[MATRICES][SUMS], float (&parts)[MATRICES][SUMS]) const {
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            if (WORDS == 1) {
                wgmma_wait(sums[i]);
                continue;
            }
            wgmma_wait(parts[i]);
#pragma unroll
            for (int e = 0; e < SUMS; ++e) sums[i][e] += parts[i][e];
        }
    }

    /* Applies the epilogue to sums and writes them; returns the largest magnitude. `from`: this block's first map.
     * `bulk`: the hardware may copy them.
     */
    DEVICE float store(float (&sums)[MATRICES][SUMS], Tile& tile, const End& end, int from, bool bulk) const {
        const int lane = threadIdx.x % WARP;
        const bool linear = end.activation != TANH && end.activation != SIGMOID;
        const float* const bias = end.bias + lane % 4 * 2;
        int voxels;
        T* const to = target(lane % ROWS, tile, voxels) + from;
        if (end.before != 1.0f) scale_by(sums, end.before);
        if (end.maps < N) clear(sums, end.maps);
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int slot = i & (n.staged - 1);
            if (slot == 0) bulk_wait(), sync_warp();
            T* const mine = staged() + (slot * 8 + lane / 4) * PITCH + lane % 4 * 2;
            const float most = linear ? stage<true>(sums[i / 2], i % 2, mine, bias, end)
                                      : stage<false>(sums[i / 2], i % 2, mine, bias, end);
            if (lane / 4 < shuffle(voxels, i)) largest = larger_magnitude(largest, most);
            if (slot != n.staged - 1) continue;
            wgmma_publish();
            sync_warp();
            write(to, voxels, i - slot, end.maps, bulk);
        }
        return largest;
    }

    /* The place of a row of this warp, and the number of its voxels that exist. */
    DEVICE T* target(int row, Tile& tile, int& voxels) const {
        const int warp = threadIdx.x / WARP, at = warp % 4 * 2 + row % 2;
        const int3 first = firsts()[warp / 4 * MATRICES + row / 2];
        const int y = tile.y + first.y + at * n.row_y, x = tile.x + first.z + at * n.row_x;
        T* const plane = tile.planes<T>()[planes_in() + first.x + at * n.row_z];
        voxels = plane != nullptr && y < n.my ? min(n.mx - x, 8) : 0;
        return plane + (voxels > 0 ? ((long long)y * n.mx + x) * n.fout : 0);
    }

    DEVICE void scale_by(float (&sums)[MATRICES][SUMS], float factor) const {
#pragma unroll
        for (int i = 0; i < MATRICES * SUMS; ++i) sums[i / SUMS][i % SUMS] *= factor;
    }

    /* Clears the sums of padding maps: if the input is NaN, they are too. */
    DEVICE void clear(float (&sums)[MATRICES][SUMS], int maps) const {
#pragma unroll
        for (int i = 0; i < MATRICES * SUMS; ++i)
            if (i % SUMS / 4 * 8 + (int)threadIdx.x % 4 * 2 + i % 2 >= maps) sums[i / SUMS][i % SUMS] = 0.0f;
    }

    /* Stages two maps of every 8 of a voxel. The kind of activation is tested once: tests for every value would exceed
     * the instruction cache.
     */
    template <bool LINEAR>
    DEVICE float stage(const float (&sums)[SUMS], int half, T* to, const float* bias, const End& end) const {
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 added = load_activation2(bias + 8 * j);
            float a = fmaf(end.back, sums[4 * j + 2 * half], added.x);
            float b = fmaf(end.back, sums[4 * j + 2 * half + 1], added.y);
            if (LINEAR) {
                a = maximum(a, end.floor), b = maximum(b, end.floor);
            } else {
                const int map = 8 * j + threadIdx.x % 4 * 2;
                a = map < end.maps ? smooth(a, end.activation) : 0.0f;
                b = map + 1 < end.maps ? smooth(b, end.activation) : 0.0f;
            }
            largest = larger_magnitude(larger_magnitude(largest, a), b);
            store_activation2(to + 8 * j, make_float2(a, b));
        }
        return largest;
    }

    /* Writes all staged rows, the first of them `row`, to the addresses of lane `row` and the following. */
    DEVICE void write(T* to, int voxels, int row, int maps, bool bulk) const {
        const int lane = threadIdx.x % WARP;
        if (PITCH == N && bulk && n.fout == N) {  // voxel after voxel, without gaps
            if (lane >= row && lane < row + n.staged && voxels > 0)
                bulk_store(to, staged() + (lane - row) * 8 * PITCH, voxels * PITCH * (int)sizeof(T));
            bulk_commit();
            return;
        }
#pragma unroll 1
        for (int slot = 0; slot < n.staged; ++slot) {
            const int count = shuffle(voxels, row + slot);
            const T* const from = staged() + slot * 8 * PITCH;
            T* const there = reinterpret_cast<T*>(shuffle(reinterpret_cast<long long>(to), row + slot));
            if (bulk && lane < count)
                bulk_store(there + (long long)lane * n.fout, from + lane * PITCH, maps * (int)sizeof(T));
#pragma unroll 1
            for (int voxel = 0; voxel < count && !bulk; ++voxel)
#pragma unroll 1
                for (int map = lane; map < maps; map += WARP)
                    there[(long long)voxel * n.fout + map] = from[voxel * PITCH + map];
        }
        bulk_commit();
    }
};

template <class T, int WORDS, int N, bool FOLDED>
__global__ void __launch_bounds__(THREADS, 2)
    gemm_by_warpgroups(const T* before, long long before_image, const T* x, long long x_image, T* out,
                       long long out_image, const half* kernels, const float* bias, float unscale, const float* x_peak,
                       float* out_peak, long long images, long long carried, long long nz, long long ny, long long nx,
                       long long fin, long long mz, long long my, long long mx, long long fout, long long kz,
                       long long ky, long long kx, long long pz, long long py, long long px, long long tz, long long ty,
                       long long tx, long long tiles_z, long long tiles_y, long long tiles_x, long long row_z,
                       long long row_y, long long row_x, long long step_y, long long step_x, long long depth,
                       long long pieces, long long chunks, long long stages, long long group, long long wide_x,
                       long long flat, long long tiles, long long wide, long long staged_rows, long long bulk,
                       long long activation) {
    using Tiles = Product<T, WORDS, N, FOLDED>;
    EXTERN_SHARED(Sizes, shared);  // then tiles, origins of rows, offsets of taps, rows, regions, kernels, results
    Sizes& n = *shared;
    const int deep = (int)(depth == kz ? 1 : kz), taps = (int)(chunks * depth * ky * kx);
    if (threadIdx.x == 0) {
        const int lines = (int)(ty + (ky - 1) * step_y + (FOLDED ? 1 : 0)), columns = (int)(tx + (kx - 1) * step_x);
        const int rows = (int)(tz + depth - 1) * lines * columns;
        const bool remembers = !FOLDED && deep == 1 && stages > 1;
        const int tables = sizeof(Sizes), origins = tables + TILES * (int)(2 * tz + kz) * (int)sizeof(Tile);
        const int offsets = origins + (remembers ? rows : 0) * (int)sizeof(void*), places = offsets + taps * 4;
        const int firsts = places + rows * 4, regions = (firsts + WARPGROUPS * 2 * (int)sizeof(int3) + 127) / 128 * 128;
        const int kept = regions + 2 * WORDS * (int)pieces * rows * PIECE * (int)sizeof(half);
        const int results = kept + 2 * (int)group * Tiles::TAP * (int)sizeof(half);
        n = {before_image, x_image, out_image, {}, (int)carried, (int)nz, (int)ny, (int)nx, (int)fin, (int)mz,
             (int)my, (int)mx, (int)fout, (int)images, (int)kz, (int)pz, (int)py, (int)px, (int)wide_x, (int)tz,
             (int)ty, (int)tx, (int)row_z, (int)row_y, (int)row_x, lines, columns,
             rows, deep, (int)pieces, (int)flat, (int)tiles_z, (int)tiles_y, (int)tiles_x,
             tables, origins, offsets, places, firsts, regions, kept, results,
             (int)staged_rows, 1.0f / pieces, 1.0f / tiles_x, 1.0f / tiles_y, 1.0f / tiles_z, 1.0f / mz, wide != 0,
             remembers};
        for (Arrival& arrival : n.arrivals) arrival_begin(&arrival);
    }
    sync_block();
    const float scale = WORDS == 1 && sizeof(T) == 2 ? 1.0f : scale_of(x_peak);
    const Loops loops = {(int)stages, taps, (int)group, (int)((taps + group - 1) / group),
                         sizeof(T) == 2 && !FOLDED && wide != 0};
    const Tiles product = {{n, loops, scale, x}};
    if (threadIdx.x < WARPGROUPS * Tiles::MATRICES) {
        const int uz = 7 * (int)row_z + 1, uy = 7 * (int)row_y + 1, ux = row_x ? MATRIX : 8, i = threadIdx.x;
        const int along_x = (int)tx / ux, along_y = (int)ty / uy;
        product.firsts()[i] = make_int3(i / along_x / along_y * uz, i / along_x % along_y * uy, i % along_x * ux);
    }
    for (int tap = threadIdx.x; tap < taps; tap += THREADS) {
        const int dx = tap % kx, dy = tap / kx % ky, dz = tap / (kx * ky) % depth, chunk = tap / (kx * ky * depth);
        const int line = dz * n.lines + dy * (int)step_y;
        product.offsets()[tap] = chunk * (FOLDED ? 1 : 2) * n.rows + line * n.columns + dx * (int)step_x;
    }
    for (int row = threadIdx.x; row < n.rows; row += THREADS) {
        const int all = row / n.columns, plane = all / n.lines, line = all - plane * n.lines;
        product.places()[row] =
            (plane << (LINE_BITS + COLUMN_BITS)) | (line << COLUMN_BITS) | (row - all * n.columns);
    }
    kernels += blockIdx.y * stages * taps * Tiles::TAP;

    const int from = blockIdx.y * N;
    const float back = unscale / scale;  // powers of two; if this is not a normal number, each is applied
    const bool at_once = back >= 0x1p-126f && back < INFINITY;
    const End end = {bias + from,
                     at_once ? 1.0f : unscale,
                     at_once ? back : 1.0f / scale,
                     activation == RELU ? 0.0f : -INFINITY,
                     (int)activation,
                     min((int)fout - from, N)};

    const int step = gridDim.x, all = (int)tiles;
    for (int i = 0; i < TILES - 1; ++i)
        if ((int)blockIdx.x + i * step < all) product.tabulate(blockIdx.x + i * step, product.tile(i), before, x, out);
    sync_block();
    product.begin(kernels, product.tile(0));
    int stage = 0, round = 0, slot = 0;
    float largest = 0.0f;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < all; tile += step) {
        Tile& now = product.tile(slot);
        Tile& last = product.tile(slot == 0 ? TILES - 1 : slot - 1);  // no longer needed
        slot = slot + 1 == TILES ? 0 : slot + 1;
        float sums[Tiles::MATRICES][Tiles::SUMS] = {};
        product.run(sums, kernels, stage, round, now, product.tile(slot), tile + step < all, [&] {
            if (tile + 2 * step < all) product.tabulate(tile + 2 * step, last, before, x, out);
        });
        largest = larger_magnitude(largest, product.store(sums, now, end, from, bulk != 0));
    }
    bulk_finish();
    raise_peak_by_warp(out_peak, largest);
}
