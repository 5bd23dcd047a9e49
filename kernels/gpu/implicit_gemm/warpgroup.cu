/* Convolution as a product of the lowered matrix with the kernels, both read by the tensor cores of sm_90a from shared
 * memory; padding.
 *
 * Computes   out[s, i, g] = activation(bias[g] + sum over d, f of x[s, i - padding + d, f] * kernels[g, f, d])
 * Shapes     x (S, n, f), out (S, m, f') float or half, images in C order, any number of values apart. kernels
 *            [slice of maps][stage][tap][word][2][N][8] half times a power of two, zeros where maps end; bias
 *            (slices * N) float.
 * Method     A block computes a tile: 64 voxels of out a matrix, 8 rows of 8 along x, times N maps. What the windows of
 *            the tile meet of a stage's maps, its region, lies in shared memory in pieces of 8 maps of a voxel, voxel
 *            after voxel: any 8 voxels in a row are a core of a factor (wgmma.cuh), so a tap is an offset and the
 *            lowered matrix nowhere. A stage is some chunks of 16 maps and all dz, or one; its taps (chunk, dz, dy, dx)
 *            come in groups. While one is multiplied the next group's kernels and pieces of the next stage's region
 *            come, of the next tile too. A block takes every gridDim.x-th tile.
 * Folded     few maps in: a piece is a map's 8 voxels from x on, two lines are the 16 values of a chunk, a stage has
 *            one map. Kernels have zeros where ky and kx end: what is not a number there reaches the sums.
 * Words      1: values as one float16, summed up by tensor cores, which cut off what they add: thousands of products of
 *            one sign may lose 1e-3. 2: as two, h + l, and l H + h L + h H leaves out less than 2^-21 of a product; no
 *            more than a group of taps is added up there. float values are scaled by a power of two so that the largest
 *            that there is, *x_peak, stays below 2^14.
 * Bound      tensor cores: 64 N 16 products take N / 2 cycles of theirs, and 16 + N / 4 of shared memory's.
 * Source     Chetlur et al., cuDNN, 2014, 3; the region in the lowered matrix's stead is ours.
 * Tested     tests/gpu/test_implicit_gemm.py, test_warpgroup.py
 */
#include "activation.cuh"
#include "pieces.cuh"
#include "wgmma.cuh"

constexpr int WARPGROUPS = 2, THREADS = WARPGROUPS * WARPGROUP;  // warpgroup.py
constexpr int MATRIX = 64;                                       // voxels
constexpr int AT_ONCE = 2;                                       // pieces that a thread brings through registers

/* Of a launch: in shared memory, so that the registers are for sums. */
struct alignas(16) Sizes {
    long long before_image, x_image, out_image;
    int carried, nz, ny, nx, fin, mz, my, mx, fout, images, kz, pz, py, px, wide_x;
    int tz, ty, tx;                       // of a tile
    int row_z, row_y, row_x;              // from one row of 8 voxels of a matrix to the next
    int depth, lines, columns, rows;      // of the region; depth in planes
    int deep, pieces;                     // stages of the same maps; of a voxel
    int flat;                             // planes of all images in a row
    int tiles_z, tiles_y, tiles_x;
    float by_lines, by_columns, by_pieces;
    bool wide;  // 8 maps may be read at once
};
static_assert(sizeof(Sizes) == 176, "warpgroup.py");

/* What loops around products go by: from the launch's parameters, the same for all threads as the compiler sees it. */
struct Loops {
    int stages, taps, group, groups;
    bool straight;  // pieces go from memory to the region without a thread's registers
};

/* One tile: its first voxel, where planes of its input lie, null: there is none, and of its output. */
template <class T> struct Tile {
    const T** in;
    T** out;
    int* corner;  // y, x
};
constexpr int TABLES = 3;  // of tiles: a tile's results may be on their way while the next but one begins

/* Called, since code for every sum would take registers from all of them. */
template <int KIND> CALLED float smooth(float value) { return activate<KIND>(value); }

/* Of a tile: its first map and dz. */
struct Stage {
    int map, dz;
};

template <class T, int WORDS, int N, bool FOLDED> struct Product {
    static constexpr int MATRICES = WORDS == 1 && N <= 80 ? 2 : 1;  // of a warpgroup; warpgroup.py
    static constexpr int SUMS = N / 2;
    static constexpr int TAP = WORDS * 2 * N * PIECE;  // half of kernels

    const Sizes& n;
    const Loops loops;
    void* tables;
    half *regions, *taps;
    const int* offsets;  // of taps in the region, in pieces
    const int3* firsts;  // voxels of matrices in the tile: z, y, x
    float scale;
    const T* nothing;  // an address that zeros may be copied from

    DEVICE half* region(int stage) const { return regions + (stage & 1) * WORDS * n.pieces * n.rows * PIECE; }

    DEVICE Tile<T> table(int turn) const {
        const int in = n.tz + n.kz - 1;
        const T** const first = static_cast<const T**>(tables) + turn % TABLES * (in + n.tz + 1);
        return {first, const_cast<T**>(first + in), reinterpret_cast<int*>(first + in + n.tz)};
    }

    DEVICE void tabulate(int tile, int turn, const T* before, const T* x, T* out) const {
        const Tile<T> to = table(turn);
        const int all = tile / n.tiles_x, along_z = all / n.tiles_y;
        const int first_image = n.flat ? 0 : along_z / n.tiles_z;
        const int z0 = (n.flat ? along_z : along_z - first_image * n.tiles_z) * n.tz;
        const int in = n.tz + n.kz - 1;
        for (int i = threadIdx.x; i < in + n.tz; i += THREADS) {
            const int at = z0 + (i < in ? i : i - in), image = n.flat ? at / n.mz : first_image;
            const int z = n.flat ? at - image * n.mz : at;
            if (i < in) {
                const int plane = z - n.pz;
                const bool there = image < n.images && plane >= 0 && plane < n.nz;
                const long long size = (long long)n.ny * n.nx * n.fin;
                const T* const from = plane < n.carried ? before + image * n.before_image
                                                        : x + image * n.x_image - n.carried * size;
                to.in[i] = there ? from + plane * size : nullptr;
            } else {
                const long long size = (long long)n.my * n.mx * n.fout;
                to.out[i - in] = image < n.images && z < n.mz ? out + image * n.out_image + z * size : nullptr;
            }
        }
        if (threadIdx.x == 0) to.corner[0] = (all - along_z * n.tiles_y) * n.ty;
        if (threadIdx.x == 0) to.corner[1] = (tile - all * n.tiles_x) * n.tx;
    }

    /* Where a piece of a stage's region comes from; null: zeros. `x`: the voxel, where FOLDED. */
    DEVICE const T* origin(int index, Stage stage, const Tile<T>& tile, int& row, int& piece, int& x) const {
        row = quotient(index, n.by_pieces), piece = index - row * n.pieces;
        const int all = quotient(row, n.by_columns), column = row - all * n.columns;
        const int slot = quotient(all, n.by_lines), line = all - slot * n.lines;
        const T* const plane = tile.in[slot + stage.dz];
        const int y = tile.corner[0] - n.py + line;
        x = tile.corner[1] - n.px + column;
        const int map = stage.map + (FOLDED ? piece : piece * PIECE);
        if (plane == nullptr || y < 0 || y >= n.ny || map >= n.fin || (!FOLDED && (x < 0 || x >= n.nx))) return nullptr;
        return plane + ((long long)y * n.nx + x) * n.fin + map;
    }

    DEVICE Stage stage_of(int stage) const {
        const int chunk = n.deep == 1 ? stage : stage / n.deep;
        return {chunk * n.pieces * (FOLDED ? 1 : PIECE), stage - chunk * n.deep};
    }

    DEVICE half* place(int stage, int row, int piece) const { return region(stage) + (piece * n.rows + row) * PIECE; }

    /* Pieces of the region of stage `to`, every THREADS-th from `index` on, `last` excluded. */
    DEVICE void copy(int index, int last, int to, Stage stage, const Tile<T>& tile) const {
        for (; index < last; index += THREADS) {
            int row, piece, x;
            const T* const from = origin(index, stage, tile, row, piece, x);
            cp_async<16>(place(to, row, piece), from == nullptr ? nothing : from, from != nullptr);
        }
    }

    DEVICE void bring(Piece<T> (&pieces)[AT_ONCE], int index, int last, Stage stage, const Tile<T>& tile) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, index += THREADS) {
            int row, piece, x;
            const T* const from = index < last ? origin(index, stage, tile, row, piece, x) : nullptr;
            if (from == nullptr)
                pieces[i].clear();
            else if (FOLDED)
                pieces[i].load_line(from, n.fin, -x, min(n.nx - x, n.wide_x));
            else if (n.wide)
                pieces[i].load(from);
            else
                pieces[i].load_line(from, 1, 0, n.fin - stage.map - piece * PIECE);
        }
    }

    DEVICE void put(const Piece<T> (&pieces)[AT_ONCE], int index, int last, int to) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, index += THREADS) {
            if (index >= last) break;
            const int row = quotient(index, n.by_pieces);
            pieces[i].template put<WORDS>(place(to, row, index - row * n.pieces), n.pieces * n.rows * PIECE, scale);
        }
    }

    DEVICE void bring_taps(half* to, const half* from, int count) const {
        for (int i = threadIdx.x; i < count * (TAP / PIECE); i += THREADS)
            cp_async<16>(to + i * PIECE, from + i * PIECE);
    }

    /* The first region and the first kernels. */
    DEVICE void begin(const half* kernels, const Tile<T>& tile) const {
        const int last = n.pieces * n.rows;
        if (loops.straight) copy(threadIdx.x, last, 0, {0, 0}, tile);
        for (int index = threadIdx.x; !loops.straight && index < last; index += AT_ONCE * THREADS) {
            Piece<T> some[AT_ONCE];
            bring(some, index, last, {0, 0}, tile);
            put(some, index, last, 0);
        }
        bring_taps(taps, kernels, min(loops.group, loops.taps));
        cp_async_commit();
    }

    DEVICE void multiply(float (&sums)[MATRICES][SUMS], const unsigned long long (&rows)[MATRICES], const half* kernels,
                         int stage, int first, int count) const {
        const unsigned long long factor = wgmma_factor(kernels, N, PIECE);
        const int low = n.pieces * n.rows, begin = (stage & 1) * WORDS * low;
        sync_warp();
        wgmma_begin(sums);
        if (WORDS == 2) {  // the small ones first: less is cut off
            unsigned long long at = factor;
#pragma unroll 1
            for (int tap = first; tap < first + count; ++tap, at += TAP / PIECE) {
                const int offset = begin + offsets[tap];
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
            const int offset = begin + offsets[tap];
#pragma unroll
            for (int i = 0; i < MATRICES; ++i) wgmma_half<N>(sums[i], rows[i] + offset, at, true);
        }
        wgmma_end();
    }

    /* A tile, whose first region and kernels are there or on their way: its sums. `stage` and `round` go on from tile
     * to tile; `next`: the tile behind it, if `follows`. */
    DEVICE void run(float (&sums)[MATRICES][SUMS], const half* kernels, int& stage, int& round, const Tile<T>& tile,
                    const Tile<T>& next, bool follows) const {
        unsigned long long rows[MATRICES];
        const int along_rows = (n.row_z * n.lines + n.row_y) * n.columns + n.row_x;
#pragma unroll
        for (int i = 0; i < MATRICES; ++i) {
            const int3 at = firsts[shuffle((int)threadIdx.x / WARPGROUP, 0) * MATRICES + i];
            rows[i] = wgmma_factor(regions + ((at.x * n.lines + at.y) * n.columns + at.z) * PIECE,
                                   FOLDED ? n.columns : n.rows, along_rows);
        }
        const int buffer = loops.group * TAP, last = n.pieces * n.rows;
        const int share = (last + loops.groups - 1) / loops.groups;  // of the region, brought beside a group of taps
        const half* coming = kernels;
        float parts[MATRICES][SUMS];
#pragma unroll 1
        for (int done = 0; done < loops.stages; ++done, ++stage) {
            const bool ends = done + 1 == loops.stages, more = !ends || follows;
            const Tile<T>& behind = ends ? next : tile;
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
                    bring_taps(taps + ((round + 1) & 1) * buffer, coming, wanted);
                }
                const int end = more ? min(begin + share, last) : 0;
                Piece<T> some[AT_ONCE];
                int index = begin + threadIdx.x;
                if (!loops.straight) bring(some, index, end, following, behind);
                multiply(WORDS == 2 ? parts : sums, rows, taps + (round & 1) * buffer, stage, first, count);
                if (loops.straight) copy(index, end, stage + 1, following, behind);
                cp_async_commit();
                if (!loops.straight) {
#pragma unroll 1
                    while (true) {
                        put(some, index, end, stage + 1);
                        index += AT_ONCE * THREADS;
                        if (index >= end) break;
                        bring(some, index, end, following, behind);
                    }
                }
                finish(sums, parts);
            }
        }
    }

    /* Wait for the products of a group of taps. */
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

    /* Sums become results. The kind is asked for once: were it for every value, the code would not fit its cache. */
    DEVICE void conclude(float (&sums)[MATRICES][SUMS], const float* bias, float unscale, int activation) const {
        const float back = 1.0f / scale;  // one after the other: their product may be too small for a number
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 added = load_activation2(bias + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
            for (int i = 0; i < MATRICES; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums[i][4 * j + e] = back * (unscale * sums[i][4 * j + e]) + (e % 2 ? added.y : added.x);
        }
        if (activation == RELU) conclude_by<RELU>(sums);
        if (activation == TANH) conclude_by<TANH>(sums);
        if (activation == SIGMOID) conclude_by<SIGMOID>(sums);
    }

    template <int KIND> DEVICE void conclude_by(float (&sums)[MATRICES][SUMS]) const {
#pragma unroll
        for (int i = 0; i < MATRICES * SUMS; ++i) {
            float& sum = sums[i / SUMS][i % SUMS];
            sum = KIND == RELU ? activate<KIND>(sum) : smooth<KIND>(sum);
        }
    }

    /* Write a tile's results; the largest magnitude. `left`: maps from this block's first on. `quads`: four may be
     * written at once. */
    DEVICE float store(const float (&sums)[MATRICES][SUMS], const Tile<T>& tile, int left, bool quads) const {
        const int thread = threadIdx.x % WARPGROUP, lane = thread % WARP, odd = lane % 2;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < MATRICES * 2; ++i) {
            const int3 first = firsts[threadIdx.x / WARPGROUP * MATRICES + i / 2];
            const int row = thread / WARP * 2 + i % 2;
            T* const plane = tile.out[first.x + row * n.row_z];
            const int y = tile.corner[0] + first.y + row * n.row_y;
            const int x = tile.corner[1] + first.z + row * n.row_x + lane / 4;
            const bool there = plane != nullptr && y < n.my && x < n.mx;
            T* const to = plane + ((long long)y * n.mx + x) * n.fout + (n.fout - left) + 8 * odd + lane % 4 / 2 * 4;
            const float* const all = sums[i / 2] + 2 * (i % 2);
#pragma unroll
            for (int j = 0; j < N / 8; j += 2) {  // even lanes write four maps of the first 8, odd ones of the next
                const float* const s = all + 4 * j;
                const float a = shuffle_xor(odd ? s[0] : s[4], 1), b = shuffle_xor(odd ? s[1] : s[5], 1);
                const float4 four = odd ? make_float4(a, b, s[4], s[5]) : make_float4(s[0], s[1], a, b);
                const int more = left - 8 * (j + odd) - lane % 4 / 2 * 4;
                if (!there || more <= 0) continue;
                largest = larger_magnitude(largest, four.x);
                if (more > 1) largest = larger_magnitude(largest, four.y);
                if (more > 2) largest = larger_magnitude(largest, four.z);
                if (more > 3) largest = larger_magnitude(largest, four.w);
                if (quads) {
                    store_activation4(to + 8 * j, four);
                    continue;
                }
                store_activation(to + 8 * j, four.x);
                if (more > 1) store_activation(to + 8 * j + 1, four.y);
                if (more > 2) store_activation(to + 8 * j + 2, four.z);
                if (more > 3) store_activation(to + 8 * j + 3, four.w);
            }
        }
        return largest;
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
                       long long flat, long long tiles, long long wide, long long quads, long long activation) {
    using Tiles = Product<T, WORDS, N, FOLDED>;
    EXTERN_SHARED(Sizes, shared);  // then tables of tiles, offsets of taps, regions, kernels of taps
    const Sizes& n = *shared;
    const int deep = (int)(depth == kz ? 1 : kz), taps = (int)(chunks * depth * ky * kx);
    if (threadIdx.x == 0) {
        const int lines = (int)(ty + (ky - 1) * step_y + (FOLDED ? 1 : 0)), columns = (int)(tx + (kx - 1) * step_x);
        const int planes = (int)(tz + depth - 1);
        *shared = {before_image, x_image, out_image, (int)carried, (int)nz, (int)ny, (int)nx, (int)fin, (int)mz,
                   (int)my, (int)mx, (int)fout, (int)images, (int)kz, (int)pz, (int)py, (int)px, (int)wide_x, (int)tz,
                   (int)ty, (int)tx, (int)row_z, (int)row_y, (int)row_x, planes, lines, columns,
                   planes * lines * columns, deep, (int)pieces, (int)flat, (int)tiles_z, (int)tiles_y, (int)tiles_x,
                   1.0f / lines, 1.0f / columns, 1.0f / pieces, wide != 0};
    }
    sync_block();
    void* const tables = shared + 1;
    int* const offsets = reinterpret_cast<int*>(static_cast<long long*>(tables) + TABLES * (2 * tz + kz));
    int3* const firsts = reinterpret_cast<int3*>(offsets + taps);
    const size_t end = reinterpret_cast<size_t>(firsts + WARPGROUPS * 2);
    half* const regions = reinterpret_cast<half*>((end + 127) / 128 * 128);
    if (threadIdx.x < WARPGROUPS * Tiles::MATRICES) {
        const int uz = 7 * (int)row_z + 1, uy = 7 * (int)row_y + 1, ux = row_x ? MATRIX : 8, i = threadIdx.x;
        const int along_x = (int)tx / ux, along_y = (int)ty / uy;
        firsts[i] = make_int3(i / along_x / along_y * uz, i / along_x % along_y * uy, i % along_x * ux);
    }
    for (int tap = threadIdx.x; tap < taps; tap += THREADS) {
        const int dx = tap % kx, dy = tap / kx % ky, dz = tap / (kx * ky) % depth, chunk = tap / (kx * ky * depth);
        const int line = dz * n.lines + dy * (int)step_y;
        offsets[tap] = chunk * (FOLDED ? 1 : 2) * n.rows + line * n.columns + dx * (int)step_x;
    }
    const float scale = WORDS == 1 && sizeof(T) == 2 ? 1.0f : scale_of(x_peak);
    const Loops loops = {(int)stages, taps, (int)group, (int)((taps + group - 1) / group),
                         sizeof(T) == 2 && !FOLDED && wide != 0};
    half* const kept = regions + 2 * WORDS * pieces * n.rows * PIECE;
    const Tiles product = {n, loops, tables, regions, kept, offsets, firsts, scale, x};
    kernels += blockIdx.y * stages * taps * Tiles::TAP;

    product.tabulate(blockIdx.x, 0, before, x, out);
    sync_block();
    product.begin(kernels, product.table(0));
    int stage = 0, round = 0, turn = 0;
    float largest = 0.0f;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < (int)tiles; tile += (int)gridDim.x, ++turn) {
        const bool more = tile + (int)gridDim.x < (int)tiles;
        if (more) product.tabulate(tile + (int)gridDim.x, turn + 1, before, x, out);
        const Tile<T> now = product.table(turn);
        float sums[Tiles::MATRICES][Tiles::SUMS] = {};
        product.run(sums, kernels, stage, round, now, product.table(turn + 1), more);
        product.conclude(sums, bias + blockIdx.y * N, unscale, (int)activation);
        largest = larger_magnitude(largest, product.store(sums, now, (int)fout - (int)blockIdx.y * N, quads != 0));
    }
    raise_peak_by_warp(out_peak, largest);
}
